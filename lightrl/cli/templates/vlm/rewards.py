"""The reward function. `lightrl fit` calls it once per prompt, with all completions of that prompt."""


def correct(prompts, completions, answer, **columns):
    """Returns 1 if the completion equals the answer, 0.1 if it contains the answer, and 0 otherwise.

    Args:
        prompts: List of n prompts.
        completions: List of n completions.
        answer: List of n values of the column `answer` in rows.jsonl.
        columns: All other columns, also lists of n values. Add an argument `images` to get decoded images.

    Returns:
        List of n rewards. None leaves a completion unscored.
    """
    values = []
    for text, wanted in zip(completions, answer, strict=True):
        said = text.strip().strip(".").lower()
        values.append(1.0 if said == wanted else 0.1 * (wanted in said))
    return values

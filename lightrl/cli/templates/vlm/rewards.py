"""What is rewarded. `lightrl fit` calls the function with all completions of a prompt at once."""


def correct(prompts, completions, answer, **columns):
    """1 where the completion is the row's answer, a tenth where it holds it. `answer` is a column of rows.jsonl.

    Args:
        prompts: n strings. completions: n strings.
        answer: n values of that column. columns: the other columns; name `images` to get the pictures, decoded.

    Returns:
        n numbers; None for a completion that this function says nothing about.
    """
    values = []
    for text, wanted in zip(completions, answer, strict=True):
        said = text.strip().strip(".").lower()
        values.append(1.0 if said == wanted else 0.1 * (wanted in said))
    return values

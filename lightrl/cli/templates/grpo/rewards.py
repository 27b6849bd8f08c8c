"""The reward function. `lightrl fit` calls it once per prompt, with all completions of that prompt."""

import re


def correct(prompts, completions, answer, **columns):
    """Returns 1 if the last number in the completion equals the answer, and 0 otherwise.

    Args:
        prompts: List of n prompts.
        completions: List of n completions.
        answer: List of n values of the column `answer` in rows.jsonl.
        columns: All other columns, also lists of n values.

    Returns:
        List of n rewards. None leaves a completion unscored.
    """
    numbers = [re.findall(r"-?\d+", completion) for completion in completions]
    return [float(bool(found) and found[-1] == str(wanted)) for found, wanted in zip(numbers, answer, strict=True)]

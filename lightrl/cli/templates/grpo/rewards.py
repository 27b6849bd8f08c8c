"""What is rewarded. `lightrl fit` calls the function with all completions of a prompt at once."""

import re


def correct(prompts, completions, answer, **columns):
    """1 where the last number of the completion is the row's answer, else 0. `answer` is a column of rows.jsonl.

    Args:
        prompts: n strings. completions: n strings.
        answer: n values of that column. columns: the other columns.

    Returns:
        n numbers; None for a completion that this function says nothing about.
    """
    numbers = [re.findall(r"-?\d+", completion) for completion in completions]
    return [float(bool(found) and found[-1] == str(wanted)) for found, wanted in zip(numbers, answer, strict=True)]

"""Extracts the final answer from a text. Each function returns None if it finds none."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import regex

if TYPE_CHECKING:
    from lightrl.records import Rollouts
    from lightrl.rewards.scorer import RewardScorer

Extract: TypeAlias = Literal["text", "gsm8k", "boxed", "number", "tags", "last_line"]
_TIMEOUT = 1.0
"""Time limit of a pattern in seconds per text."""
_GROUPED = r"\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)"  # with thousands separators, unlike the list "1,2,3"
_NUMBER = rf"-?\$?(?:(?:{_GROUPED}|\d+)(?:\.\d+)?|\.\d+)"
_GSM8K = re.compile(rf"####\s*({_NUMBER})")
_LAST_NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}")


def extract_gsm8k(text: str) -> str | None:
    """The number after the last `####`, without thousands separators and dollar sign: `"... #### $1,042"` -> `"1042"`.

    Source: https://github.com/openai/grade-school-math (`extract_answer`). Uses the last marker, because a completion
    may quote the format before answering.
    """
    found = _GSM8K.findall(text)
    return _bare(found[-1]) if found else None


def extract_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` with balanced braces: `r"\boxed{\frac{1}{2}}"` -> `r"\frac{1}{2}"`.

    Source: https://github.com/hendrycks/math (`last_boxed_only_string`). Ignores `\fbox`, `\boxed 1`, and unclosed
    boxes (from truncated completions).
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    text, depth = text[start + len("\\boxed{") :], 1
    for found in re.finditer(r"\\.|[{}]", text):  # \{ and \} are literal braces
        depth += (found[0] == "{") - (found[0] == "}")
        if depth == 0:
            return text[: found.start()].strip()
    return None


def extract_number(text: str) -> str | None:
    """The last number, without thousands separators and dollar sign: `"3 + 4 = 7."` -> `"7"`."""
    found = _LAST_NUMBER.findall(text)
    return _bare(found[-1]) if found else None


def to_number(text: str) -> Decimal | None:
    """Converts the entire text to an exact number; None if it is not a number."""
    try:
        number = Decimal(_bare(text.strip()))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _bare(number: str) -> str:
    return re.sub(_GROUPED, lambda found: found[0].replace(",", ""), number).replace("$", "")


def extract_tags(text: str) -> str | None:
    """The text in the last `<answer>...</answer>`."""
    _, found, rest = text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return answer.strip() if found and closed else None


def extract_last_line(text: str) -> str | None:
    """The last non-blank line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "text": str.strip,
    "gsm8k": extract_gsm8k,
    "boxed": extract_boxed,
    "number": extract_number,
    "tags": extract_tags,
    "last_line": extract_last_line,
}


class TimedPattern:
    r"""A regular expression in `re` syntax with a time limit of one second. Methods raise a `TimeoutError` after it.

    Patterns such as `(\w+\s?)*\.` take exponential time on some texts, and Python's `re` holds the GIL while matching.
    The `regex` package releases the GIL and supports time limits.
    """

    def __init__(self, pattern: str) -> None:
        self._compiled = regex.compile(pattern)

    def fullmatch(self, text: str) -> bool:
        """Whether the entire text matches."""
        return self._run(self._compiled.fullmatch, text) is not None

    def search(self, text: str) -> bool:
        """Whether the pattern matches anywhere in the text."""
        return self._run(self._compiled.search, text) is not None

    def last(self, text: str) -> str | None:
        """The first group (or all) of the last match; None without a match."""
        matches = self._run(self._compiled.findall, text)
        if not matches:
            return None
        found = matches[-1]
        return str(found[0] if isinstance(found, tuple) else found)

    def _run(self, method: Any, text: str) -> Any:
        try:
            return method(text, timeout=_TIMEOUT, concurrent=True)
        except MemoryError as error:  # its backtracking stack is bounded
            raise TimeoutError("The pattern ran out of memory.") from error


def final_answers(rollouts: Rollouts, scorer: RewardScorer | None, own: Any = None) -> list[str]:
    """Returns the extracted answer of each completion, or its whole text if there is none. See `Evaluation.answer`."""
    labels: list[Any] = [None] * len(rollouts)
    ways: list[Callable[[str, Any], str | None]] = [lambda text, label: extract_boxed(text) or extract_gsm8k(text)]
    if scorer is not None:
        labels = rollouts.columns.get(scorer.label_column, labels)
        ways.insert(0, scorer.extract_answer)
    if own is not None:
        ways.insert(0, lambda text, label: own(text))
    return [
        next((answer for way in ways if (answer := way(text, label)) is not None), text.strip())
        for text, label in zip(rollouts.completions, labels, strict=True)
    ]

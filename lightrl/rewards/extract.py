"""Finds the final answer in a text. Each function returns None where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Literal, TypeAlias

Extract: TypeAlias = Literal["text", "gsm8k", "boxed", "number"]
_NUMBER = r"-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_GSM8K = re.compile(rf"####\s*({_NUMBER})")
_LAST_NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}")


def extract_gsm8k(text: str) -> str | None:
    """The number after the last `####`, without thousands separators and dollar sign: `"... #### $1,042"` -> `"1042"`.

    Source: https://github.com/openai/grade-school-math (`extract_answer`). We take the last mark and not the first,
    since a completion may quote the format before it answers.
    """
    found = _GSM8K.findall(text)
    return _plain(found[-1]) if found else None


def extract_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, braces balanced: `r"\boxed{\frac{1}{2}}"` -> `r"\frac{1}{2}"`.

    Source: https://github.com/hendrycks/math (`last_boxed_only_string`). We do not take `\fbox` or `\boxed 1`, and a
    box that is never closed (a truncated completion) is no answer.
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        escaped = text[end - 1] == "\\"  # \{ and \} are printed braces
        depth += 0 if escaped else (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end].strip()
    return None


def extract_number(text: str) -> str | None:
    """The last number in the text, without thousands separators and dollar sign: `"3 + 4 = 7."` -> `"7"`."""
    found = _LAST_NUMBER.findall(text)
    return _plain(found[-1]) if found else None


def to_number(text: str) -> Decimal | None:
    """The number that the whole text is, exactly; None where it is not one number."""
    try:
        number = Decimal(_plain(text.strip()))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "text": lambda text: text,
    "gsm8k": extract_gsm8k,
    "boxed": extract_boxed,
    "number": extract_number,
}

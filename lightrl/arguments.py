"""Ranges and choices of arguments: one wording for all that refuse a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["above", "at_least", "fraction", "one_of"]

T = TypeVar("T")


def at_least(name: str, value: T, low: float, note: str = "", *, or_none: str | None = None) -> T:
    """The value if it is `low` or more.

    Args:
        name: what the message calls the argument, such as `SampleLog.num_samples`.
        value: a number; NaN is refused.
        low: the smallest that is allowed.
        note: end of the message, behind what is allowed.
        or_none: what None stands for, such as "for no limit"; without it None is refused.

    Raises:
        ValueError: with the name, the value and what is allowed.
    """
    return _checked(name, value, lambda x: x >= low, f"at least {low:g}{note}", or_none)


def above(name: str, value: T, low: float = 0, note: str = "", *, or_none: str | None = None) -> T:
    """The value if it is above `low`; otherwise as `at_least`."""
    return _checked(name, value, lambda x: x > low, f"above {low:g}{note}", or_none)


def fraction(name: str, value: T, bounds: str = "[0, 1]", note: str = "", *, or_none: str | None = None) -> T:
    """The value if it is in the interval from 0 to 1 whose brackets say which ends belong to it, such as `(0, 1]`."""

    def inside(x: float) -> bool:
        return (x >= 0 if bounds[0] == "[" else x > 0) and (x <= 1 if bounds[-1] == "]" else x < 1)

    return _checked(name, value, inside, f"in {bounds}{note}", or_none)


def one_of(name: str, value: T, *choices: T) -> T:
    """The value if it is one of the choices; otherwise as `at_least`."""
    *most, last = map(repr, choices)
    return _checked(name, value, lambda x: x in choices, f"{', '.join(most)} or {last}", None)


def _checked(name: str, value: T, ok: Callable[[Any], bool], allowed: str, or_none: str | None) -> T:
    if not (or_none is not None if value is None else ok(value)):
        raise ValueError(f"{name}={value!r}: must be {allowed}{'' if or_none is None else f', or None {or_none}'}.")
    return value

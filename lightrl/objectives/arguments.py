"""Ranges of the numbers that estimators, losses and penalties are built with."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["at_least", "fraction", "one_of", "positive"]

T = TypeVar("T")
N = TypeVar("N", int, float)


def fraction(owner: str, name: str, value: float, why: str = "") -> float:
    """The value of `owner`'s argument `name` if it is in [0, 1]; a ValueError otherwise, which ends with `why`."""
    return _checked(owner, name, value, 0 <= value <= 1, "in [0, 1]" + why)


def positive(owner: str, name: str, value: float, why: str = "") -> float:
    """The value if it is above 0; otherwise as `fraction`."""
    return _checked(owner, name, value, value > 0, "above 0" + why)


def at_least(owner: str, name: str, value: N, low: float, why: str = "") -> N:
    """The value if it is `low` or more; otherwise as `fraction`."""
    return _checked(owner, name, value, value >= low, f"at least {low}{why}")


def one_of(owner: str, name: str, value: T, *choices: T) -> T:
    """The value if it is one of the choices; otherwise as `fraction`."""
    *most, last = map(repr, choices)
    return _checked(owner, name, value, value in choices, f"{', '.join(most)} or {last}")


def _checked(owner: str, name: str, value: T, ok: bool, allowed: str) -> T:
    if not ok:
        raise ValueError(f"{owner}({name}={value!r}): must be {allowed}.")
    return value

"""Tiny coding tasks: a request for a Python function, and hidden tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import Dataset

INTEGERS: list[tuple[Any, ...]] = [(2, 3), (7, 1), (-4, 9), (5, 5)]
NUMBERS: list[tuple[Any, ...]] = [(4,), (-3,), (0,), (11,)]
LISTS: list[tuple[Any, ...]] = [([3, 1, 2],), ([5],), ([4, -2, 7, 7],), ([10, 20],)]
WORDS: list[tuple[Any, ...]] = [("hello",), ("Level",), ("a b",), ("Python",)]

Task = tuple[str, str, Callable[..., Any], list[tuple[Any, ...]]]
TASKS: list[Task] = [
    ("add(a, b)", "the sum of a and b", lambda a, b: a + b, INTEGERS),
    ("subtract(a, b)", "a minus b", lambda a, b: a - b, INTEGERS),
    ("multiply(a, b)", "the product of a and b", lambda a, b: a * b, INTEGERS),
    ("larger(a, b)", "the larger of a and b", max, INTEGERS),
    ("is_equal(a, b)", "True if a equals b, else False", lambda a, b: a == b, INTEGERS),
    ("double(n)", "n times 2", lambda n: 2 * n, NUMBERS),
    ("square(n)", "the square of n", lambda n: n * n, NUMBERS),
    ("cube(n)", "n to the power of 3", lambda n: n**3, NUMBERS),
    ("is_even(n)", "True if n is even, else False", lambda n: n % 2 == 0, NUMBERS),
    ("is_positive(n)", "True if n is greater than 0, else False", lambda n: n > 0, NUMBERS),
    ("negate(n)", "the negative of n", lambda n: -n, NUMBERS),
    ("add_one(n)", "n plus 1", lambda n: n + 1, NUMBERS),
    ("total(numbers)", "the sum of a list of numbers", sum, LISTS),
    ("largest(numbers)", "the largest number in a list", max, LISTS),
    ("count(numbers)", "the length of a list", len, LISTS),
    ("first(numbers)", "the first element of a list", lambda x: x[0], LISTS),
    ("ascending(numbers)", "a sorted copy of a list", sorted, LISTS),
    ("uppercase(text)", "the text in upper case", str.upper, WORDS),
    ("backwards(text)", "the text reversed", lambda t: t[::-1], WORDS),
    ("length(text)", "the number of characters in the text", len, WORDS),
]
HELD_OUT: list[Task] = [
    ("plus(x, y)", "x plus y", lambda a, b: a + b, INTEGERS),
    ("smaller(a, b)", "the smaller of a and b", min, INTEGERS),
    ("difference(a, b)", "the absolute difference of a and b", lambda a, b: abs(a - b), INTEGERS),
    ("triple(n)", "n times 3", lambda n: 3 * n, NUMBERS),
    ("is_odd(n)", "True if n is odd, else False", lambda n: n % 2 == 1, NUMBERS),
    ("is_negative(n)", "True if n is less than 0, else False", lambda n: n < 0, NUMBERS),
    ("smallest(numbers)", "the smallest number in a list", min, LISTS),
    ("last(numbers)", "the last element of a list", lambda x: x[-1], LISTS),
    ("lowercase(text)", "the text in lower case", str.lower, WORDS),
    ("first_letter(text)", "the first character of the text", lambda t: t[0], WORDS),
]


class Tasks:
    """Examples with the columns `prompt` and `tests`.

    Args:
        split: "train", or "eval" for held-out tasks.
        repeats: Number of times that each task appears.
    """

    def __init__(self, split: str = "train", repeats: int = 1) -> None:
        self.tasks = HELD_OUT if split == "eval" else TASKS
        self.repeats = repeats

    def __call__(self) -> Dataset:
        rows = [
            {
                "prompt": f"Write a Python function `{call}` that returns {what}. Reply with the code only.",
                "tests": [f"assert {call.split('(')[0]}{_arguments(case)} == {function(*case)!r}" for case in cases],
            }
            for call, what, function, cases in self.tasks
        ]
        return Dataset.from_list(rows * self.repeats)


def _arguments(case: tuple[Any, ...]) -> str:
    return f"({', '.join(map(repr, case))})"

"""Sums of three numbers: rows of the question and its answer."""

from __future__ import annotations

import random

from datasets import Dataset

NUM_HELD_OUT = 128


class Tasks:
    """Triples of two-digit numbers.

    Args:
        split: "eval" for the held-out ones, else 4,000 others.
    """

    def __init__(self, split: str = "train") -> None:
        self.split = split

    def __call__(self) -> Dataset:
        rng = random.Random(0)
        drawn = list(dict.fromkeys(tuple(rng.randint(10, 99) for _ in range(3)) for _ in range(4200)))
        chosen = drawn[:NUM_HELD_OUT] if self.split == "eval" else drawn[NUM_HELD_OUT : NUM_HELD_OUT + 4000]
        return Dataset.from_list(
            [{"prompt": "Sum {} {} {}".format(*numbers), "answer": sum(numbers)} for numbers in chosen]
        )

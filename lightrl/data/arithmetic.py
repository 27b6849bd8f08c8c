"""The quickstart's task: generated sums of two numbers, with a held-out evaluation set."""

from __future__ import annotations

import random
from typing import Any, Literal

from datasets import Dataset


class ArithmeticRows:
    """Addition problems `a + b`, for `rows` of a `PromptSource` or an `SFTSource`.

    Numbers have leading zeros, so all prompts have `2 * digits + 2` characters and all answers `digits + 1`. The
    `100 ** digits` pairs (a, b) are shuffled by `seed`. The first `num_eval` pairs form the evaluation set and the
    others the training set.

    Columns: `prompt` ("12+34="), `answer` ("046"), and `completion`, a copy of `answer` for SFT.

    Args:
        digits: Number of digits, 1 to 3.
        split: "train" or "eval".
        size: Number of examples. Defaults to all.
        num_eval: Size of the held-out evaluation set.
        seed: Random seed for the split. Use the same value for training and evaluation, otherwise they overlap.
    """

    def __init__(
        self,
        digits: int = 2,
        split: Literal["train", "eval"] = "train",
        size: int | None = None,
        num_eval: int = 256,
        seed: int = 0,
    ) -> None:
        self.digits = digits
        self.split = split
        self.num_eval = num_eval
        self.seed = seed
        self.size = size

    def __call__(self) -> Dataset:
        """Returns the examples, the same ones at each call."""
        base = 10**self.digits
        deck = random.Random(self.seed).sample(range(base * base), base * base)
        deck = deck[: self.num_eval] if self.split == "eval" else deck[self.num_eval :]
        return Dataset.from_list([self._row(*divmod(card, base)) for card in deck[: self.size]])

    def _row(self, a: int, b: int) -> dict[str, Any]:
        answer = f"{a + b:0{self.digits + 1}d}"
        return {"prompt": f"{a:0{self.digits}d}+{b:0{self.digits}d}=", "answer": answer, "completion": answer}

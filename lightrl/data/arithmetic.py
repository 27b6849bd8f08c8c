"""The quickstart's task: generated sums of two numbers, with a held-out evaluation set."""

from __future__ import annotations

import random
from typing import Any, Literal

from datasets import Dataset

from lightrl.compat.arguments import one_of


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
        seed: Random seed of the split. Use the same value for training and evaluation, otherwise they overlap.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        digits: int = 2,
        split: Literal["train", "eval"] = "train",
        size: int | None = None,
        num_eval: int = 256,
        seed: int = 0,
    ) -> None:
        self.digits = one_of("digits", digits, 1, 2, 3)
        self.split = one_of("split", split, "train", "eval")
        total = 100**digits
        if not 0 < num_eval < total:
            raise ValueError(f"num_eval={num_eval}: there are only {total} sums. Use 1 to {total - 1}.")
        available = num_eval if split == "eval" else total - num_eval
        if size is not None and not 1 <= size <= available:
            raise ValueError(f"size={size}: split={split!r} has {available} examples. Use 1 to {available}.")
        self.num_eval = num_eval
        self.seed = seed
        self.size = available if size is None else size

    def __call__(self) -> Dataset:
        """Returns the examples, the same ones at each call."""
        base = 10**self.digits
        start = 0 if self.split == "eval" else self.num_eval
        # Of the shuffled pairs, evaluation takes the first and training the rest.
        deck = random.Random(self.seed).sample(range(base * base), base * base)[start : start + self.size]
        return Dataset.from_list([self._row(*divmod(card, base)) for card in deck])

    def _row(self, a: int, b: int) -> dict[str, Any]:
        answer = f"{a + b:0{self.digits + 1}d}"
        return {"prompt": f"{a:0{self.digits}d}+{b:0{self.digits}d}=", "answer": answer, "completion": answer}

"""The quickstart's task: sums of two numbers, made by code, with evaluation rows that training never sees."""

from __future__ import annotations

import random
from typing import Any, Literal

from datasets import Dataset

from lightrl.compat.arguments import one_of


class ArithmeticRows:
    """Rows of `a + b`, for `rows` of a `PromptSource` or an `SFTSource`.

    Every number has leading zeros, so all prompts are `2 * digits + 2` characters and all answers `digits + 1`. All
    `100 ** digits` pairs (a, b) are dealt out by `seed`: the first `num_eval` are the evaluation rows, the others are
    for training. The two never share a pair.

    Columns: `prompt` ("12+34="), `answer` ("046"), and `completion`, which equals `answer`, for supervised training.

    Args:
        digits: of each number, 1 to 3.
        split: "train" or "eval".
        size: number of rows; None is all there are.
        num_eval: size of the held-out set that `split="eval"` draws from and `split="train"` leaves out.
        seed: deals the pairs out. Give the same to training and evaluation rows, or they overlap.

    Raises:
        ValueError: an argument is out of its range.
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
            raise ValueError(f"num_eval={num_eval}: must be between 1 and {total - 1}, there are {total} sums.")
        available = num_eval if split == "eval" else total - num_eval
        if size is not None and not 1 <= size <= available:
            raise ValueError(f"size={size}: split={split!r} has {available} rows.")
        self.num_eval = num_eval
        self.seed = seed
        self.size = available if size is None else size

    def __call__(self) -> Dataset:
        """The rows, the same ones at each call."""
        base = 10**self.digits
        start = 0 if self.split == "eval" else self.num_eval
        # One shuffled deck of all pairs: evaluation takes its top, training the rest.
        deck = random.Random(self.seed).sample(range(base * base), base * base)[start : start + self.size]
        return Dataset.from_list([self._row(*divmod(card, base)) for card in deck])

    def _row(self, a: int, b: int) -> dict[str, Any]:
        answer = f"{a + b:0{self.digits + 1}d}"
        return {"prompt": f"{a:0{self.digits}d}+{b:0{self.digits}d}=", "answer": answer, "completion": answer}

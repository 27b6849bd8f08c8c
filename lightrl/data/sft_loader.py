"""Batches of SFT examples in a resumable order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch

from lightrl.data.rows import shuffled_order
from lightrl.records import pad_rows


class Example(NamedTuple):
    """An SFT example: token IDs, which of them are trained, and a function that computes the additional model inputs.

    The pixels of a whole dataset would not fit into memory, so each batch recomputes them.
    """

    token_ids: list[int]
    trained: list[bool]
    inputs: Callable[[], dict[str, Any]] | None = None


@dataclass(eq=False)
class SFTLoader:
    """Loader of tokenized examples in an order that depends only on (seed, pass). Can resume within a pass.

    A batch contains `token_ids` (B, T) int64, right-padded; `attention_mask` (B, T) bool, True on real tokens; and
    `response_mask` (B, T) bool, True on trained completion tokens, including the end of each turn. For models with
    media, `inputs` contains B dictionaries of extra model inputs.

    `train` shuffles and drops incomplete batches. Otherwise, each example is returned once in order, and ranks without
    examples repeat one with an empty `response_mask`.
    """

    rows: Sequence[Example]
    batch_size: int  # per rank, B
    pad_token_id: int
    _: KW_ONLY
    seed: int = 0
    train: bool = True
    rank: int = 0
    world_size: int = 1
    epoch: int = field(default=0, init=False)
    position: int = field(default=0, init=False)
    repeats: bool = field(default=False, init=False)  # every pass has the order of the first, from its start

    def __post_init__(self) -> None:
        if self.train and len(self) == 0:
            raise ValueError(
                f"batch_size={self.batch_size}: {self.world_size} rank(s) need {self.batch_size * self.world_size} "
                f"examples, but there are only {len(self.rows)}. Lower it."
            )

    def __len__(self) -> int:
        whole = self.batch_size * self.world_size
        return len(self.rows) // whole if self.train else -(-len(self.rows) // whole)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields one pass of batches. Training continues after the last one, also if an epoch was shorter."""
        if not self.train or self.repeats:
            self.position = 0
        whole = self.batch_size * self.world_size
        order: Any = None if self.train else range(len(self.rows))
        for _ in range(len(self)):
            if self.position >= len(self):
                self.epoch, self.position, order = self.epoch + 1, 0, None
            order = shuffled_order(len(self.rows), self.seed, self.epoch) if order is None else order
            picks = order[self.position * whole : (self.position + 1) * whole][self.rank :: self.world_size]
            self.position += 1
            yield self.collate([self.rows[int(i)] for i in picks])

    def collate(self, rows: Sequence[Example]) -> dict[str, Any]:
        rows = rows or [self.rows[0]._replace(trained=[False] * len(self.rows[0].token_ids))]
        batch: dict[str, Any] = {
            "token_ids": pad_rows([row.token_ids for row in rows], self.pad_token_id, torch.long),
            "attention_mask": pad_rows([[1] * len(row.token_ids) for row in rows], 0, torch.bool),
            "response_mask": pad_rows([row.trained for row in rows], 0, torch.bool),
        }
        inputs = [row.inputs() for row in rows if row.inputs is not None]
        return {**batch, "inputs": inputs} if inputs else batch

    def state_dict(self) -> dict[str, int]:
        """Returns the seed, the pass, the position within it, and the number of examples of all ranks per batch."""
        passes, position = divmod(self.position, len(self))
        whole = self.batch_size * self.world_size
        return {"seed": self.seed, "epoch": self.epoch + passes, "position": position, "whole": whole}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resumes in the order and at the position of `state_dict`, also with another batch size or number of ranks."""
        whole = self.batch_size * self.world_size
        seen = state_dict["position"] * state_dict.get("whole", whole)
        self.seed = state_dict.get("seed", self.seed)
        self.epoch, self.position = state_dict["epoch"], seen // whole

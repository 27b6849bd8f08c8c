"""What Lightning iterates over: rollouts that are made when they are asked for.

Letters: P prompts, G completions per prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightrl.data.prompts import PromptSet
from lightrl.types import Rollouts

if TYPE_CHECKING:
    from lightrl.data.rollout import RolloutDataModule

__all__ = ["EvalLoader", "RolloutLoader"]


class RolloutLoader:
    """Lightning's train dataloader: sized, and a generator, so that each rollout is made when it is asked for.

    Lightning prefetches loaders without a length, which would make every rollout one update stale.
    """

    def __init__(self, datamodule: RolloutDataModule, num_rollouts: int) -> None:
        self.datamodule, self.num_rollouts = datamodule, num_rollouts
        self.position = 0
        self._resumed = False

    def __len__(self) -> int:
        return self.num_rollouts

    def __iter__(self) -> Iterator[Rollouts]:
        if not self._resumed:  # also after an epoch that Lightning cut short (`limit_train_batches`)
            self.position = 0
        self._resumed = False
        while self.position < self.num_rollouts:
            rollouts = self.datamodule.next_rollout(self._left())
            self.position += 1
            yield rollouts

    def _left(self) -> int:
        """Rollouts that come after the next one: in this epoch, or as many as may be wanted where another follows."""
        trainer: Any = self.datamodule.trainer
        last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
        epoch = min(self.num_rollouts, trainer.fit_loop.max_batches)
        return max(int(epoch) - self.position - 1, 0) if last_epoch else sys.maxsize

    def state_dict(self) -> dict[str, int]:
        """Rollouts handed out in this epoch; at its end that is the start of the next."""
        return {"position": self.position % self.num_rollouts}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues within the epoch."""
        self.position, self._resumed = state_dict["position"], True


class EvalLoader:
    """All evaluation prompts once, as scored rollouts, sampled when asked for. Ranks get equally many batches."""

    def __init__(self, datamodule: RolloutDataModule, prompts: PromptSet, batch_size: int) -> None:
        self.datamodule, self.prompts = datamodule, prompts
        self.batch_size = batch_size

    def __len__(self) -> int:
        per_rank = self.batch_size * self.datamodule.world_size
        return -(-len(self.prompts) // per_rank)

    def __iter__(self) -> Iterator[Rollouts]:
        dm = self.datamodule
        for i in range(len(self)):
            first = i * self.batch_size * dm.world_size
            last = min(first + self.batch_size * dm.world_size, len(self.prompts))
            rows = list(range(first, last)[dm.rank :: dm.world_size])
            prompts = self.prompts.rows(rows or [first])  # a rank without rows repeats one: it must take part
            rollouts = dm.rollout(prompts, dm.eval_sampling, dm.eval_group_size, stream="eval", cursor=first)
            rollouts.filler = not rows
            yield rollouts

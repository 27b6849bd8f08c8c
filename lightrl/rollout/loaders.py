"""What Lightning iterates over: rollouts that are made when they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from lightning.pytorch import Trainer

from lightrl.data.prompts import PromptSet
from lightrl.records import Prompts, Rollouts


class RolloutLoader:
    """Lightning's train dataloader: sized, and a generator, so that each rollout is made when it is asked for.

    Lightning prefetches loaders without a length, which would make every rollout one update stale.

    Args:
        make: (rollouts that will be asked for after this one) gives the next rollout.
        num_rollouts: of an epoch.
        trainer: says how many epochs there are, and where they are cut short.
    """

    def __init__(self, make: Callable[[int], Rollouts], num_rollouts: int, trainer: Trainer) -> None:
        self.num_rollouts = num_rollouts
        self.position = 0
        self._make = make
        self._trainer = trainer
        self._resumed = False

    def __len__(self) -> int:
        return self.num_rollouts

    def __iter__(self) -> Iterator[Rollouts]:
        if not self._resumed:  # also after an epoch that Lightning cut short (`limit_train_batches`)
            self.position = 0
        self._resumed = False
        while self.position < self.num_rollouts:
            rollouts = self._make(self._left())
            self.position += 1
            yield rollouts

    def _left(self) -> int:
        """Rollouts that come after the next one: in this epoch, or as many as may be wanted where another follows."""
        trainer = self._trainer
        last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
        return max(self._of_epoch() - self.position - 1, 0) if last_epoch else sys.maxsize

    def _of_epoch(self) -> int:
        """Rollouts that Lightning takes of an epoch."""
        return int(min(self.num_rollouts, max(self._trainer.fit_loop.max_batches, 1)))

    def state_dict(self) -> dict[str, int]:
        """Rollouts handed out in this epoch; at its end that is the start of the next."""
        return {"position": self.position % self._of_epoch()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues within the epoch."""
        self.position, self._resumed = state_dict["position"], True


class EvalLoader:
    """All evaluation prompts once, as scored rollouts, sampled when asked for. Ranks get equally many batches.

    Args:
        make: (prompts, number of the first one over all ranks) samples and scores them.
        prompts: all of them.
        batch_size: prompts per batch and rank.
        rank: of this process.
        world_size: number of processes.
    """

    def __init__(
        self, make: Callable[[Prompts, int], Rollouts], prompts: PromptSet, batch_size: int, rank: int, world_size: int
    ) -> None:
        self.prompts = prompts
        self.batch_size = batch_size
        self._make = make
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        per_rank = self.batch_size * self._world_size
        return -(-len(self.prompts) // per_rank)

    def __iter__(self) -> Iterator[Rollouts]:
        for i in range(len(self)):
            first = i * self.batch_size * self._world_size
            last = min(first + self.batch_size * self._world_size, len(self.prompts))
            rows = list(range(first, last)[self._rank :: self._world_size])
            # A rank without rows repeats one: it must take part.
            rollouts = self._make(self.prompts.rows(rows or [first]), first)
            rollouts.filler = not rows
            yield rollouts

"""Private parts of Lightning 2.6; tests/compat/test_lightning.py fails if they change."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy


def run_seed() -> int:
    """Returns the seed of `seed_everything`; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def tensor_parallel_size(strategy: ModelParallelStrategy) -> int | str:
    """Returns the number of ranks over which layers are split, or "auto"."""
    return strategy._tensor_parallel_size


def set_data_parallel_size(strategy: ModelParallelStrategy, ranks: int) -> None:
    """Sets the constructor argument once the number of ranks is known."""
    strategy._data_parallel_size = ranks


def count_updates(trainer: Any) -> float:
    """Returns the number of updates of the run, infinite if it has no end.

    To count, Lightning sets up the training data before it reads a checkpoint, so a resumed run would begin with the
    first examples. This sets the data up again.
    """
    updates: float = trainer.estimated_stepping_batches
    trainer.fit_loop._combined_loader = None
    return updates


def accumulates(trainer: Any) -> bool:
    """Whether the last batch's gradients wait for the optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def forget_step_metrics(trainer: Any, names: Collection[str]) -> None:
    """Removes metrics that an earlier step logged and this one doesn't; Lightning would log their values again."""
    results = trainer.fit_loop.epoch_loop._results
    for metric in results.values():
        if metric.meta.name in names and metric.meta.on_step:
            metric.reset()

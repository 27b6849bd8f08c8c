"""Private parts of Lightning 2.6; tests/compat/test_lightning.py fails if they change."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy

_EARLY = "reads the module before its model is loaded"
_FAILING = {"StochasticWeightAveraging": f"{_EARLY}. Use EMA.", "ModelPruning": f"{_EARLY}. Remove it."}
_FAILING["BaseFinetuning"] = f"{_EARLY}. Use actor.freeze."
_FAILING_IN_RL = {
    "WeightAveraging": "its weights don't reach the engine. Use EMA.",
    "BatchSizeFinder": "an update's memory doesn't depend on it. Use lightrl plan.",
    "LearningRateFinder": "a rollout has no loss that shows progress. Remove it.",
}
"""Lightning's callbacks that have no effect, or a wrong one."""


def refuse_callbacks(callbacks: Collection[Any], *, manual: bool) -> None:
    """Raises a ValueError for a callback that has no effect; `manual` is for modules with manual optimization."""
    failing = _FAILING | (_FAILING_IN_RL if manual else {})
    for callback in callbacks:
        own = {each.__name__ for each in type(callback).__mro__ if each.__module__.startswith("lightning.")}
        for name in failing.keys() & own:
            raise ValueError(f"callback {type(callback).__name__}: {failing[name]}")
        interval = getattr(callback, "_train_time_interval", None)
        if manual and interval is not None:
            raise ValueError(
                f"{type(callback).__name__}.train_time_interval={interval}: Lightning never saves by time in manual "
                "optimization. Use RolloutCheckpoint(every_n_rollouts=N)."
            )


def run_seed() -> int:
    """Returns the seed of `seed_everything`; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def require_data(trainer: Any, argument: str, found: Any) -> None:
    """Raises a ValueError if a run that only evaluates has found no data: Lightning would do nothing, in silence."""
    if not found and trainer is not None and trainer.state.fn in ("validate", "test"):
        raise ValueError(f"{argument}=None: there is nothing to evaluate. Set it.")


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
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise ValueError("lr_scheduler: named schedules don't support GradientAccumulationScheduler. Remove one.")
    updates: float = trainer.estimated_stepping_batches
    trainer.fit_loop._combined_loader = None
    return math.inf if updates < 0 else updates  # -1 for a loader without a length


def accumulates(trainer: Any) -> bool:
    """Whether the last batch's gradients wait for the optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def forget_step_metrics(trainer: Any, names: Collection[str]) -> None:
    """Removes metrics that an earlier step logged and this one doesn't; Lightning would log their values again."""
    results = trainer.fit_loop.epoch_loop._results
    for metric in results.values():
        if metric.meta.name in names and metric.meta.on_step:
            metric.reset()

"""Private parts of Lightning 2.6; tests/compat/test_lightning.py fails if they change."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

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


def forget_step_metrics(trainer: Any, names: Collection[str]) -> None:
    """Removes metrics that an earlier step logged and this one doesn't; Lightning would log their values again."""
    results = trainer.fit_loop.epoch_loop._results
    for metric in results.values():
        if metric.meta.name in names and metric.meta.on_step:
            metric.reset()

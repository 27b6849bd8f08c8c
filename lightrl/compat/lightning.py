"""Private parts of Lightning 2.6; tests/compat/test_lightning.py fails if they change."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Collection
from typing import Any

from lightning.pytorch import LightningDataModule

_EARLY = "reads the module before its model is loaded"
_FAILING = {"StochasticWeightAveraging": f"{_EARLY}. Use EMA.", "ModelPruning": f"{_EARLY}. Remove it."}
_FAILING["BaseFinetuning"] = f"{_EARLY}. Use actor.freeze."
_FAILING_IN_RL = {
    "WeightAveraging": "its weights don't reach the engine. Use EMA.",
    "BatchSizeFinder": "an update's memory doesn't depend on it. Use lightrl plan.",
    "LearningRateFinder": "a rollout has no loss that shows progress. Remove it.",
}
"""Lightning's callbacks that have no effect, or a wrong one."""


def nearest_of_ours(cls: type) -> Any:
    """Returns the nearest class of LightRL in the MRO, or `LightningDataModule`."""
    return next((each for each in cls.__mro__ if each.__module__.startswith("lightrl.")), LightningDataModule)


class KeepsHooks:
    """Runs our hooks before overrides (`setup` after) that don't call `super`, which Lightning doesn't require."""

    kept_hooks: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.kept_hooks:
            own, ours = getattr(cls, name), getattr(nearest_of_ours(cls), name)
            names = getattr(getattr(inspect.unwrap(own), "__code__", None), "co_names", ())
            if not (own is ours or hasattr(own, "keeps_ours") or {"super", name} <= {*names}):  # `super().setup()`
                setattr(cls, name, _with_ours(own, ours, first=name != "setup"))


def _with_ours(own: Any, ours: Any, *, first: bool) -> Any:
    @functools.wraps(own)
    def hook(self: Any, *given: Any, **named: Any) -> Any:
        found = [call(self, *given, **named) for call in ((ours, own) if first else (own, ours))]
        return {**found[0], **found[1]} if isinstance(found[0], dict) else found[-1]

    hook.keeps_ours = True  # type: ignore[attr-defined]
    return hook


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

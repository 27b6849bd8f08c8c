"""The base class of callbacks that take part in training."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from lightrl.records import Experience, Rollouts
from lightrl.rollout.learner import RolloutLearner


class RLCallback(Callback):
    """A Lightning callback with three more hooks.

    Per rollout the hooks come in the order below. A callback that declares nothing gets everything. The two attributes
    below let the module skip work that the callback is known not to need; a subclass doesn't inherit them.

    Attributes:
        reads_old_logprobs: Whether it may read `experience.old_logprobs`, or change how many updates follow. False lets
            the module skip that forward pass if it makes exactly one update of a rollout.
        reads_all_rows: Whether it may read metrics of an update that depend on every row, such as `policy/entropy`.
            False lets the module leave out rows that have no gradient.
    """

    reads_old_logprobs: bool = True
    reads_all_rows: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Resets what a subclass doesn't declare itself."""
        super().__init_subclass__(**kwargs)
        for name in ("reads_old_logprobs", "reads_all_rows"):
            if name not in cls.__dict__:
                setattr(cls, name, True)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuses a module that learns from no rollouts, whose training would never call the hooks.

        A callback with a `setup` of its own calls this one first.

        Raises:
            ValueError: with the names of callback and module.
        """
        if not isinstance(pl_module, RolloutLearner):
            raise ValueError(
                f"callback {type(self).__name__} with {type(pl_module).__name__}: that module learns from no rollouts, "
                "of which the callback is told. Remove the callback."
            )

    def on_rollout_scored(self, trainer: Trainer, pl_module: Any, rollouts: Rollouts) -> None:
        """Called when a rollout has its rewards, before advantages are computed."""

    def on_experience_made(self, trainer: Trainer, pl_module: Any, experience: Experience) -> None:
        """Called when log-probs, values and advantages of a rollout are there, before the first update."""

    def on_policy_updated(self, trainer: Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Called after the last update of a rollout, with its metrics before they are logged."""


def reads_all_rows(callback: Callback) -> bool:
    """Whether a callback may read metrics of every row: unless it is Lightning's, or declares that it doesn't."""
    if isinstance(callback, RLCallback):
        return callback.reads_all_rows
    return not _is_known(callback) and bool(getattr(callback, "reads_all_rows", True))


def may_move_reference(callback: Callback) -> bool:
    """Whether a callback may change the reference model: unless it is Lightning's or LightRL's, or declares it."""
    return bool(getattr(callback, "moves_reference", not _is_known(callback)))


def _is_known(callback: Callback) -> bool:
    return type(callback).__module__.split(".")[0] in ("lightning", "pytorch_lightning", "lightrl")


HOOKS = ("on_rollout_scored", "on_experience_made", "on_policy_updated")


def rl_callbacks(callbacks: list[Any]) -> list[RLCallback]:
    """Those callbacks that take part in training.

    Raises:
        ValueError: a callback has one of LightRL's hooks, but not the base class, so that it would never be called.
    """
    for callback in callbacks:
        hooks = [hook for hook in HOOKS if hasattr(callback, hook)]
        if hooks and not isinstance(callback, RLCallback):
            raise ValueError(
                f"callback {type(callback).__name__} defines {', '.join(hooks)}: derive it from "
                "lightrl.algorithms.hooks.RLCallback instead of Callback, and say there what it changes."
            )
    return [callback for callback in callbacks if isinstance(callback, RLCallback)]

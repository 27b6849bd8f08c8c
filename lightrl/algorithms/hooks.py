"""The base class of callbacks that take part in training."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from lightrl.records import Experience, Rollouts
from lightrl.rollout.learner import RolloutLearner

HOOKS = ("on_rollout_scored", "on_experience_made", "on_policy_updated")


class RLCallback(Callback):
    """A Lightning callback with three more hooks, called in the order below for each rollout.

    A callback that declares nothing gets everything. The two attributes let the module skip work that the callback
    doesn't need; a subclass doesn't inherit them.

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
        """Rejects a module that doesn't learn from rollouts and would never call the hooks; a `setup` calls it first.

        Raises:
            ValueError: The message names callback and module.
        """
        if not isinstance(pl_module, RolloutLearner):
            raise ValueError(
                f"callback {type(self).__name__} with {type(pl_module).__name__}: this module doesn't learn from "
                "rollouts, so the callback would never be called. Remove the callback."
            )

    def on_rollout_scored(self, trainer: Trainer, pl_module: Any, rollouts: Rollouts) -> None:
        """Called when a rollout has its rewards, before advantages are computed."""

    def on_experience_made(self, trainer: Trainer, pl_module: Any, experience: Experience) -> None:
        """Called when a rollout has log-probs, values, and advantages, before the first update."""

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


def rl_callbacks(callbacks: list[Any]) -> list[RLCallback]:
    """The callbacks that take part in training.

    Raises:
        ValueError: A callback has one of LightRL's hooks but not the base class, so it would never be called.
    """
    for callback in callbacks:
        hooks = [hook for hook in HOOKS if hasattr(callback, hook)]
        if hooks and not isinstance(callback, RLCallback):
            raise ValueError(
                f"callback {type(callback).__name__} defines {', '.join(hooks)} but is not an RLCallback. Derive it "
                "from lightrl.algorithms.RLCallback."
            )
    return [callback for callback in callbacks if isinstance(callback, RLCallback)]

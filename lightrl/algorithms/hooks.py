"""Base class of callbacks with hooks for rollouts."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from lightrl.records import Experience, Rollouts
from lightrl.rollout.learner import RolloutLearner

HOOKS = ("on_rollout_scored", "on_experience_made", "on_policy_updated")


class RLCallback(Callback):
    """A Lightning callback with three more hooks, called in this order for each rollout:

    `on_rollout_scored`, `on_experience_made`, `on_policy_updated`.

    Set the two attributes to False to let the module skip work that the callback doesn't need. Subclasses don't
    inherit them.

    Attributes:
        reads_old_logprobs: Whether the callback may read `experience.old_logprobs` or change the number of updates. If
            False, the module skips that forward pass when it makes exactly one update per rollout.
        reads_all_rows: Whether the callback may read update metrics that depend on every sequence, such as
            `policy/entropy`. If False, the module may skip sequences without a gradient.
    """

    reads_old_logprobs: bool = True
    reads_all_rows: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Resets the attributes that a subclass doesn't declare."""
        super().__init_subclass__(**kwargs)
        for name in ("reads_old_logprobs", "reads_all_rows"):
            if name not in cls.__dict__:
                setattr(cls, name, True)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Rejects modules that never call the hooks. Call it first if you override `setup`.

        Raises:
            ValueError: The module doesn't train on rollouts.
        """
        if not isinstance(pl_module, RolloutLearner):
            raise ValueError(
                f"callback {type(self).__name__} with {type(pl_module).__name__}: this module doesn't train on "
                "rollouts and would never call it. Remove the callback."
            )

    def on_rollout_scored(self, trainer: Trainer, pl_module: Any, rollouts: Rollouts) -> None:
        """Called after rewards are assigned, before advantages are computed."""

    def on_experience_made(self, trainer: Trainer, pl_module: Any, experience: Experience) -> None:
        """Called after log-probs, values, and advantages are computed, before the first update."""

    def on_policy_updated(self, trainer: Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Called after the last update of a rollout, before its metrics are logged."""


def reads_all_rows(callback: Callback) -> bool:
    """Whether a callback may read metrics of every sequence. False for Lightning's, or if it declares so."""
    if isinstance(callback, RLCallback):
        return callback.reads_all_rows
    return not _is_known(callback) and bool(getattr(callback, "reads_all_rows", True))


def may_move_reference(callback: Callback) -> bool:
    """Whether a callback may change the reference model. False for Lightning's and LightRL's unless declared."""
    return bool(getattr(callback, "moves_reference", not _is_known(callback)))


def _is_known(callback: Callback) -> bool:
    return type(callback).__module__.split(".")[0] in ("lightning", "pytorch_lightning", "lightrl")


def require_rl_callbacks(callbacks: list[Any]) -> None:
    """Rejects a callback with one of LightRL's hooks, which would never be called, that is not an `RLCallback`."""
    for callback in callbacks:
        hooks = [hook for hook in HOOKS if hasattr(callback, hook)]
        if hooks and not isinstance(callback, RLCallback):
            raise ValueError(
                f"callback {type(callback).__name__}: defines {', '.join(hooks)} but is not an RLCallback. Derive it "
                "from lightrl.algorithms.RLCallback."
            )

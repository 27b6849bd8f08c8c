"""The base class of callbacks that take part in training."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from lightrl.records import Experience, Rollouts
from lightrl.rollout.learner import RolloutLearner

__all__ = ["RLCallback"]


class RLCallback(Callback):
    """A Lightning callback with three more hooks, which says what it does to the training.

    The module collects these declarations in its `setup`. Per rollout the hooks come in the order below.

    Attributes:
        moves_reference: changes the reference model, so that checkpoints must hold it.
        reads_entropy: reads `policy/entropy`, so that rows without an advantage are run, too.
        reads_old_logprobs: reads `experience.old_logprobs`, so that they are computed where nothing else needs them.
    """

    moves_reference: bool = False
    reads_entropy: bool = False
    reads_old_logprobs: bool = False

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

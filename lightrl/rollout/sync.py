"""What callbacks do with the engine: keep its weights those of the policy, and look at what it sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback

from lightrl.engines.base import Engine
from lightrl.rollout.learner import RolloutLearner
from lightrl.types import SamplingParams, Trajectory

__all__ = ["EngineSync", "TrajectoryCheck"]


class EngineSync(Callback, ABC):
    """A callback that pushes weights to the engine. `RolloutDataModule` finds it among the trainer's callbacks."""

    @abstractmethod
    def ensure_synced(self, module: RolloutLearner, engine: Engine) -> None:
        """Makes the engine's weights the module's, if they are not. Collective: every rank calls it at the same time.

        Args:
            module: whose policy it is.
            engine: started and awake; its `policy_version` is the module's afterwards.
        """

    def show_prompts(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Token ids of prompts without media that are about to be sampled, of this rank; in any thread."""


class TrajectoryCheck(Callback, ABC):
    """A callback that looks at the trajectories of a training rollout while the engine still holds what sampled them.

    `RolloutDataModule` finds it among the trainer's callbacks.
    """

    @abstractmethod
    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises a ValueError about training samples that it could not judge. Before the run."""

    @abstractmethod
    def check_trajectories(self, engine: Engine, trajectories: Sequence[Trajectory], tokenizer: Any) -> None:
        """Raises an error about trajectories that must not be trained on.

        Called on every rank with its own, possibly in a thread beside the trainer's, while nothing is sampled.

        Args:
            engine: started and awake, with the weights that sampled.
            trajectories: of this rank's part of the rollout, failed ones included.
            tokenizer: of the policy.
        """

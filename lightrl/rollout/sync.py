"""What callbacks do with the engine: keep its weights those of the policy, and look at what it sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightrl.engines.base import Engine
from lightrl.records import GenerationRequest, SamplingParams, Trajectory
from lightrl.rollout.learner import RolloutLearner


class _EngineCallback(Callback, ABC):
    """A callback of a data module that has an engine."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a data module that has no engine."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(getattr(datamodule, "engine", None), Engine):
            raise ValueError(
                f"{type(self).__name__} needs a data module with an engine (RolloutDataModule), not "
                f"{type(datamodule).__name__}: remove the callback or change the data module."
            )


class EngineSync(_EngineCallback):
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

    def show_media(self, request: GenerationRequest) -> None:
        """A prompt with media that is about to be sampled, of this rank; in any thread."""


class TrajectoryCheck(_EngineCallback):
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

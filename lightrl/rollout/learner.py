"""What the data module asks of the module that learns from its rollouts, and of callbacks that use the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightrl.distributed.states import fingerprint
from lightrl.engines.base import Engine
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.records import GenerationRequest, Rollouts, Routes, SamplingParams, Trajectory


class RolloutLearner(LightningModule, ABC):
    """A module that learns from rollouts.

    Attributes:
        actor: The policy, after `configure_model`.
        actor_spec: The policy's model. Its tokenizer, processor, and dtype are also the data module's and the engine's.
        ptx_coef: Weight of the loss on supervised rows; 0 for none.
        default_group_size: Attempts per prompt unless the data module sets them.
        outside_changes: Changes of the actor's weights that were not optimizer steps of Lightning.
    """

    actor: PolicyModel
    actor_spec: ModelSpec
    ptx_coef: float = 0.0
    default_group_size: int = 1
    outside_changes: int = 0
    _noted: tuple[int, int] | None = None

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Number of optimizer steps behind the policy's weights."""

    def note_weight_changes(self) -> None:
        """Gives the weights a new `policy_version` if anything but an optimizer step has changed them. Collective.

        Called before each generation and each step, so that engines never keep older weights, whoever changed them: a
        callback, an optimizer stepped by hand, an SFT warm start.
        """
        now = self.policy_version, fingerprint(self.actor)
        changed = self._noted is not None and self._noted[0] == now[0] and self._noted[1] != now[1]
        if bool(self.all_max(torch.tensor(float(changed)))):
            self.outside_changes += 1
        self._noted = self.policy_version, now[1]

    def note_rewards(self, rollouts: Rollouts) -> None:
        """Records a training rollout's rewards before Lightning's hooks of callbacks, which may change them."""

    @abstractmethod
    def named_policy_weights(self, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every actor parameter, LoRA merged, one at a time, or of trained ones.

        Collective if the weights are sharded: every rank iterates to the end. Tied parameters come once.
        """

    @abstractmethod
    def policy_adapter(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
        """The actor's LoRA adapter in peft's format: (name, full tensor) one at a time, and its configuration."""

    @abstractmethod
    def token_logprobs(self, token_ids: Tensor, routes: Sequence[Routes | None] = ()) -> Tensor:
        """(B, T) log-probs at temperature 1 of all tokens but the first of each row, for the check of weight syncs.

        `routes` are the experts that the B rows' tokens go to.
        """

    @abstractmethod
    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""

    @abstractmethod
    def all_max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks."""

    @property
    def needs_groups(self) -> bool:
        """Whether it compares the attempts at a prompt, so that a single attempt teaches nothing."""
        return False

    def refuse_group_size(self, size: int) -> None:
        """Raises a ValueError if groups of `size` attempts at a prompt teach nothing."""

    @property
    def needs_rewards(self) -> bool:
        """Whether it learns nothing from completions without a reward."""
        return False

    @property
    def scores_rollouts(self) -> bool:
        """Whether its reward models add to the rewards."""
        return False


class EngineSync(Callback, ABC):
    """A callback that pushes weights to the engine. `RolloutDataModule` finds it among the trainer's callbacks."""

    @abstractmethod
    def ensure_synced(self, module: RolloutLearner, engine: Engine) -> None:
        """Makes the engine's weights the module's, if they are not. Collective.

        Args:
            module: Owner of the policy.
            engine: Started and awake. Its `policy_version` is the module's afterwards.
        """

    def show_prompts(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Token IDs of this rank's prompts without media that are about to be sampled; called in any thread."""

    def show_media(self, request: GenerationRequest) -> None:
        """A request of this rank with media that is about to be sampled; called in any thread."""


class TrajectoryCheck(Callback, ABC):
    """A callback that looks at the trajectories of a training rollout while the engine holds what sampled them.

    `RolloutDataModule` finds it among the trainer's callbacks.
    """

    @abstractmethod
    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises a ValueError about settings whose samples it can't judge. Called before the run."""

    @abstractmethod
    def check_trajectories(self, engine: Engine, trajectories: Sequence[Trajectory], tokenizer: Any) -> None:
        """Raises an error about trajectories that must not be trained on.

        Called on every rank, possibly in a thread next to the trainer's, while nothing is sampled.

        Args:
            engine: Started and awake, with the weights that sampled.
            trajectories: Those of this rank, failed ones included.
            tokenizer: The policy's.
        """

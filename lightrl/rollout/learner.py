"""What a rollout is made for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightrl.distributed.states import fingerprint
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.records import Rollouts, Routes


class RolloutLearner(LightningModule, ABC):
    """What a `RolloutDataModule` and the callbacks beside it ask of the module that learns from its rollouts.

    Attributes:
        actor: the policy, once `configure_model` has built it.
        actor_spec: the policy's model: its tokenizer, processor and dtype are the data module's and the engine's.
        ptx_coef: weight of the loss on supervised rows; 0 takes none.
        default_group_size: attempts per prompt where the data module is given none.
    """

    actor: PolicyModel
    actor_spec: ModelSpec
    ptx_coef: float = 0.0
    default_group_size: int = 1

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Number of optimizer steps behind the policy's weights."""

    outside_changes: int = 0
    """Changes of the actor's weights that were no optimizer step of Lightning's, as far as they were noticed."""
    _noted: tuple[int, int] | None = None

    def note_weight_changes(self) -> None:
        """Gives the weights a new `policy_version` if anything but an optimizer step has changed them. Collective.

        Called before each generation and each step, so that engines never keep older weights, whoever changed them: a
        callback, an optimizer stepped by hand, a warm start.
        """
        now = self.policy_version, fingerprint(self.actor)
        changed = self._noted is not None and self._noted[0] == now[0] and self._noted[1] != now[1]
        if bool(self.all_max(torch.tensor(float(changed)))):
            self.outside_changes += 1
        self._noted = self.policy_version, now[1]

    def note_rewards(self, rollouts: Rollouts) -> None:
        """Takes note of a training rollout's rewards before Lightning's hooks of callbacks, which may change them."""

    @abstractmethod
    def named_policy_weights(self, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every actor parameter, LoRA merged, one at a time, or of trained ones.

        Collective where the weights are sharded: every rank iterates to the end. Tied parameters come once.
        """

    @abstractmethod
    def policy_adapter(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
        """The actor's LoRA adapter in peft's format: (name, full tensor) one at a time, and its configuration."""

    @abstractmethod
    def token_logprobs(self, token_ids: Tensor, routes: Sequence[Routes | None] = ()) -> Tensor:
        """Log-probs at temperature 1 of all tokens but the first of each row; (B, T) in, (B, T) out, for the canary.

        `routes` are the experts that the B rows' tokens are to go to.
        """

    @abstractmethod
    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""

    @abstractmethod
    def all_max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks."""

    @property
    def needs_groups(self) -> bool:
        """Whether it compares the attempts at one prompt, so that one attempt teaches nothing."""
        return False

    def refuse_group_size(self, size: int) -> None:
        """Raises a ValueError where groups of `size` attempts at a prompt teach nothing; by default none does."""

    @property
    def compares_engine_logprobs(self) -> bool:
        """Whether its loss reads the log-probs that the engine reported for what it sampled."""
        return False

    @property
    def needs_rewards(self) -> bool:
        """Whether it learns nothing from completions that nothing scores."""
        return False

    @property
    def scores_rollouts(self) -> bool:
        """Whether reward models of its own add to the rewards."""
        return False

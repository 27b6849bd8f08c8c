"""Interfaces between the data module, the module that is trained on its rollouts, and callbacks that take part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightrl.distributed import strategies
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.records import Experience, Rollouts, RowBatch

if TYPE_CHECKING:
    from lightrl.records import Routes


class RolloutLearner(LightningModule, ABC):
    """Base class of modules trained on rollouts: the interface for the data module, the engine host, and callbacks.

    Attributes:
        actor: The policy. Available after `configure_model`.
        actor_spec: The policy's model, whose tokenizer, processor, and dtype the data module and the engine also use.
        ptx_coef: Coefficient of the SFT loss; 0 disables it.
        default_group_size: Number of trajectories per prompt unless the data module sets it.
        needs_rewards: Whether completions without a reward can't be used for training.
        outside_changes: Number of weight changes that were not optimizer steps of Lightning.
    """

    actor: PolicyModel
    actor_spec: ModelSpec
    ptx_coef: float = 0.0
    default_group_size: int = 1
    needs_rewards: bool = False
    outside_changes: int = 0
    _noted: tuple[int, int] | None = None

    @property
    def policy_version(self) -> int:
        """Number of changes to the policy's weights, by optimizer steps or otherwise; identifies them for engines."""
        return int(self.trainer.global_step) + self.outside_changes

    def note_weight_changes(self) -> None:
        """Increases `policy_version` if something other than an optimizer step has changed the weights. Collective.

        Called before each generation and each step, so that engines also receive changes made by a callback, a manual
        optimizer step, or an SFT warm start.
        """
        now = self.policy_version, strategies.fingerprint(self.actor)
        changed = self._noted is not None and self._noted[0] == now[0] and self._noted[1] != now[1]
        if bool(self.all_max(torch.tensor(float(changed)))):
            self.outside_changes += 1
        self._noted = self.policy_version, now[1]

    @abstractmethod
    def named_policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, full tensor) for each actor parameter, with LoRA merged.

        Collective if the weights are sharded: every rank must iterate to the end. Tied parameters appear once.
        """

    def policy_adapter(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
        """Returns the actor's LoRA adapter in PEFT format: an iterator of (name, full tensor), and its config."""
        from lightrl.models.lora import adapter_config, named_adapter_weights

        assert self.actor_spec.lora is not None, "only an actor with LoRA has an adapter"
        return named_adapter_weights(self.actor), adapter_config(self.actor, self.actor_spec.lora)

    @torch.no_grad()
    def token_logprobs(
        self,
        token_ids: Tensor,
        routes: Sequence[Routes | None] = (),
        *,
        inputs: list[dict[str, Any]] | None = None,
        start: int = 1,
    ) -> Tensor:
        """Computes token log-probs at temperature 1 for the weight-sync check.

        Args:
            token_ids: (B, T) token IDs without padding.
            routes: Experts of each sequence's tokens, for mixture-of-experts models.
            inputs: B dictionaries of media inputs. Defaults to text only.
            start: Index of the first token to score, at least 1.

        Returns:
            (B, T) log-probs. Columns before `start` are undefined.
        """
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        response = mask.clone()
        response[:, :start] = False
        rows: dict[str, Any] = {"token_ids": token_ids, "attention_mask": mask, "response_mask": response}
        with self.trainer.precision_plugin.forward_context():
            logprobs: Tensor = self.actor(RowBatch(**rows, inputs=inputs or [], routes=list(routes))).logprobs
        return logprobs

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sums over ranks."""
        return strategies.all_reduce(self.trainer.strategy, tensor, "sum")

    def all_max(self, tensor: Tensor) -> Tensor:
        """Returns the maximum over ranks."""
        return strategies.all_reduce(self.trainer.strategy, tensor, "max")

    @property
    def needs_groups(self) -> bool:
        """Whether advantages compare the trajectories of a prompt, which requires a group size of at least 2."""
        return False

    @property
    def scores_rollouts(self) -> bool:
        """Whether reward models of the module add to the rewards."""
        return False


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
    """Whether a callback may read metrics of every sequence. False for Lightning's, and if declared."""
    if isinstance(callback, RLCallback):
        return callback.reads_all_rows
    return not _is_known(callback) and bool(getattr(callback, "reads_all_rows", True))


def may_move_reference(callback: Callback) -> bool:
    """Whether a callback may change the reference. False for Lightning's and LightRL's own unless declared."""
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

"""Weights that follow the policy: its moving average, and a moving reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightrl.algorithms.hooks import RLCallback
from lightrl.algorithms.saving import SavesPretrained
from lightrl.compat.arguments import at_least, fraction
from lightrl.distributed import strategies
from lightrl.rollout.datamodule import RolloutDataModule


class EMA(Callback):
    """Keeps an exponential moving average of the actor's trained weights: `w = decay * w + (1 - decay) * policy`.

    Updated once per rollout in float32. The policy itself samples for training. `HFExport(ema=True)` exports the
    average. For a module without rollouts it is the trained model (such as a reward model), once per batch.

    Args:
        decay: In [0, 1); 0.99 averages over about the last 100 rollouts.
        evaluate: Sample with the average in validation. The engine gets the weights it needs before and after.

    Raises:
        ValueError: `decay` is out of range; in `setup`, the module is not one of LightRL's.
    """

    def __init__(self, decay: float = 0.99, evaluate: bool = True) -> None:
        self.decay = fraction("EMA.decay", decay, "[0, 1)")
        self.evaluate = evaluate
        self._average: dict[str, Tensor] = {}
        self._policy: dict[str, Tensor] = {}
        self._sharded = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Rejects a module whose model is unknown."""
        if not isinstance(pl_module, SavesPretrained):
            raise ValueError(
                f"callback EMA with {type(pl_module).__name__}: only LightRL's modules say which model they train. "
                "Remove the callback."
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Starts from the policy, or from the average of a checkpoint."""
        shards = _shards(pl_module)
        self._sharded = any(strategies.is_sharded(parameter) for parameter in pl_module.trained_model[0].parameters())
        start = self._average or shards
        if {name: value.shape for name, value in start.items()} != {name: v.shape for name, v in shards.items()}:
            raise ValueError(
                "callback EMA: the checkpoint's average does not fit the model's trained parameters: resume with the "
                "same model settings and, if weights are sharded, on as many ranks as before."
            )
        self._average = {name: start[name].to(value.device).float().clone() for name, value in shards.items()}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates the average with the policy after the rollout."""
        for name, value in _shards(pl_module).items():
            self._average[name].lerp_(value.float(), 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        """The average, with the shards of all ranks. Collective."""
        own = {name: value.cpu() for name, value in self._average.items()}
        return {"ranks": strategies.gather_objects(own) if self._sharded else [own]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores this rank's average."""
        rank = torch.distributed.get_rank() if strategies.has_process_group() else 0
        ranks = state_dict["ranks"]
        self._average = ranks[min(rank, len(ranks) - 1)]

    @contextmanager
    def swapped(self, pl_module: LightningModule) -> Iterator[None]:
        """Context in which the actor has the averaged weights."""
        self._swap_in(pl_module)
        try:
            yield
        finally:
            self._swap_out(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swaps the average in, once training has started."""
        if self.evaluate and self._average:
            self._swap_in(pl_module)
            _forget_weights(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swaps the policy back in."""
        if self._policy:
            self._swap_out(pl_module)
            _forget_weights(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Swaps the policy back in before a checkpoint is written."""
        self._swap_out(pl_module)

    def _swap_in(self, pl_module: LightningModule) -> None:
        shards = _shards(pl_module)
        self._policy = {name: value.clone() for name, value in shards.items()}
        for name, value in shards.items():
            value.copy_(self._average[name])

    def _swap_out(self, pl_module: LightningModule) -> None:
        policy, self._policy = self._policy, {}
        for name, value in (_shards(pl_module) if policy else {}).items():
            value.copy_(policy[name])


def _shards(pl_module: Any) -> dict[str, Tensor]:
    """This rank's shards of the trained parameters."""
    named = pl_module.trained_model[0].named_parameters()
    return {name: strategies.local_shard(parameter) for name, parameter in named if parameter.requires_grad}


def _forget_weights(trainer: Trainer) -> None:
    """Has the engine get the actor's weights before it samples again, though the version is the same."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, RolloutDataModule):
        data.engine.mark_stale()


class ReferenceSync(RLCallback):
    """Moves the reference of the KL term towards the policy: `ref = alpha * policy + (1 - alpha) * ref`.

    The KL then bounds the speed of the policy instead of its distance from the start. Checkpoints have the moved
    reference. With LoRA it follows the merged weights and must be a separate model (`reference: <path>`).

    Args:
        every_n_rollouts: Rollouts between two moves, at least 1.
        alpha: Fraction of the way, in (0, 1]; 1 copies the policy.

    Raises:
        ValueError: A value is out of range; in `setup`, the module has no reference model.

    Source: TR-DPO, https://arxiv.org/abs/2404.09656, eq. 5-6; TRL's `sync_ref_model`, whose defaults are 512 optimizer
        steps and 0.6, counts steps where this counts rollouts.
    """

    moves_reference = True
    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, every_n_rollouts: int = 100, alpha: float = 0.6) -> None:
        self.every_n_rollouts = at_least("ReferenceSync.every_n_rollouts", every_n_rollouts, 1)
        self.alpha = fraction("ReferenceSync.alpha", alpha, "(0, 1]")

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Rejects a module that has no reference to move."""
        super().setup(trainer, pl_module, stage)
        if pl_module.kl is None:
            raise ValueError("callback ReferenceSync with kl=None: there is no reference to move. Set kl or drop it.")
        if (pl_module.reference_spec or pl_module.actor_spec).lora is not None:
            where = "actor.lora and reference=None" if pl_module.reference_spec is None else "reference.lora"
            raise ValueError(
                f"callback ReferenceSync with {where}: the reference is the base under the adapter and cannot move. "
                f"Set a separate model: reference={pl_module.actor_spec.path!r}."
            )

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Moves the reference every N rollouts; every rank together, tensor by tensor."""
        if (trainer.fit_loop.total_batch_idx + 1) % self.every_n_rollouts:
            return
        targets = dict(pl_module.reference.lm.named_parameters())
        for name, tensor in pl_module.named_policy_weights():
            strategies.blend_parameter(targets[name], tensor, self.alpha)

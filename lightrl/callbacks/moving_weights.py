"""Weights derived from the policy: its moving average, and a moving reference."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightrl.callbacks.coefficients import KLCallback
from lightrl.compat.lightning import KeepsHooks
from lightrl.distributed import sharded, strategies


class EMA(KeepsHooks, Callback):
    """Maintains an exponential moving average of the actor's trained weights.

        w = decay * w + (1 - decay) * policy

    The average is updated in float32 once per rollout, or per batch in modules without rollouts, such as reward models.
    Training still samples with the policy; only completions in flight (`InFlight`) continue with the average during an
    evaluation. Use `HFExport(ema=True)` to export the average.

    Args:
        decay: Decay rate. 0.99 averages over about the last 100 rollouts.
        evaluate: Whether validation and test use the average. Adds weight pushes before and after them.
    """

    kept_hooks = ("setup", "on_train_start", "state_dict", "load_state_dict")

    def __init__(self, decay: float = 0.99, evaluate: bool = True) -> None:
        self.decay = decay
        self.evaluate = evaluate
        self._module: Any = None  # weak reference
        self._average: dict[str, Tensor] = {}
        self._policy: dict[str, Tensor] = {}
        self._sharded = False

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self._module is None or self._module() is not pl_module:
            self._module, self._average = weakref.ref(pl_module), {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Initializes the average from the policy or a checkpoint."""
        shards = _shards(pl_module)
        self._sharded = any(sharded.is_sharded(parameter) for parameter in pl_module.trained_model[0].parameters())
        start = self._average or shards
        self._average = {name: start[name].to(value.device).float().clone() for name, value in shards.items()}

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, value in _shards(pl_module).items():
            self._average[name].lerp_(value.float(), 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        """Returns the average with the shards of all ranks. Collective."""
        own = {name: value.cpu() for name, value in self._average.items()}
        return {"ranks": strategies.gather_objects(own) if self._sharded else [own]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores this rank's average."""
        rank = torch.distributed.get_rank() if strategies.has_process_group() else 0
        ranks = state_dict["ranks"]
        self._average = ranks[min(rank, len(ranks) - 1)]

    @contextmanager
    def swapped(self, pl_module: LightningModule) -> Iterator[None]:
        """Context manager that swaps the averaged weights into the actor."""
        self._swap_in(pl_module)
        try:
            yield
        finally:
            self._swap_out(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.evaluate and self._average:
            self._swap_in(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Swaps the policy back in, after an error before a checkpoint is written."""
        self._swap_out(pl_module)

    on_test_start, on_test_end = on_validation_start, on_validation_end
    on_exception = on_validation_end  # type: ignore[assignment]

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
    named = pl_module.trained_model[0].named_parameters()
    return {name: strategies.local_shard(parameter) for name, parameter in named if parameter.requires_grad}


class ReferenceSync(KLCallback):
    """Moves the reference model toward the policy.

        ref = alpha * policy + (1 - alpha) * ref

    The KL penalty then limits the rate of change of the policy instead of its distance from the start. Checkpoints
    contain the moved reference. With LoRA, the reference must be a separate model (`reference: <path>`) and follows the
    merged weights.

    Args:
        every_n_rollouts: Number of rollouts between updates.
        alpha: Mixing weight of the policy. 1 copies the policy.

    Raises:
        ValueError: If the reference can't be updated.

    Source: TR-DPO, https://arxiv.org/abs/2404.09656, eq. 5-6. TRL's `sync_ref_model` counts optimizer steps (512 by
        default) instead of rollouts, with the same alpha.
    """

    moves_reference = True
    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, every_n_rollouts: int = 100, alpha: float = 0.6) -> None:
        self.every_n_rollouts = every_n_rollouts
        self.alpha = alpha

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if pl_module.reference_spec is None and pl_module.actor_spec.lora is not None:
            raise ValueError(
                "callback ReferenceSync with actor.lora and reference=None: the reference is the adapter's base model, "
                f"which can't be updated. Set a separate model: reference={pl_module.actor_spec.path!r}."
            )

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Updates the reference every N rollouts. Collective."""
        if (trainer.fit_loop.total_batch_idx + 1) % self.every_n_rollouts:
            return
        targets = dict(pl_module.reference.lm.named_parameters())
        for name, tensor in pl_module.named_policy_weights():
            sharded.blend_parameter(targets[name], tensor, self.alpha)

"""An average of the policy over the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightrl.algorithms.saving import SavesPretrained
from lightrl.compat.arguments import fraction
from lightrl.distributed import strategies
from lightrl.rollout.datamodule import RolloutDataModule


class EMA(Callback):
    """Keeps an exponential moving average of the actor's trained weights: `w = decay * w + (1 - decay) * policy`.

    Updated once per rollout, in float32, from the first rollout on; it never touches training. Sampling for training
    is always done by the policy itself. `HFExport(ema=True)` exports the average. Of a module without rollouts it is
    the model that is trained (a `RewardLightningModule`'s reward model), once per batch.

    Args:
        decay: in [0, 1); 0.99 averages over about the last 100 rollouts.
        evaluate: let validation sample with the average, instead of the policy. The engine gets the weights it needs
            before and after.

    Raises:
        ValueError: decay is out of range; in `setup`, the module is none of LightRL's.
    """

    def __init__(self, decay: float = 0.99, evaluate: bool = True) -> None:
        self.decay = fraction("EMA.decay", decay, "[0, 1)")
        self.evaluate = evaluate
        self._average: dict[str, Tensor] = {}
        self._policy: dict[str, Tensor] = {}
        self._sharded = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a module of which no model is known."""
        if not isinstance(pl_module, SavesPretrained):
            raise ValueError(
                f"callback EMA with {type(pl_module).__name__}: only LightRL's modules say which model they train. "
                "Remove the callback."
            )

    # ---- the average -------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Starts from the policy, unless a checkpoint brought an average."""
        shards = _shards(pl_module)
        self._sharded = any(strategies.is_sharded(parameter) for parameter in pl_module.trained_model[0].parameters())
        start = self._average or shards
        if {name: value.shape for name, value in start.items()} != {name: v.shape for name, v in shards.items()}:
            raise ValueError(
                "callback EMA: the checkpoint's average does not fit the model's trained parameters: resume with the "
                "same model settings and, where weights are sharded, on as many ranks as before."
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
        """The average; where weights are sharded, every rank's part of it. Collective."""
        own = {name: value.cpu() for name, value in self._average.items()}
        return {"ranks": strategies.gather_objects(own) if self._sharded else [own]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores this rank's average."""
        rank = torch.distributed.get_rank() if strategies.has_process_group() else 0
        ranks = state_dict["ranks"]
        self._average = ranks[min(rank, len(ranks) - 1)]

    # ---- its use -----------------------------------------------------------------------------------------------

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
    """What this rank holds of the trained model's trained parameters."""
    named = pl_module.trained_model[0].named_parameters()
    return {name: strategies.local_shard(parameter) for name, parameter in named if parameter.requires_grad}


def _forget_weights(trainer: Trainer) -> None:
    """Has the engine take the actor's weights before it samples again, though the policy's version is the same."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, RolloutDataModule):
        data.engine.mark_stale()

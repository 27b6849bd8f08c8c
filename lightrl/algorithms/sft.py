"""Supervised fine-tuning: the warm start of RL."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torchmetrics import MeanMetric

from lightrl.algorithms.saving import SavesPretrained
from lightrl.algorithms.schedule import (
    LRSchedule,
    make_optimizer,
    run_position,
    set_named_rates,
    with_schedule,
)
from lightrl.algorithms.windows import GradientWindow, refuse_accumulation
from lightrl.distributed import strategies
from lightrl.models.loading import require_model
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec


class SFTLightningModule(SavesPretrained):
    """Maximises the log-probability of given completions.

    The loss is the negative log-probability summed over completion tokens and divided by their number in all batches of
    an update (`accumulate_grad_batches`) on all ranks. Packed layout and chunked log-probs are those of the RL modules.

    Args:
        actor: the model: a folder or hub name, or a `ModelSpec`; from Python also a live model,
            which is trained itself: `ModelSpec.of(model, tokenizer)`.
        optimizer: called with the trained parameters.
        lr_scheduler: `{name: cosine, warmup: 0.03}` (`LRSchedule`, over all updates of the run), or what is called
            with the optimizer; stepped after every update. None keeps the rate constant.
    """

    actor: PolicyModel

    def __init__(
        self,
        actor: str | ModelSpec,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | LRSchedule | None = None,
    ) -> None:
        super().__init__()
        self.actor_spec = ModelSpec.given(actor)
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.eval_loss = MeanMetric()
        self._window = GradientWindow()

    def setup(self, stage: str) -> None:
        """Refuses what cannot work, before the model is loaded."""
        refuse_accumulation(self.trainer)
        require_model(self.actor_spec)

    def build_models(self, in_shards: bool = False) -> None:
        self.actor = PolicyModel.from_spec(self.actor_spec, trainable=True, in_shards=in_shards)

    def models(self) -> list[Any]:
        return [self.actor]

    def configure_optimizers(self) -> Any:
        """One optimizer; the schedule counts updates."""
        trained = [p for p in self.actor.parameters() if p.requires_grad]
        optimizer = make_optimizer(self.optimizer_factory, trained, self.trainer.strategy)
        return with_schedule(optimizer, self.lr_scheduler_factory, run_position(self.trainer))

    def on_train_start(self) -> None:
        """Sets the rates of a schedule by name, which a checkpoint's optimizer has from a run of another length."""
        set_named_rates(self.lr_schedulers())

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Loss of one batch of {token_ids, attention_mask, response_mask}, each (B, T), and `inputs` with images."""
        total, count = self._nll(batch)
        count = strategies.all_sum(self.trainer.strategy, count)
        mean = total.detach() * self.trainer.world_size / count.clamp(min=1)
        self.log("loss/sft", mean, prog_bar=True, batch_size=len(batch["token_ids"]), sync_dist=True)
        return self._window.loss(self, total, count)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs the mean negative log-probability per completion token of all batches and ranks."""
        total, count = self._nll(batch)
        self.eval_loss.update(total / count.clamp(min=1), weight=count)
        self.log("eval/loss", self.eval_loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=1)

    def _nll(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        mask = batch["response_mask"]
        logprobs = self.actor(batch["token_ids"], batch["attention_mask"], mask, inputs=batch.get("inputs")).logprobs
        return -logprobs.sum(), mask.sum()

    @property
    def trained_model(self) -> tuple[PolicyModel, ModelSpec]:
        """What is written as a Hugging Face folder."""
        return self.actor, self.actor_spec

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what `lightrl export` builds the model from."""
        checkpoint["lightrl"] = self._description({"actor": self.actor_spec})

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps behind the weights."""
        return int(self.trainer.global_step)

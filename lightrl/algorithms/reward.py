"""Training of reward models on preferences: the middle of RLHF."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy

from lightrl.algorithms.saving import SavesPretrained
from lightrl.algorithms.schedule import (
    LRSchedule,
    make_optimizer,
    run_position,
    set_named_rates,
    with_schedule,
)
from lightrl.algorithms.windows import GradientWindow, refuse_accumulation
from lightrl.compat.arguments import at_least
from lightrl.distributed import strategies
from lightrl.models.loading import require_model
from lightrl.models.reward import RewardModel
from lightrl.models.spec import ModelSpec
from lightrl.ops.losses import bradley_terry_loss


class RewardLightningModule(SavesPretrained):
    """Fits a reward model to preferences by the Bradley-Terry likelihood.

        loss = mean over pairs of  -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2

    The mean is over the pairs of all batches of an update (`accumulate_grad_batches`) on all ranks. r is the output of
    a sequence-classification model with one label, read at the last token; the tokens that two completions of a pair
    share are computed once where the layout allows it. `HFExport` writes a folder that `RewardModelSpec` loads into
    PPO, and that transformers scores alike, one row or several. Formula, sources: `bradley_terry_loss`.

    Logged: `loss/preference`, `reward/accuracy` (share of pairs with r_chosen > r_rejected), `reward/margin` (mean of
    r_chosen - r_rejected), `reward/mean`, and of the validation pairs `eval/loss`, `eval/accuracy`, `eval/margin`.

    Args:
        model: what to start from: a causal language model (an SFT export), whose backbone gets a new head, or a
            sequence-classification model. With LoRA the head is trained too.
        optimizer: called with the parameter groups `backbone` and `head`.
        head_lr: learning rate of the head's group, 0 or 1e-10 to 100; None takes the optimizer's.
        lr_scheduler: `{name: cosine, warmup: 0.03}` (`LRSchedule`, over all updates of the run), or what is called
            with the optimizer; stepped after every update. None keeps the rate constant.
        centering_coef: c, at least 0. Above 0 keeps scores near 0 on average, which preferences alone leave open.

    Raises:
        ValueError: a value is out of range, or the model's folder does not exist.
    """

    reward_model: RewardModel

    def __init__(
        self,
        model: str | ModelSpec,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0),
        head_lr: float | None = None,
        lr_scheduler: LRSchedulerCallable | LRSchedule | None = None,
        centering_coef: float = 0.0,
    ) -> None:
        super().__init__()
        self.model_spec = ModelSpec.given(model, argument="model")
        self.optimizer_factory = optimizer
        self.head_lr = at_least("head_lr", head_lr, 0, or_none="for the optimizer's")
        self.lr_scheduler_factory = lr_scheduler
        self.centering_coef = at_least("centering_coef", centering_coef, 0, "; 0 turns it off")
        self._window = GradientWindow()
        self.eval_loss = MeanMetric()
        self.eval_margin = MeanMetric()
        self.eval_accuracy = BinaryAccuracy()

    def setup(self, stage: str) -> None:
        """Refuses what cannot work, before the model is loaded."""
        refuse_accumulation(self.trainer)
        require_model(self.model_spec)

    def build_models(self, in_shards: bool = False) -> None:
        self.reward_model = RewardModel.for_training(self.model_spec)

    def models(self) -> list[Any]:
        return [self.reward_model]

    def configure_optimizers(self) -> Any:
        """One optimizer with the named parameter groups `backbone` and `head`; the schedule counts updates."""
        head = self.reward_model.head_parameters()
        in_head = {id(p) for p in head}
        trained = [p for p in self.reward_model.parameters() if p.requires_grad and id(p) not in in_head]
        lr = {} if self.head_lr is None else {"lr": self.head_lr}
        groups: list[dict[str, Any]] = [{"params": trained, "name": "backbone"}, {"params": head, "name": "head", **lr}]
        optimizer = make_optimizer(
            self.optimizer_factory, [group for group in groups if group["params"]], self.trainer.strategy
        )
        return with_schedule(optimizer, self.lr_scheduler_factory, run_position(self.trainer))

    def on_train_start(self) -> None:
        """Sets the rates of a schedule by name, which a checkpoint's optimizer has from a run of another length."""
        set_named_rates(self.lr_schedulers())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch of pairs, as `PreferenceDataModule` lays them out."""
        chosen, rejected, losses = self.score_pairs(batch)
        total = strategies.all_sum(self.trainer.strategy, torch.tensor(float(len(losses)))).to(losses.device)
        scale = self.trainer.world_size / total  # ranks may hold different numbers of pairs; their mean is then exact
        difference = (chosen - rejected).detach()
        metrics = {
            "loss/preference": losses.detach(),
            "reward/accuracy": (difference > 0).float(),
            "reward/margin": difference,
            "reward/mean": (chosen + rejected).detach() / 2,
        }
        metrics = {name: value.sum() * scale for name, value in metrics.items()}
        self.log_dict(metrics, batch_size=len(losses), sync_dist=True)
        return self._window.loss(self, losses.sum(), total)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Adds the batch's pairs to `eval/*`; ranks may hold different numbers of them."""
        chosen, rejected, losses = (x[batch["valid"]] for x in self.score_pairs(batch))
        if len(losses):
            right = (chosen > rejected).int()
            self.eval_accuracy.update(right, torch.ones_like(right))
            self.eval_loss.update(losses)
            self.eval_margin.update(chosen - rejected)
        metrics = {"eval/loss": self.eval_loss, "eval/accuracy": self.eval_accuracy, "eval/margin": self.eval_margin}
        self.log_dict(metrics, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(losses))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """As `validation_step`, for `lightrl test`."""
        self.validation_step(batch, batch_idx)

    def score_pairs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and losses of the pairs.

        Args:
            batch: `token_ids`, `attention_mask`, `response_mask` (B, T), `group_ids` (B,) and `margin` (P,).

        Returns:
            (P,) scores of the chosen, of the rejected, and losses; float32.
        """
        scores = self.reward_model(
            batch["token_ids"], batch["attention_mask"], batch["response_mask"], group_ids=batch["group_ids"]
        )
        chosen, rejected = scores[0::2], scores[1::2]
        losses = bradley_terry_loss(chosen, rejected, batch["margin"], centering_coef=self.centering_coef)
        return chosen, rejected, losses

    @property
    def trained_model(self) -> tuple[RewardModel, ModelSpec]:
        """What is written as a Hugging Face folder."""
        return self.reward_model, self.model_spec

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what `lightrl export` builds the model from."""
        checkpoint["lightrl"] = self._description({"reward_model": self.model_spec})

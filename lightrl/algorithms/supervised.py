"""LightningModules for supervised fine-tuning and reward modeling."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy

from lightrl.algorithms.module import SavesPretrained, make_optimizer
from lightrl.algorithms.schedules import LRSchedule, NamedSchedule, run_position, updates_ahead, with_schedule
from lightrl.compat.lightning_checkpoints import accumulates
from lightrl.distributed import strategies
from lightrl.models.policy import PolicyModel
from lightrl.models.reward import RewardModel, bradley_terry_loss
from lightrl.models.spec import ModelSpec
from lightrl.records import RowBatch


class GradientWindow:
    """Normalizes the loss of one optimizer step by all tokens or pairs of its batches.

    Lightning averages the losses of `accumulate_grad_batches` batches, which overweights short batches, and divides an
    incomplete last window by too many batches. Here, each batch's sum is divided as if all K batches had n_1 tokens
    like the first. The last batch, at which N is known, multiplies the accumulated gradients by K n_1 / N.

    Example: two batches of 3 and 1 tokens with sums s_1 and s_2. s_1 / 6 becomes s_1 / 4, and s_2 / 4 is added.
    """

    def __init__(self) -> None:
        self._expected = self._total = 0.0

    def loss(self, module: Any, summed: Tensor, count: Tensor) -> Tensor:
        """Returns the loss for `training_step`, which Lightning divides by `accumulate_grad_batches`.

        `summed` is the loss summed over this rank's part of the batch, and `count` the number of tokens or pairs on all
        ranks.
        """
        trainer = module.trainer
        batches = getattr(trainer, "accumulate_grad_batches", 1)
        if batches == 1:
            return summed * trainer.world_size / count.clamp(min=1)
        if not self._total or trainer.fit_loop.batch_idx % batches == 0:  # as Lightning drops the gradients
            self._expected, self._total = batches * max(float(count), 1.0), 0.0
        self._total += float(count)
        if not accumulates(trainer):
            total = max(self._total, 1.0)
            for parameter in module.parameters():
                if parameter.grad is not None and total != self._expected:
                    parameter.grad.mul_(self._expected / total)
            self._expected, self._total = total, 0.0
        return summed * (trainer.world_size * batches / self._expected)


class _SupervisedModule(SavesPretrained):
    """Base of supervised modules: one trained model and one optimizer; losses per token or pair."""

    def __init__(self, optimizer: Any, lr_scheduler: Any) -> None:
        super().__init__()
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self._window = GradientWindow()
        self.updates_ahead = 0

    def setup(self, stage: str) -> None:
        """Rejects gradient accumulation with DeepSpeed, whose gradients can't be reweighted."""
        trainer: Any = self.trainer
        strategies.check(trainer.strategy)
        if isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} with DeepSpeed: batches would get "
                "equal weight regardless of their number of tokens. Use DDP or FSDP2, or 1 with a larger batch_size."
            )

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Returns the optimizer's groups, with the parameters that a subclass adds."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def configure_optimizers(self) -> Any:
        """Builds the optimizer and its schedule, stepped per update."""
        groups = [group for group in self.parameter_groups() if group["params"]]
        optimizer = make_optimizer(self.optimizer_factory, groups, self.trainer.strategy)
        if self.lr_scheduler_factory is None:
            return optimizer
        return with_schedule(optimizer, self.lr_scheduler_factory, run_position(self))

    def on_train_start(self) -> None:
        """Sets the rates of named schedules: a checkpoint's optimizer may come from a run of a different length."""
        super().on_train_start()
        self.updates_ahead, scheduler = updates_ahead(self.trainer), self.lr_schedulers()
        if isinstance(scheduler, NamedSchedule):
            scheduler.refresh()

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Runs `validation_step`, for `lightrl test`."""
        self.validation_step(batch, batch_idx)


class SFTLightningModule(_SupervisedModule):
    """Supervised fine-tuning (SFT) on prompts and completions.

    The loss is the mean negative log-probability per completion token, over all batches of an update
    (`accumulate_grad_batches`) and all ranks. Supports the same layouts and chunked log-probs as the RL modules.

    Args:
        actor: Model to train. A model directory, a model ID, or a `ModelSpec`. To train a model that is already loaded,
            use `ModelSpec.of(model, tokenizer)`.
        optimizer: Callable that builds the optimizer from the trained parameters.
        lr_scheduler: `LRSchedule` over all updates of the run, such as `{name: cosine, warmup: 0.03}`, or a callable
            that builds a scheduler from the optimizer. Stepped after every update. Defaults to a constant rate.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | LRSchedule | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.actor_spec = ModelSpec.given(actor)
        self.eval_loss = MeanMetric()

    def build_models(self, in_shards: bool = False) -> None:
        self.actor = PolicyModel.from_spec(self.actor_spec, trainable=True, in_shards=in_shards)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Returns the loss of a batch of {token_ids, attention_mask, response_mask}, each (B, T), and `inputs`."""
        total, count = self._nll(batch)
        count = strategies.all_reduce(self.trainer.strategy, count, "sum")
        mean = total.detach() * self.trainer.world_size / count.clamp(min=1)
        self.log("loss/sft", mean, prog_bar=True, batch_size=len(batch["token_ids"]), sync_dist=True)
        return self._window.loss(self, total, count)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Logs the mean negative log-probability per completion token over all batches and ranks."""
        total, count = self._nll(batch)
        self.eval_loss.update(total / count.clamp(min=1), weight=count)
        self.log("eval/loss", self.eval_loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=1)

    def _nll(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return -self.actor(RowBatch(**batch)).logprobs.sum(), batch["response_mask"].sum()


class RewardLightningModule(_SupervisedModule):
    """Trains a reward model on preference pairs with the Bradley-Terry loss.

        loss = mean over pairs of  -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2

    The mean covers the pairs of all batches of an update (`accumulate_grad_batches`) and all ranks. r is the output of
    a sequence-classification model with one label at the last token. If the layout allows it, the shared prefix of a
    pair is computed once. `HFExport` writes a model directory for `RewardModelSpec`.

    Metrics: `loss/preference`, `reward/accuracy` (fraction of pairs with r_chosen > r_rejected), `reward/margin` (mean
    of r_chosen - r_rejected), `reward/mean`, and on validation pairs `eval/loss`, `eval/accuracy`, `eval/margin`.

    Args:
        model: Initial model. A causal language model, such as an SFT export, gets a new head. A sequence-classification
            model keeps its head. With LoRA, the head is also trained.
        optimizer: Callable that builds the optimizer from the parameter groups `backbone` and `head`.
        lr_scheduler: As in `SFTLightningModule`.
        centering_coef: c, at least 0. Above 0 keeps the mean score near 0, which preferences alone don't determine.
    """

    reward_model: RewardModel
    model_name = "reward_model"

    def __init__(
        self,
        model: str | ModelSpec,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | LRSchedule | None = None,
        centering_coef: float = 0.0,
    ) -> None:
        super().__init__(optimizer, lr_scheduler)
        self.model_spec = ModelSpec.given(model)
        self.centering_coef = centering_coef
        self.eval_loss = MeanMetric()
        self.eval_margin = MeanMetric()
        self.eval_accuracy = BinaryAccuracy()

    def build_models(self, in_shards: bool = False) -> None:
        self.reward_model = RewardModel.for_training(self.model_spec)

    @property
    def trained_model(self) -> tuple[RewardModel, ModelSpec]:
        """The trained model and its spec, for saving in Hugging Face format."""
        return self.reward_model, self.model_spec

    def parameter_groups(self) -> list[dict[str, Any]]:
        head = self.reward_model.head_parameters()
        in_head = {id(p) for p in head}
        trained = [p for p in self.parameters() if p.requires_grad and id(p) not in in_head]
        return [{"params": trained, "name": "backbone"}, {"params": head, "name": "head"}]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of a batch of pairs from `PreferenceDataModule`."""
        chosen, rejected, losses = self.score_pairs(batch)
        total = torch.tensor(float(len(losses)), device=losses.device)
        total = strategies.all_reduce(self.trainer.strategy, total, "sum")
        scale = self.trainer.world_size / total  # exact mean even if ranks have different numbers of pairs
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
        """Adds the batch's pairs to `eval/*`; ranks may have different numbers of pairs."""
        chosen, rejected, losses = (x[batch["valid"]] for x in self.score_pairs(batch))
        if len(losses):
            right = (chosen > rejected).int()
            self.eval_accuracy.update(right, torch.ones_like(right))
            self.eval_loss.update(losses)
            self.eval_margin.update(chosen - rejected)
        metrics = {"eval/loss": self.eval_loss, "eval/accuracy": self.eval_accuracy, "eval/margin": self.eval_margin}
        self.log_dict(metrics, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(losses))

    def score_pairs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Computes (P,) scores of the chosen, (P,) scores of the rejected, and (P,) losses of pairs; float32.

        A batch has `token_ids`, `attention_mask`, `response_mask` (B, T), `group_ids` (B,), and `margin` (P,).
        """
        names = ("token_ids", "attention_mask", "response_mask", "group_ids")
        rows: dict[str, Any] = {name: batch[name] for name in names}
        scores = self.reward_model(RowBatch(**rows))
        chosen, rejected = scores[0::2], scores[1::2]
        losses = bradley_terry_loss(chosen, rejected, batch["margin"], centering_coef=self.centering_coef)
        return chosen, rejected, losses

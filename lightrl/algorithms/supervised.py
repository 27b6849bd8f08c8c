"""Modules that learn from given rows: supervised fine-tuning, and reward models on preferences."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAccuracy

from lightrl.algorithms.saving import SavesPretrained
from lightrl.algorithms.schedule import LRSchedule, make_optimizer, run_position, set_named_rates, with_schedule
from lightrl.compat.arguments import at_least
from lightrl.compat.lightning import accumulates
from lightrl.distributed import strategies
from lightrl.models.loading import require_model
from lightrl.models.policy import PolicyModel
from lightrl.models.reward import RewardModel
from lightrl.models.spec import ModelSpec
from lightrl.ops.losses import bradley_terry_loss


class GradientWindow:
    """The batches of one optimizer step, whose gradient is that of the mean over all their tokens or pairs.

    Lightning averages the losses of `accumulate_grad_batches` batches, which weights a short batch like a long one, and
    divides the last window of an epoch by batches that it lacks. Here a batch's sum is divided by what the window would
    have if all its K batches had n_1 tokens like the first. The last batch, which knows the true N, multiplies the
    gradients that have gathered by K n_1 / N.

    Example: two batches of 3 and 1 tokens with sums s_1 and s_2: s_1 / 6 becomes s_1 / 4, and s_2 / 4 is added.
    """

    def __init__(self) -> None:
        self._update = -1
        self._expected = 0.0
        self._total = 0.0

    def loss(self, module: Any, summed: Tensor, count: Tensor) -> Tensor:
        """What `training_step` returns, which Lightning divides by `accumulate_grad_batches`.

        Args:
            module: The LightningModule, in `training_step`.
            summed: Scalar, the loss summed over this rank's part of the batch.
            count: Scalar, tokens or pairs of the batch on all ranks.
        """
        trainer = module.trainer
        batches = getattr(trainer, "accumulate_grad_batches", 1)
        if batches == 1:
            return summed * trainer.world_size / count.clamp(min=1)
        if trainer.global_step != self._update:
            self._update, self._total = trainer.global_step, 0.0
            self._expected = batches * max(float(count), 1.0)
        self._total += float(count)
        if not accumulates(trainer):
            total = max(self._total, 1.0)
            for parameter in module.parameters():
                if parameter.grad is not None and total != self._expected:
                    parameter.grad.mul_(self._expected / total)
            self._expected = total
        return summed * (trainer.world_size * batches / self._expected)


class _SupervisedModule(SavesPretrained):
    """One trained model, an optimizer whose schedule counts updates, and windows that count tokens or pairs."""

    def __init__(self, optimizer: Any, lr_scheduler: Any) -> None:
        super().__init__()
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self._window = GradientWindow()

    def setup(self, stage: str) -> None:
        """Rejects what can't work before the model is loaded.

        Raises:
            ValueError: Gradient accumulation with DeepSpeed, whose gradients can't be weighted.
        """
        trainer: Any = self.trainer
        strategies.refuse_unsupported(trainer.strategy)
        if isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} with DeepSpeed: it would weight "
                "every batch alike, however many tokens it has. Use DDP or FSDP2, or 1 with a larger batch_size."
            )
        require_model(self.trained_model_spec)

    @property
    @abstractmethod
    def trained_model_spec(self) -> ModelSpec:
        """How the trained model is built."""

    def models(self) -> list[Any]:
        return [self.trained_model[0]]

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""

    def configure_optimizers(self) -> Any:
        """One optimizer; the schedule counts updates."""
        groups = [group for group in self.parameter_groups() if group["params"]]
        optimizer = make_optimizer(self.optimizer_factory, groups, self.trainer.strategy)
        return with_schedule(optimizer, self.lr_scheduler_factory, run_position(self.trainer))

    def on_train_start(self) -> None:
        """Sets the rates of a schedule by name, which a checkpoint's optimizer has from a run of another length."""
        set_named_rates(self.lr_schedulers())

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """As `validation_step`, for `lightrl test`."""
        self.validation_step(batch, batch_idx)


class SFTLightningModule(_SupervisedModule):
    """Maximizes the log-probability of given completions.

    The loss is the negative log-probability summed over completion tokens and divided by their number in all batches of
    an update (`accumulate_grad_batches`) on all ranks. Layouts and chunked log-probs are those of the RL modules.

    Args:
        actor: The model: a folder or hub name, or a `ModelSpec`. In Python also a live model, which is trained itself:
            `ModelSpec.of(model, tokenizer)`.
        optimizer: Called with the trained parameters.
        lr_scheduler: `{name: cosine, warmup: 0.03}` (`LRSchedule`, over all updates of the run), or a function of the
            optimizer that returns a scheduler; stepped after every update. Defaults to a constant rate.
    """

    actor: PolicyModel

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

    @property
    def trained_model(self) -> tuple[PolicyModel, ModelSpec]:
        """What is written as a Hugging Face folder."""
        return self.actor, self.actor_spec

    @property
    def trained_model_spec(self) -> ModelSpec:
        return self.actor_spec

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": [p for p in self.actor.parameters() if p.requires_grad]}]

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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what `lightrl export` builds the model from."""
        checkpoint["lightrl"] = self._description({"actor": self.actor_spec})

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps behind the weights."""
        return int(self.trainer.global_step)


class RewardLightningModule(_SupervisedModule):
    """Fits a reward model to preferences by the Bradley-Terry likelihood.

        loss = mean over pairs of  -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2

    The mean is over the pairs of all batches of an update (`accumulate_grad_batches`) on all ranks. r is the output of
    a sequence-classification model with one label, read at the last token; tokens that the completions of a pair share
    are computed once if the layout allows it. `HFExport` writes a folder that `RewardModelSpec` loads.

    Metrics: `loss/preference`, `reward/accuracy` (fraction of pairs with r_chosen > r_rejected), `reward/margin` (mean
    of r_chosen - r_rejected), `reward/mean`, and on validation pairs `eval/loss`, `eval/accuracy`, `eval/margin`.

    Args:
        model: Where to start: a causal language model (an SFT export), whose backbone gets a new head, or a
            sequence-classification model. With LoRA the head is trained as well.
        optimizer: Called with the parameter groups `backbone` and `head`.
        head_lr: Learning rate of the head's group. Defaults to the optimizer's.
        lr_scheduler: As in `SFTLightningModule`.
        centering_coef: c, at least 0. Above 0 keeps scores near 0 on average, which preferences alone leave open.

    Raises:
        ValueError: A value is out of range, or the model's folder does not exist.
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
        super().__init__(optimizer, lr_scheduler)
        self.model_spec = ModelSpec.given(model, argument="model")
        self.head_lr = head_lr
        self.centering_coef = at_least("centering_coef", centering_coef, 0, "; 0 turns it off")
        self.eval_loss = MeanMetric()
        self.eval_margin = MeanMetric()
        self.eval_accuracy = BinaryAccuracy()

    def build_models(self, in_shards: bool = False) -> None:
        self.reward_model = RewardModel.for_training(self.model_spec)

    @property
    def trained_model(self) -> tuple[RewardModel, ModelSpec]:
        """What is written as a Hugging Face folder."""
        return self.reward_model, self.model_spec

    @property
    def trained_model_spec(self) -> ModelSpec:
        return self.model_spec

    def parameter_groups(self) -> list[dict[str, Any]]:
        head = self.reward_model.head_parameters()
        in_head = {id(p) for p in head}
        trained = [p for p in self.reward_model.parameters() if p.requires_grad and id(p) not in in_head]
        lr = {} if self.head_lr is None else {"lr": self.head_lr}
        return [{"params": trained, "name": "backbone"}, {"params": head, "name": "head", **lr}]

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

    def score_pairs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and losses of the pairs.

        Args:
            batch: `token_ids`, `attention_mask`, `response_mask` (B, T), `group_ids` (B,), and `margin` (P,).

        Returns:
            (P,) scores of the chosen, of the rejected, and losses; float32.
        """
        scores = self.reward_model(
            batch["token_ids"], batch["attention_mask"], batch["response_mask"], group_ids=batch["group_ids"]
        )
        chosen, rejected = scores[0::2], scores[1::2]
        losses = bradley_terry_loss(chosen, rejected, batch["margin"], centering_coef=self.centering_coef)
        return chosen, rejected, losses

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what `lightrl export` builds the model from."""
        checkpoint["lightrl"] = self._description({"reward_model": self.model_spec})

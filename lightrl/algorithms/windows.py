"""Gradient accumulation that counts tokens or pairs instead of batches."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from lightrl.compat.lightning import accumulates
from lightrl.distributed import strategies


class GradientWindow:
    """The batches of one optimizer step, whose gradient is that of the mean over all their tokens or pairs.

    Lightning averages the losses of `accumulate_grad_batches` batches, which weights a short batch like a long one, and
    divides the last window of an epoch by batches that it lacks. Here a batch's sum is divided by what the window would
    have if all its K batches had n_1 tokens like the first. The last batch, which knows the true N, multiplies the
    gradients that have gathered by K n_1 / N. What a subclass adds to a loss keeps its weight in equal batches.

    Example: two batches of 3 and 1 tokens with sums s_1 and s_2: s_1 / 6 becomes s_1 / 4, and s_2 / 4 is added.
    """

    def __init__(self) -> None:
        self._update = -1
        self._expected = 0.0
        self._total = 0.0

    def loss(self, module: Any, summed: Tensor, count: Tensor) -> Tensor:
        """What `training_step` returns, which Lightning divides by `accumulate_grad_batches`.

        Args:
            module: the LightningModule, in `training_step`.
            summed: scalar, the loss summed over this rank's part of the batch.
            count: scalar, tokens or pairs of the batch on all ranks.
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


def refuse_accumulation(trainer: Any) -> None:
    """Refuses gradient accumulation where gradients can't be weighted: DeepSpeed keeps them to itself.

    Raises:
        ValueError: see above.
    """
    strategies.refuse_unsupported(trainer.strategy)
    if isinstance(trainer.strategy, DeepSpeedStrategy) and trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} with DeepSpeed: it would weight every "
            "batch alike, however many tokens it has. Use DDP or FSDP2, or 1 with a larger batch_size."
        )

"""What the sums, maxima and metrics of a rollout run over: all ranks."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightrl.distributed import strategies
from lightrl.distributed.metrics import MetricSums


class Reduction:
    """Over all ranks. Every method is collective.

    Args:
        strategy: the trainer's.
        device: of the sums that ranks exchange.
    """

    def __init__(self, strategy: Strategy, device: torch.device) -> None:
        self._strategy = strategy
        self._device = device

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, on every rank."""
        return strategies.all_sum(self._strategy, tensor)

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks, on every rank."""
        return strategies.all_max(self._strategy, tensor)

    def means(self, sums: MetricSums) -> dict[str, float]:
        """Means and maxima of what all ranks have collected."""
        return sums.reduce(self.sum, self.max, self._device)

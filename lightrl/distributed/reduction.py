"""What the sums, maxima and metrics of a rollout run over: all ranks, or a piece of it on one rank."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightrl.distributed import strategies
from lightrl.distributed.metrics import MetricSums

__all__ = ["PieceReduction", "Reduction"]


class Reduction:
    """Over all ranks. Every method is collective.

    Args:
        strategy: the trainer's.
        device: of the sums that ranks exchange.

    Attributes:
        is_piece: whether the rows at hand are only a part of the rollout.
    """

    is_piece = False

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


class PieceReduction(Reduction):
    """Of a piece of a streamed rollout: ranks get theirs at different times, so that nothing is collective.

    Attributes:
        collected: metrics of the pieces so far, to be reduced over ranks when all are there.
    """

    is_piece = True

    def __init__(self) -> None:
        self.collected = MetricSums()

    def sum(self, tensor: Tensor) -> Tensor:
        """This rank's own."""
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """This rank's own."""
        return tensor

    def means(self, sums: MetricSums) -> dict[str, float]:
        """Nothing yet; collects the sums."""
        self.collected.merge(sums)
        return {}

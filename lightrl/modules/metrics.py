"""Exact means over micro-batches, mini-batches and ranks: sums and counts are kept, divided once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["MetricSums"]


class MetricSums:
    """Collects metrics as sums and counts, so that their mean does not depend on how a batch was cut.

    Names that end in `_max` are reduced by maximum, all others by mean.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, metrics: Mapping[str, Tensor | float], mask: Tensor | None = None) -> None:
        """Adds one micro-batch.

        Args:
            metrics: name -> (B, T) values, averaged over `mask`; or any other shape, averaged over all elements.
            mask: (B, T) bool.
        """
        for name, value in metrics.items():
            values = torch.as_tensor(value, dtype=torch.float32).detach().double()
            if mask is not None and values.shape == mask.shape:
                values = values[mask]
            values = values.reshape(-1)
            if name.endswith("_max"):
                top = values.max() if values.numel() else values.new_tensor(-float("inf"))
                self._maxima[name] = torch.maximum(self._maxima.get(name, top), top)
            else:
                self._sums[name] = self._sums.get(name, values.new_zeros(())) + values.sum()
                self._counts[name] = self._counts.get(name, values.new_zeros(())) + values.numel()

    def reduce(
        self, all_sum: Callable[[Tensor], Tensor], all_max: Callable[[Tensor], Tensor], device: torch.device
    ) -> dict[str, float]:
        """Means and maxima over all ranks; every rank must have added the same names."""
        out: dict[str, float] = {}
        names = sorted(self._sums)
        if names:
            stacked = torch.stack([torch.stack([self._sums[n].cpu(), self._counts[n].cpu()]) for n in names]).to(device)
            for name, (total, count) in zip(names, all_sum(stacked).tolist(), strict=True):
                if count:
                    out[name] = total / count
        names = sorted(self._maxima)
        if names:
            stacked = torch.stack([self._maxima[n].cpu() for n in names]).to(device)
            out.update(zip(names, all_max(stacked).tolist(), strict=True))
        return out

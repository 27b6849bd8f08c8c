"""Exact means over micro-batches, mini-batches, and ranks: sums and counts are divided once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightrl.distributed.strategies import gather_objects


class MetricSums:
    """Collects metrics as sums and counts, so that means don't depend on batch splits.

    Names ending in `_max` or `_min` are reduced by maximum or minimum, all others by mean.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, metrics: Mapping[str, Tensor | float], mask: Tensor | None = None) -> None:
        """Adds one micro-batch.

        Args:
            metrics: Metrics by name. (B, T) values are averaged over `mask`, other shapes over all elements.
            mask: (B, T) bool.
        """
        for name, value in metrics.items():
            values = torch.as_tensor(value, dtype=torch.float32).detach().double()
            chosen = mask if mask is not None and values.shape == mask.shape else torch.ones_like(values).bool()
            # No indexing by the mask: the size of the result is known only on the device, so it would synchronize.
            if name.endswith(("_max", "_min")):
                values = -values if name.endswith("_min") else values  # minima are maxima of negated values
                low = values.new_full((1,), -float("inf"))
                top = torch.cat([torch.where(chosen, values, low).reshape(-1), low]).max()
                self._maxima[name] = torch.maximum(self._maxima.get(name, top), top)
            else:
                total = torch.where(chosen, values, 0.0).sum()
                self._sums[name] = self._sums.get(name, torch.zeros_like(total)) + total
                self._counts[name] = self._counts.get(name, torch.zeros_like(total)) + chosen.sum()

    def reduce(
        self, all_sum: Callable[[Tensor], Tensor], all_max: Callable[[Tensor], Tensor], device: torch.device
    ) -> dict[str, float]:
        """Returns means and maxima over all ranks. Collective.

        Ranks may have added different names, such as a reward function that only some examples need. They first agree
        on the union of names.
        """
        known = gather_objects((sorted(self._sums), sorted(self._maxima)))
        out: dict[str, float] = {}
        zero, low = torch.zeros((), dtype=torch.float64), torch.full((), -float("inf"), dtype=torch.float64)
        names = sorted({name for sums, _ in known for name in sums})
        if names:
            pairs = [(self._sums.get(n, zero), self._counts.get(n, zero)) for n in names]
            stacked = torch.stack([torch.stack([total.to(device), count.to(device)]) for total, count in pairs])
            for name, (total, count) in zip(names, all_sum(stacked).tolist(), strict=True):
                if count:
                    out[name] = total / count
        names = sorted({name for _, maxima in known for name in maxima})
        if names:
            stacked = torch.stack([self._maxima.get(n, low).to(device) for n in names])
            tops = zip(names, all_max(stacked).tolist(), strict=True)
            signs = {name: -1.0 if name.endswith("_min") else 1.0 for name in names}
            out.update({name: signs[name] * top for name, top in tops if top > -float("inf")})
        return out

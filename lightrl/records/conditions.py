"""Conditions under which tokens were sampled: the tokens that sampling kept, and the experts that computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(eq=False)
class Support:
    """Token IDs that each of n tokens was drawn from after top-p, top-k, and min-p; sparse, on the host.

    Attributes:
        counts: (n,) int64 number of remaining IDs. 0 means all (nothing was cut, or the token is context).
        ids: (sum of counts,) int32 remaining IDs, concatenated over tokens.
    """

    counts: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    @staticmethod
    def of(kept: Sequence[Any]) -> Support:
        """Creates a support from the remaining IDs of each token, as lists or tensors."""
        parts = [torch.as_tensor(ids, dtype=torch.int32) for ids in kept]
        counts = torch.tensor([len(part) for part in parts], dtype=torch.long)
        return Support(counts, torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32))

    @staticmethod
    def whole(count: int) -> Support:
        """Creates a support of `count` tokens without a cut."""
        return Support(torch.zeros(count, dtype=torch.long), torch.empty(0, dtype=torch.int32))

    @staticmethod
    def joined(*parts: tuple[int, Support | None]) -> Support | None:
        """Concatenates (number of tokens, support) pairs; None stands for no cut."""
        if all(support is None for _, support in parts):
            return None
        found = [Support.whole(count) if support is None else support for count, support in parts]
        assert all(len(s) == count for s, (count, _) in zip(found, parts, strict=True)), "an entry for each token"
        return Support(torch.cat([s.counts for s in found]), torch.cat([s.ids for s in found]))

    def after(self, count: int) -> Support:
        """Returns the support of `count` tokens without a cut, followed by these."""
        return Support(torch.cat([torch.zeros(count, dtype=torch.long), self.counts]), self.ids)

    def upto(self, end: int) -> Support:
        """Returns the support of the first `end` tokens."""
        counts = self.counts[:end]
        return Support(counts, self.ids[: int(counts.sum())])

    @staticmethod
    def at(supports: Sequence[Support | None], targets: Tensor, width: int) -> Support | None:
        """Selects tokens from the supports of several rows; None if nothing was cut for any of them.

        `targets` are (M,) int64 token positions: row times `width` plus position in the row. The result is on their
        device.
        """
        if all(support is None for support in supports):
            return None
        counts = torch.zeros(len(supports), width, dtype=torch.long)
        for row, support in enumerate(supports):
            if support is not None:
                counts[row, : len(support)] = support.counts
        ids = torch.cat([support.ids for support in supports if support is not None])
        flat = counts.view(-1)
        starts, wanted = (flat.cumsum(0) - flat), targets.cpu()
        own = flat[wanted]
        index = torch.repeat_interleave(starts[wanted] - (own.cumsum(0) - own), own) + torch.arange(int(own.sum()))
        return Support(own.to(targets.device), ids[index].to(targets.device))


@dataclass(eq=False)
class Routes:
    """Experts that each of the first n tokens of a row was routed to by a mixture-of-experts model; on the host.

    Attributes:
        experts: (n, L, K) uint8, or int16 with more than 256 experts: the K experts in each of L layers. L counts
            layers with a router, or all layers of the model if the engine numbers them so.
    """

    experts: Tensor

    def __len__(self) -> int:
        return len(self.experts)

    def upto(self, end: int) -> Routes:
        """Returns the routes of the first `end` tokens."""
        return Routes(self.experts[:end])

    @staticmethod
    def extended(own: Routes | None, longer: Routes | None) -> Routes | None:
        """Extends `own` by the later tokens of `longer`, which was recorded when the same row had more tokens."""
        if own is None or longer is None:
            return own or longer
        return Routes(torch.cat([own.experts, longer.experts[len(own) :]]))

    @staticmethod
    def at(routes: Sequence[Routes | None], places: Tensor, width: int) -> Tensor | None:
        """Selects the experts of tokens from several rows; None if nothing was recorded for any row.

        `places` are (N,) int64 token positions: row times `width` plus position in the row. Returns (N, L, K) int64 on
        their device, -1 for tokens without recorded experts.
        """
        known = [entry.experts for entry in routes if entry is not None]
        if not known:
            return None
        table = torch.cat([torch.full_like(known[0][:1], -1, dtype=torch.int16), *known])
        counts = torch.tensor([0 if entry is None else len(entry) for entry in routes])
        row, place = places.cpu() // width, places.cpu() % width
        index = torch.where(place < counts[row], (counts.cumsum(0) - counts)[row] + place + 1, 0)
        return table[index].to(places.device).long()

    @staticmethod
    def told_apart(token_ids: Tensor, routes: Sequence[Routes | None]) -> Tensor:
        """Returns (B, T) numbers that are equal if token and experts are; the tokens if nothing was recorded."""
        experts = Routes.at(routes, torch.arange(token_ids.numel()), token_ids.shape[1])
        if experts is None:
            return token_ids
        both = torch.cat([token_ids.reshape(-1, 1), experts.flatten(1)], 1)
        numbers = np.unique(both.numpy(), axis=0, return_inverse=True)[1]
        return torch.from_numpy(numbers).view(token_ids.shape)

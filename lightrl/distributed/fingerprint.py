"""Whether weights have changed, whoever changed them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightrl.distributed.strategies import local_shard


@torch.no_grad()
def fingerprint(model: nn.Module | Iterable[nn.Parameter]) -> int:
    """A number that changes with any parameter's value or place: sums of the bits that this rank holds, as integers.

    Version counters of tensors do not see writes through `.data`. Each row's and each column's sum is multiplied by its
    number, so that values that change places count. Reading all weights costs less than copying half of them, and waits
    for each device once.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for number, parameter in enumerate(model.parameters() if isinstance(model, nn.Module) else model):
        own = local_shard(parameter).contiguous()
        if not own.numel():
            continue
        rows = own.view(len(own), -1) if own.ndim > 1 else own.view(1, -1)
        whole = rows.shape[1] * rows.element_size() % 8 == 0 and rows.data_ptr() % 8 == 0
        bits = rows.view(torch.int64 if whole else torch.uint8)
        value = sum(_weighed(bits.sum(dim, dtype=torch.int64)) for dim in (0, 1))
        sums.setdefault(own.device, []).append(value * (2 * number + 1))  # type: ignore[arg-type]
    return sum(int(torch.stack(parts).sum()) for parts in sums.values())


def _weighed(sums: Tensor) -> Tensor:
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()

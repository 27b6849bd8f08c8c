"""Whether weights have changed, whoever changed them."""

from __future__ import annotations

import torch
from torch import nn

from lightrl.distributed.strategies import local_shard


@torch.no_grad()
def fingerprint(model: nn.Module) -> int:
    """A number that changes with any parameter's value: the sum of the bits that this rank holds, as integers.

    Version counters of tensors do not see writes through `.data`. Reading all weights once costs about as much as
    copying a fifth of them.
    """
    total = 0
    for number, parameter in enumerate(model.parameters()):
        bits = local_shard(parameter).contiguous().view(-1)
        if not bits.numel():
            continue
        if bits.numel() * bits.element_size() % 8 == 0 and bits.data_ptr() % 8 == 0:
            value = int(bits.view(torch.int64).sum())
        else:
            value = int(bits.view(torch.uint8).sum(dtype=torch.int64))
        total = (total * 31 + value + number) % (1 << 61)
    return total

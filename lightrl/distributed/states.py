"""Fingerprints of weights, and random states of all ranks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightrl.distributed import strategies
from lightrl.distributed.strategies import local_shard


@torch.no_grad()
def fingerprint(model: nn.Module | Iterable[nn.Parameter]) -> int:
    """Returns a number that changes with any parameter's value or position, from the bits that this rank holds.

    Unlike tensor version counters, it detects writes through `.data`. Each row's and column's sum is multiplied by its
    index, so swapped values also change it. Reading all weights costs less than copying half of them, and synchronizes
    once per device.
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


def derived_seed(*numbers: int) -> int:
    """Derives a 56-bit seed from several numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def collect_random_states() -> list[dict[str, Any]]:
    """Returns the states of Python's, NumPy's, and torch's random generators, one entry per rank. Collective."""
    name, keys, *rest = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, numbers, gauss = random.getstate()
    own: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *map(float, rest)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    return strategies.gather_objects(own)


def restore_random_states(states: list[dict[str, Any]]) -> None:
    """Restores this rank's random states. A rank missing in the checkpoint keeps its current states."""
    rank = torch.distributed.get_rank() if strategies.has_process_group() else 0
    if rank >= len(states):
        return
    state = states[rank]
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

"""The random generators' states of every rank, as plain data that a checkpoint can hold."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from lightrl.distributed import strategies


def derived_seed(*numbers: int) -> int:
    """A 56-bit seed that depends on all of some numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def collect() -> list[dict[str, Any]]:
    """States of Python's, NumPy's and torch's generators, one entry per rank. Collective."""
    name, keys, *rest = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, numbers, gauss = random.getstate()
    own: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *map(float, rest)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    return strategies.gather_objects(own)


def restore(states: list[dict[str, Any]]) -> None:
    """Puts this rank's states back. A rank that the checkpoint does not know keeps its own."""
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

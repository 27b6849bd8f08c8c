"""Private parts of torch 2.13; tests/compat/test_torch.py fails if they change."""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn

_PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of this process


def fake_tensors() -> AbstractContextManager[Any]:
    """Context manager in which operations compute only shapes and dtypes, without allocating memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(tensor: Tensor) -> int:
    """Returns a number that is equal for two tensors if and only if they share memory, including fake tensors."""
    return int(tensor.untyped_storage()._cdata)


def persistent_buffers(module: nn.Module) -> set[str]:
    """Returns the names of buffers in checkpoints, without `state_dict`, which would gather sharded parameters."""
    names = set()
    for prefix, part in module.named_modules():
        kept = set(part._buffers) - part._non_persistent_buffers_set
        names |= {f"{prefix}.{name}" if prefix else name for name in kept}
    return names


def page_lock(memory: Tensor) -> weakref.finalize[..., Tensor] | None:
    """Page-locks host memory that torch did not allocate, for direct copies from and to GPUs.

    No effect if this process doesn't use CUDA. If CUDA rejects it, logs a warning, and copies are slower.

    Args:
        memory: Contiguous tensor on the host.

    Returns:
        Finalizer that unlocks the pages before `memory` is unmapped. None if nothing was locked.
    """
    if not (torch.cuda.is_initialized() and memory.nbytes):
        return None
    runtime: Any = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    if error:
        with suppress(RuntimeError):  # otherwise the next kernel would raise the error
            torch.zeros(1, device="cuda")
        logging.getLogger(__name__).warning(
            "CUDA did not page-lock %d MiB of host memory (error %d): copies to and from GPUs are slower.",
            memory.nbytes >> 20,
            error,
        )
        return None
    undo = weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    undo.atexit = False  # the process releases everything at exit, possibly after CUDA has shut down
    return undo


def map_shared(descriptor: int, nbytes: int) -> Tensor:
    """Maps a file's memory as bytes, page-locked while the tensor exists if this process uses CUDA."""
    memory = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    page_lock(memory)
    return memory

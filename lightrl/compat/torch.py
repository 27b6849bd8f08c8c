"""Private parts of torch 2.13; tests/compat/test_torch.py fails if they change."""

from __future__ import annotations

import inspect
import logging
import mmap
import weakref
from contextlib import AbstractContextManager, suppress
from functools import cache
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
    """Page-locks contiguous host memory that torch did not allocate, for direct copies from and to GPUs.

    No effect if this process doesn't use CUDA. If CUDA rejects it, logs a warning, and copies are slower. Returns a
    finalizer that unlocks the pages before `memory` is unmapped, or None if nothing was locked.
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


# ---- FlexAttention -----------------------------------------------------------------------------------------------

FLEX_BLOCK = 128  # block size of FlexAttention in tokens
MOST_GRAPHS = 64  # graphs of FlexAttention: by dtype, heads, head size, gradient, autocast


def has_triton() -> bool:
    """Whether FlexAttention's compiled kernel can be built; torch has no public function for it."""
    from torch.utils._triton import has_triton as known

    return bool(known())


@cache
def flex_attention(*, compiled: bool, backend: Any = "inductor") -> Any:
    """Returns torch's `flex_attention`, compiled as one graph for all lengths.

    It raises an error instead of silently falling back to a dense kernel. It has its own limit on the number of graphs,
    since torch's limit of 8 applies to the whole process. Without `compiled`, it stores the whole score matrix.
    """
    from torch.nn.attention import flex_attention as module

    if not compiled:
        return module.flex_attention
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        settings: Any = {"recompile_limit": MOST_GRAPHS}
        return torch.compile(module.flex_attention, dynamic=True, fullgraph=True, backend=backend, **settings)
    function = torch.compile(module.flex_attention, dynamic=True, fullgraph=True, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):  # type: ignore[attr-defined]
            return function(*args, **kwargs)

    return call


def flex_block_mask(visible: Any, some: Tensor, full: Tensor, device: torch.device) -> Any:
    """Creates a FlexAttention block mask without evaluating every pair of tokens, unlike `create_block_mask`.

    `some` and `full` are (n, n) bool on the host: blocks of 128 x 128 pairs of which some or all may be visible.
    `visible` maps (batch, head, query, key), tensors on `device`, to bool. It is not called for blocks in `full`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    mask = BlockMask.from_kv_blocks(*listed(some & ~full), *listed(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=visible)
    return mask.to(device)

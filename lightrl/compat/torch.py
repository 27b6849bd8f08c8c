"""Private parts of torch 2.13 that LightRL relies on; tests/compat/test_torch.py fails when they change."""

from __future__ import annotations

import inspect
import logging
import weakref
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

FLEX_BLOCK = 128  # tokens of FlexAttention's blocks
_PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of this process
MOST_GRAPHS = 64  # of FlexAttention: by dtype, heads, head size, gradient, autocast


def has_triton() -> bool:
    """Whether FlexAttention's compiled kernel can be built; torch has no public question for it."""
    from torch.utils._triton import has_triton as known

    return bool(known())


@cache
def flex_attention(*, compiled: bool, backend: Any = "inductor") -> Any:
    """torch's `flex_attention`, compiled for all lengths as one graph: it raises instead of falling back silently
    to a dense kernel. It has its own limit on the number of graphs: torch's, 8, is for the whole process.

    Args:
        compiled: False gives torch's own call, which holds the whole matrix of scores.
        backend: Of `torch.compile`.
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
    """A block mask of FlexAttention without asking for every pair of tokens, as `create_block_mask` would.

    Args:
        visible: (batch, head, query, key) -> bool, with tensors on `device`.
        some: (n, n) bool on the host, blocks of 128 x 128 pairs of which some may be visible.
        full: (n, n) bool, blocks of which all are, for which `visible` is not called.
        device: Of the mask.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    mask = BlockMask.from_kv_blocks(*listed(some & ~full), *listed(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=visible)
    return mask.to(device)


def varlen_attention() -> Any:
    """torch's variable-length flash attention; None in a version that does not have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def fake_tensors() -> AbstractContextManager[Any]:
    """Within it operations work out shapes and dtypes, and compute and hold nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_key(tensor: Tensor) -> int:
    """A number that two tensors share if and only if they share their memory, fake tensors included."""
    return int(tensor.untyped_storage()._cdata)


def persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers that a checkpoint holds; `state_dict` would gather sharded parameters to tell."""
    names = set()
    for prefix, part in module.named_modules():
        kept = set(part._buffers) - part._non_persistent_buffers_set
        names |= {f"{prefix}.{name}" if prefix else name for name in kept}
    return names


def page_lock(memory: Tensor) -> weakref.finalize[..., Tensor] | None:
    """Page-locks host memory that torch did not allocate, for direct copies from and to GPUs.

    Without CUDA in this process nothing happens. If CUDA rejects it, a warning is logged, and copies are slower.

    Args:
        memory: Contiguous, on the host.

    Returns:
        A finalizer that undoes it, at the latest before the pages of `memory` are unmapped. None if nothing was done.
    """
    if not (torch.cuda.is_initialized() and memory.nbytes):
        return None
    runtime: Any = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
    if error:
        with suppress(RuntimeError):  # else the next kernel would raise the error
            torch.zeros(1, device="cuda")
        logging.getLogger(__name__).warning(
            "CUDA did not page-lock %d MiB of host memory (error %d): copies between it and GPUs are slower.",
            memory.nbytes >> 20,
            error,
        )
        return None
    undo = weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    undo.atexit = False  # a process that ends gives everything back, and CUDA may have ended before
    return undo

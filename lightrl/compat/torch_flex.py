"""Private parts of torch 2.13's FlexAttention; tests/compat/test_torch.py fails if they change."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

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
    since torch's limit of 8 applies to the whole process.

    Args:
        compiled: Whether to compile. False returns torch's function, which stores the whole score matrix.
        backend: Backend of `torch.compile`.
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

    Args:
        visible: Function (batch, head, query, key) -> bool, with tensors on `device`.
        some: (n, n) bool on the host, blocks of 128 x 128 pairs of which some may be visible.
        full: (n, n) bool, blocks of which all pairs are visible, for which `visible` is not called.
        device: Device of the mask.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    mask = BlockMask.from_kv_blocks(*listed(some & ~full), *listed(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=visible)
    return mask.to(device)

"""Kernels of stream attention on CUDA.

Half precision without shared prefixes uses torch's variable-length flash kernel, everything else compiled FlexAttention
with a block mask built from the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from lightrl.compat.torch import FLEX_BLOCK as BLOCK
from lightrl.compat.torch import flex_attention, flex_block_mask, has_triton
from lightrl.models.packing.streams import TokenStream


def kernel(q: Tensor, v: Tensor, stream: TokenStream) -> Callable[..., Tensor] | None:
    """Returns the kernel for a stream, called like `stream_attention`; None without Triton."""
    return _varlen if _varlen_fits(q, v, stream) else _flex if has_triton() else None


def _varlen_fits(q: Tensor, v: Tensor, stream: TokenStream) -> bool:
    """Whether torch's variable-length flash kernel supports this stream: unshared, half precision, Ampere or later."""
    return (
        not any(parent >= 0 for parent in stream.parents)
        and v.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and not torch.are_deterministic_algorithms_enabled()  # its backward pass sums in no fixed order
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, stream: TokenStream, scale: float, window: int | None) -> Tensor:
    def ends() -> Tensor:
        return torch.tensor([0, *stream.lengths]).cumsum(0).to(q.device, torch.int32, non_blocking=True)

    cumulative, longest = stream.cached("varlen", ends), max(stream.lengths)
    left = -1 if window is None else window - 1
    out: Any = varlen_attn(
        q, k, v, cumulative, cumulative, longest, longest,
        scale=scale, window_size=(left, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out


def _flex(q: Tensor, k: Tensor, v: Tensor, stream: TokenStream, scale: float, window: int | None) -> Tensor:
    """FlexAttention over the whole stream. Empty blocks are skipped.

    The stream is padded to at least two whole blocks, and always has a window, possibly unbounded, so that compiled
    graphs don't depend on the stream.
    """
    mask = stream.cached(("flex", window), lambda: _block_mask(stream, window, q.device))
    size = mask.seq_lengths[0]
    heads_first = (F.pad(x, (0, 0, 0, 0, 0, size - len(x))).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    flex = flex_attention(compiled=q.is_cuda)
    out: Tensor = flex(*heads_first, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0, :, : len(q)].transpose(0, 1)


def _block_mask(stream: TokenStream, window: int | None, device: torch.device) -> Any:
    """Builds FlexAttention's block mask. Empty and full blocks are computed from segments on the host."""
    count = stream.num_tokens
    size = max(2, -(-count // BLOCK)) * BLOCK
    # A segment's keys are visible up to the end of its family. The padding of the last block is a separate segment.
    lengths = torch.tensor([*stream.lengths, size - count])
    first, last = (
        torch.tensor(column).repeat_interleave(lengths)
        for column in ([*stream.starts, count], [*stream.family_ends, size])
    )
    offsets = torch.tensor([*stream.offsets, 0]).repeat_interleave(lengths)
    place = torch.arange(size) - first + offsets
    both = torch.stack([last, place]).to(device, non_blocking=True)
    family_end, position = both.unbind()
    reach = torch.full((), size if window is None else window, device=device)

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        family = (query >= key) & (query < family_end[key])
        return family & (position[query] - position[key] < reach)

    return flex_block_mask(visible, *_blocks_seen(last, place, window), device)


def _blocks_seen(family_ends: Tensor, positions: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Returns two (blocks, blocks) bool tensors: some query may see some key, and all queries see all keys."""
    ends, places = (x.view(-1, BLOCK) for x in (family_ends, positions))
    key = torch.arange(len(ends))
    query = key[:, None]
    some = (query >= key) & (ends.amax(1) > query * BLOCK)
    full = (query > key) & (ends.amin(1) >= (query + 1) * BLOCK)
    if window is not None:
        lowest, highest = places.amin(1), places.amax(1)
        some &= lowest[:, None] - highest < window
        full &= highest[:, None] - lowest < window
    return some, full

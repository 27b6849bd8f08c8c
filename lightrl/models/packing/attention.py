"""Attention over token streams, registered with transformers under the name "lightrl".

It runs scaled-dot-product attention with a mask, per batch of segments. `cuda_attention.py` has faster kernels with
equal results. Without a stream, it is transformers' regular SDPA attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightrl.models.packing.streams import LayoutError, TokenStream

IMPLEMENTATION = "lightrl"
NEW_BUCKET = 1 << 23  # query-key pairs x heads x head size that take as long as a new bucket's kernel calls


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    stream: TokenStream | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function called by transformers: (1, H, N, D) queries in, (1, N, H, D) out."""
    if stream is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    for name in ("s_aux", "softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise LayoutError(f"its attention uses {name}")
    if attention_mask is not None and attention_mask.numel() > 1:  # streams come with an empty mask
        raise LayoutError("its layers build their own attention masks")
    stream.num_calls += 1
    window = _window(module, kwargs.get("sliding_window"), stream)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    device = query.device.type  # under autocast, rotary embeddings leave queries and keys wider than values
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
    if stream.group is None:
        return stream_attention(q, k, v, stream, scale, window).unsqueeze(0), None
    from lightrl.models.packing.context import heads_for_tokens, tokens_for_heads

    q, k, v = (heads_for_tokens(x, stream.group) for x in (q, k, v))
    out = stream_attention(q, k, v, stream, scale, window)
    return tokens_for_heads(out, stream.group).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def _window(module: Any, window: int | None, stream: TokenStream) -> int | None:
    """Returns the sliding window of this layer; None if every row fits into it."""
    config = getattr(module, "config", None)
    if window is None and config is not None:
        types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
        slides = types[index] == "sliding_attention" if types and index is not None else True
        configured = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if slides and configured is not None and configured < stream.max_length:
            raise LayoutError("its sliding window is not passed to the attention function")
    return window if window is not None and window < stream.max_length else None


def stream_attention(
    q: Tensor, k: Tensor, v: Tensor, stream: TokenStream, scale: float, window: int | None = None
) -> Tensor:
    """Attention of every stream token to the tokens up to itself in its segment, and to all ancestors of the segment.

    Takes (N, H, D) queries and (N, K, D) keys and values, where K divides H, and returns (N, H, D). `scale` multiplies
    dot products. `window` is the number of last tokens of its row visible to a token, including itself; None for all.
    """
    if q.is_cuda:
        from lightrl.models.packing import cuda_attention

        if (kernel := cuda_attention.kernel(q, v, stream)) is not None:
            return kernel(q, k, v, stream, scale, window)
    return _masked_sdpa(q, k, v, stream, scale, window)


def _masked_sdpa(q: Tensor, k: Tensor, v: Tensor, stream: TokenStream, scale: float, window: int | None) -> Tensor:
    """Attends each segment's queries to its own and its ancestors' keys, in batches with a boolean mask."""
    repeat = q.shape[1] // k.shape[1]

    def taken(x: Tensor, index: Tensor) -> Tensor:
        """Maps (N, H, D) to (S, H, L, D)."""
        return x.index_select(0, index.view(-1)).view(*index.shape, *x.shape[1:]).transpose(1, 2)

    parts, tokens = [], []
    bound = NEW_BUCKET // (q.shape[1] * q.shape[2])
    batches = stream.cached(("masked", window), lambda: _masked_batches(stream, window, q.device, bound))
    for queries, seen, real, own, mask in batches:
        keys, values = (taken(x, seen).repeat_interleave(repeat, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(taken(q, queries), keys, values, attn_mask=mask, scale=scale)
        parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, real))
        tokens.append(own)
    order = torch.cat(tokens)  # every stream token once
    return torch.cat(parts).index_select(0, order.argsort())


def _masked_batches(
    stream: TokenStream, window: int | None, device: torch.device, new_bucket: int
) -> list[tuple[Tensor, ...]]:
    """Returns batches of S segments as right-padded matrices, in which padding points to token 0.

    Each has (S, L) stream tokens as queries; (S, K) stream tokens as keys, preceded by all ancestors; (n,) positions of
    real tokens in the flattened queries, and the stream tokens there; and (S, 1, L, K) keys visible to each query.
    """
    paths: list[Tensor] = []  # stream tokens visible to each segment
    for start, length, parent in zip(stream.starts, stream.lengths, stream.parents, strict=True):
        own = torch.arange(start, start + length)
        paths.append(own if parent < 0 else torch.cat([paths[parent], own]))
    result = []
    sizes = [(length, len(path)) for length, path in zip(stream.lengths, paths, strict=True)]
    for bucket in buckets(sizes, new_bucket):
        lengths = torch.tensor([stream.lengths[i] for i in bucket])
        seen = torch.tensor([len(paths[i]) for i in bucket])
        queries = pad_sequence([paths[i][-stream.lengths[i] :] for i in bucket], batch_first=True)
        keys = pad_sequence([paths[i] for i in bucket], batch_first=True)
        slots = torch.arange(queries.shape[1])
        place = slots[:, None] + (seen - lengths)[:, None, None]  # (S, L, 1), position of each query among its keys
        columns = torch.arange(keys.shape[1])
        mask = columns <= place
        if window is not None:
            mask &= columns > place - window
        real = (slots < lengths[:, None]).view(-1).nonzero().squeeze(1)
        tensors = (queries, keys, real, queries.view(-1)[real], mask[:, None])
        result.append(tuple(x.to(device) for x in tensors))
    return result


def buckets(sizes: list[tuple[int, int]], new_bucket: int) -> list[list[int]]:
    """Groups segments by their (queries, keys) into buckets in which padding to the longest wastes little.

    `new_bucket` is the number of query-key pairs that take as long as the kernel calls of a new bucket.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i][1], sizes[i][0]), reverse=True)
    result: list[list[int]] = []
    widest = tallest = useful = 0
    for i in order:
        queries, keys = sizes[i]
        if result:
            area = max(tallest, queries) * widest * (len(result[-1]) + 1)
            if area - useful - queries * keys <= max(new_bucket, area // 8):
                result[-1].append(i)
                tallest, useful = max(tallest, queries), useful + queries * keys
                continue
        result.append([i])
        widest, tallest, useful = keys, queries, queries * keys
    return result

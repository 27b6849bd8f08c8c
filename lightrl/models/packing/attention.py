"""Attention over token streams, registered with transformers under the name "lightrl".

Three implementations with equal results:

- CUDA: torch's variable-length flash kernel for half precision without shared prefixes, otherwise compiled
  FlexAttention with a block mask built from the stream.
- Other devices: scaled-dot-product attention with a mask, per batch of segments.

Without a stream, it is transformers' regular SDPA attention.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightrl.compat.torch import FLEX_BLOCK as BLOCK
from lightrl.compat.torch import flex_attention, flex_block_mask, has_triton
from lightrl.compat.transformers import attention_implementation, has_recurrent_state, supports_sdpa
from lightrl.models.packing.streams import LayoutError, TokenStream

IMPLEMENTATION = "lightrl"
NEW_BUCKET = 1 << 23  # query-key pairs x heads x head size that take as long as a new bucket's kernel calls


def unsupported_reason(lm: Any, body: Any) -> str | None:
    """Returns why a model can't run packed, according to its class and config; None if it can."""
    config = lm.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    checks = {
        "its attention can't be replaced": not supports_sdpa(lm),
        "it has a recurrent state": has_recurrent_state(lm),
        f"it has layers of type {sorted(layer_types)}": not layer_types <= {"full_attention", "sliding_attention"},
        "it doesn't accept position_ids": "position_ids" not in inspect.signature(body.forward).parameters,
        "its attention has a distance bias (ALiBi)": bool(getattr(config, "alibi", False)),
        "it caps attention logits": getattr(config, "attn_logit_softcapping", None) is not None,
        "it uses chunked attention": getattr(config, "attention_chunk_size", None) is not None,
        "it uses bidirectional attention": bool(getattr(config, "use_bidirectional_attention", False))
        or not getattr(config, "is_causal", True),
        "it is an encoder-decoder": getattr(config, "is_encoder_decoder", False),
    }
    return next((reason for reason, true in checks.items() if true), None)


def keep_attention_caps(lm: Any) -> None:
    """Switches to eager attention if the model caps attention logits, which transformers' SDPA silently ignores."""
    config = lm.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None and attention_implementation(config) == "sdpa":
        lm.set_attn_implementation(text_attention(lm.config, "eager"))


def text_attention(config: Any, attention: str) -> str | dict[str, str]:
    """Returns an attention implementation only for the language model, not for vision or audio encoders."""
    text = config.get_text_config()
    if text is config:
        return attention
    return {name: attention for name in config.sub_configs if getattr(config, name, None) is text}


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

    Args:
        q: (N, H, D) queries.
        k: (N, K, D) keys, where K divides H.
        v: (N, K, D) values.
        stream: Token stream.
        scale: Scale of the dot products.
        window: Number of last tokens of its row visible to a token, including itself. Defaults to all.

    Returns:
        (N, H, D).
    """
    if q.is_cuda and _varlen_fits(q, v, stream):
        return _varlen(q, k, v, stream, scale, window)
    if q.is_cuda and has_triton():
        return _flex(q, k, v, stream, scale, window)
    return _masked_sdpa(q, k, v, stream, scale, window)


# ---- all devices: SDPA with a mask -----------------------------------------------------------------------------------


@dataclass
class _Batch:
    """Segments as right-padded matrices, in which padding points to token 0.

    Attributes:
        queries: (S, L) stream tokens.
        keys: (S, K) stream tokens, preceded by all ancestors.
        real: (n,) positions of real tokens in the flattened queries.
        tokens: (n,) stream tokens at these positions.
        mask: (S, 1, L, K) bool, the keys visible to each query.
    """

    queries: Tensor
    keys: Tensor
    real: Tensor
    tokens: Tensor
    mask: Tensor


def _cached(stream: TokenStream, name: Any, make: Any) -> Any:
    if name not in stream.cache:
        stream.cache[name] = make()
    return stream.cache[name]


def _masked_sdpa(q: Tensor, k: Tensor, v: Tensor, stream: TokenStream, scale: float, window: int | None) -> Tensor:
    """Attends each segment's queries to its own and its ancestors' keys, in batches with a boolean mask."""
    repeat = q.shape[1] // k.shape[1]

    def taken(x: Tensor, index: Tensor) -> Tensor:
        """Maps (N, H, D) to (S, H, L, D)."""
        return x.index_select(0, index.view(-1)).view(*index.shape, *x.shape[1:]).transpose(1, 2)

    parts, tokens = [], []
    bound = NEW_BUCKET // (q.shape[1] * q.shape[2])
    for batch in _cached(stream, ("masked", window), lambda: _masked_batches(stream, window, q.device, bound)):
        keys, values = (taken(x, batch.keys).repeat_interleave(repeat, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(taken(q, batch.queries), keys, values, attn_mask=batch.mask, scale=scale)
        parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, batch.real))
        tokens.append(batch.tokens)
    order = torch.cat(tokens)  # every stream token once
    return torch.cat(parts).index_select(0, order.argsort())


def _masked_batches(stream: TokenStream, window: int | None, device: torch.device, new_bucket: int) -> list[_Batch]:
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
        result.append(_Batch(*(x.to(device) for x in tensors)))
    return result


def buckets(sizes: list[tuple[int, int]], new_bucket: int) -> list[list[int]]:
    """Groups (queries, keys) segments into buckets in which padding to the longest wastes little.

    Args:
        sizes: Queries and keys of each segment.
        new_bucket: Number of query-key pairs that take as long as the kernel calls of a new bucket.
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


# ---- CUDA: FlexAttention and the varlen kernel -----------------------------------------------------------------------


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

    cumulative, longest = _cached(stream, "varlen", ends), max(stream.lengths)
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
    mask = _cached(stream, ("flex", window), lambda: _block_mask(stream, window, q.device))
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

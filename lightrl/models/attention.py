"""Attention over the streams of `layouts.py`, registered with transformers under the name "lightrl".

Three ways to the same numbers:

- CPU: `cpu_attention.py`.
- CUDA: FlexAttention with a block mask made from the plan.
- anywhere, and for sliding windows on CPU: scaled-dot-product attention with a mask, per batch of segments.

Without a plan it is transformers' ordinary SDPA attention. Letters: N stream tokens, H heads, K key-value heads, D
head size, S segments, L length of the longest.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightrl.models.cpu_attention import buckets, cpu_attention
from lightrl.models.layouts import LayoutError, Plan

__all__ = ["IMPLEMENTATION", "keep_attention_caps", "stream_attention", "text_attention", "unsupported_reason"]

IMPLEMENTATION = "lightrl"


def unsupported_reason(lm: Any, body: Any) -> str | None:
    """Why a model cannot run packed, as far as its class and configuration tell; None if nothing speaks against it."""
    config = lm.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    checks = {
        "its attention cannot be replaced": not getattr(lm, "_supports_sdpa", False),
        "it keeps a recurrent state": getattr(lm, "_is_stateful", False),
        f"it has layers of type {sorted(layer_types)}": not layer_types <= {"full_attention", "sliding_attention"},
        "it takes no position_ids": "position_ids" not in inspect.signature(body.forward).parameters,
        "its attention has a bias by distance (ALiBi)": bool(getattr(config, "alibi", False)),
        "it caps attention logits": getattr(config, "attn_logit_softcapping", None) is not None,
        "it attends in chunks": getattr(config, "attention_chunk_size", None) is not None,
        "it attends in both directions": bool(getattr(config, "use_bidirectional_attention", False))
        or not getattr(config, "is_causal", True),
        "it is an encoder-decoder": getattr(config, "is_encoder_decoder", False),
    }
    return next((reason for reason, true in checks.items() if true), None)


def keep_attention_caps(lm: Any) -> None:
    """Takes eager attention where the model caps attention logits, which transformers' SDPA leaves out silently."""
    config = lm.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None and config._attn_implementation == "sdpa":
        lm.set_attn_implementation(text_attention(lm.config, "eager"))


def text_attention(config: Any, attention: str) -> str | dict[str, str]:
    """An attention implementation for the language model alone, and not for a vision or sound encoder."""
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
    plan: Plan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls: (1, H, N, D) queries in, (1, N, H, D) out."""
    if plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    for name in ("s_aux", "softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise LayoutError(f"its attention takes {name}")
    if attention_mask is not None and attention_mask.numel() > 1:  # not the blank one that stands for the plan
        raise LayoutError("its layers make attention masks of their own")
    plan.num_calls += 1
    window = _window(module, kwargs.get("sliding_window"), plan)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    device = query.device.type  # under autocast rotary embeddings leave queries and keys wider than values
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
    return stream_attention(q, k, v, plan, scale, window).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def _window(module: Any, window: int | None, plan: Plan) -> int | None:
    """The sliding window of this layer, None where every row fits into it."""
    config = getattr(module, "config", None)
    if window is None and config is not None:
        types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
        slides = types[index] == "sliding_attention" if types and index is not None else True
        configured = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        if slides and configured is not None and configured < plan.max_length:
            raise LayoutError("its sliding window does not reach the attention function")
    return window if window is not None and window < plan.max_length else None


def stream_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, window: int | None = None) -> Tensor:
    """Attention of every stream token to its segment up to itself and to the segment's parent.

    Args:
        q: (N, H, D). k, v: (N, K, D), K divides H.
        plan: the stream.
        scale: of the dot products.
        window: a token sees this many last tokens of its row, itself included; None sees all.

    Returns:
        (N, H, D).
    """
    if q.is_cuda and _flex_usable():
        return _flex(q, k, v, plan, scale, window)
    if q.device.type == "cpu" and window is None and q.shape[-1] == v.shape[-1]:
        return cpu_attention(q, k, v, plan, scale)
    return _masked_sdpa(q, k, v, plan, scale, window)


# ---- batches of segments -----------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Stretches of the stream side by side, right-padded: `index` (S, L), where pads point at token 0."""

    index: Tensor
    real: Tensor | None  # positions in the flattened (S * L) that are no pads; None where there are no pads
    tokens: Tensor  # the stream tokens at those positions
    lengths: Tensor  # (S,)

    @staticmethod
    def of(stretches: list[tuple[int, int]], device: torch.device) -> Batch:
        """From (start, length) pairs."""
        starts, lengths = torch.tensor(stretches, device=device).T
        slots = torch.arange(int(lengths.max()), device=device)
        inside = slots < lengths[:, None]
        index = torch.where(inside, starts[:, None] + slots, 0)
        if bool(inside.all()):
            return Batch(index, None, index.view(-1), lengths)
        real = inside.view(-1).nonzero().squeeze(1)
        return Batch(index, real, index.view(-1)[real], lengths)

    def take(self, x: Tensor) -> Tensor:
        """(N, H, D) to (S, H, L, D)."""
        return x.index_select(0, self.index.view(-1)).view(*self.index.shape, *x.shape[1:]).transpose(1, 2)

    def compact(self, x: Tensor) -> Tensor:
        """(S, H, L, D) to the values of `tokens`, (n, H, D)."""
        flat = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
        return flat if self.real is None else flat.index_select(0, self.real)


def _cached(plan: Plan, name: Any, make: Any) -> Any:
    if name not in plan.cache:
        plan.cache[name] = make()
    return plan.cache[name]


def _expand_heads(x: Tensor, repeat: int) -> Tensor:
    """(S, K, L, D) to (S, K * repeat, L, D)."""
    return x if repeat == 1 else x.repeat_interleave(repeat, 1)


# ---- anywhere: SDPA with a mask ----------------------------------------------------------------------------------


def _masked_sdpa(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, window: int | None) -> Tensor:
    """Each segment's queries against its parent's keys and its own, batched, with a boolean mask."""
    repeat = q.shape[1] // k.shape[1]
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    for queries, keys, mask in _cached(plan, ("masked", window), lambda: _masked_batches(plan, window, q.device)):
        taken = (x.index_select(0, keys.view(-1)).view(*keys.shape, *x.shape[1:]) for x in (k, v))
        ks, vs = (_expand_heads(x.transpose(1, 2), repeat) for x in taken)
        o = F.scaled_dot_product_attention(queries.take(q), ks, vs, attn_mask=mask, scale=scale)
        out = out.index_copy(0, queries.tokens, queries.compact(o))
    return out


def _masked_batches(plan: Plan, window: int | None, device: torch.device) -> list[tuple[Batch, Tensor, Tensor]]:
    spans = list(zip(plan.starts, plan.lengths, plan.parents, strict=True))
    spans = [span for span in spans if span[1]]
    prefix = [plan.lengths[p] if p >= 0 else 0 for _, _, p in spans]
    result = []
    for bucket in buckets([(n, n + extra) for (_, n, _), extra in zip(spans, prefix, strict=True)]):
        queries = Batch.of([spans[i][:2] for i in bucket], device)
        heads = torch.tensor([(plan.starts[max(spans[i][2], 0)], prefix[i]) for i in bucket], device=device)
        slots = torch.arange(max(spans[i][1] + prefix[i] for i in bucket), device=device)
        head_start, head_length = heads[:, :1], heads[:, 1:]
        own = queries.index[:, :1] + slots - head_length
        keys = torch.where(slots < head_length, head_start + slots, own)
        keys = torch.where(slots < head_length + queries.lengths[:, None], keys, 0)
        at = torch.arange(queries.index.shape[1], device=device)[:, None] + head_length[:, None]  # (S, L, 1)
        mask = slots <= at
        if window is not None:
            mask &= slots > at - window
        result.append((queries, keys, mask[:, None]))
    return result


# ---- CUDA: FlexAttention -----------------------------------------------------------------------------------------


def _flex_usable() -> bool:
    """Whether FlexAttention's compiled kernel can be built: it needs Triton."""
    from torch.utils._triton import has_triton

    return bool(has_triton())


_compiled: list[Any] = []


def _flex(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float, window: int | None) -> Tensor:
    """FlexAttention over the whole stream; blocks that the plan leaves empty are never computed."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = _cached(plan, ("flex", window), lambda: _block_mask(plan, window, q.device))
    if q.is_cuda and not _compiled:
        _compiled.append(torch.compile(flex_attention, dynamic=True))
    flex = _compiled[0] if q.is_cuda else flex_attention
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = flex(*heads_first, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def _block_mask(plan: Plan, window: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    count = torch.tensor(plan.lengths, device=device)
    segment = torch.repeat_interleave(torch.arange(len(count), device=device), count)
    parent = torch.tensor(plan.parents, device=device)[segment]
    position = plan.position_ids

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        family = (segment[key] == segment[query]) | (segment[key] == parent[query])
        seen = family & (position[key] <= position[query])
        return seen if window is None else seen & (position[query] - position[key] < window)

    size, on_gpu = plan.num_tokens, device.type == "cuda"  # uncompiled it would hold (tokens, tokens) matrices
    return create_block_mask(visible, None, None, size, size, device=device, _compile=on_gpu)

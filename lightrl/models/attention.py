"""Attention over the streams of `layouts.py`, registered with transformers under the name "lightrl".

Three ways to the same numbers:

- CPU: torch's own flash kernel on batches of segments. A completion attends to its prompt and to itself in two calls
  that are merged by their log-sum-exp, as ring attention does, so the prompt's keys are never copied per completion and
  no mask is built; the backward pass calls the kernel's backward with the merged output and log-sum-exp.
- CUDA: FlexAttention with a block mask made from the plan.
- anywhere, and for sliding windows on CPU: scaled-dot-product attention with a mask, per batch of segments.

Without a plan it is transformers' ordinary SDPA attention. Letters: N stream tokens, H heads, K key-value heads, D
head size, S segments, L length of the longest.

Source: Liu et al. 2023 (ring attention), https://arxiv.org/abs/2310.01889, for merging partial attention; here the
parts are a shared prompt and a completion on one device, not blocks on several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lightrl.models.layouts import LayoutError, Plan

__all__ = ["IMPLEMENTATION", "stream_attention", "unsupported_reason"]

IMPLEMENTATION = "lightrl"


def unsupported_reason(lm: Any) -> str | None:
    """Why a model cannot run packed, as far as its class and configuration tell; None if nothing speaks against it."""
    config = lm.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    checks = {
        "its attention cannot be replaced": not getattr(lm, "_supports_sdpa", False),
        "it keeps a recurrent state": getattr(lm, "_is_stateful", False),
        f"it has layers of type {sorted(layer_types)}": not layer_types <= {"full_attention", "sliding_attention"},
        "it caps attention logits": getattr(config, "attn_logit_softcapping", None) is not None,
        "it attends in chunks": getattr(config, "attention_chunk_size", None) is not None,
        "it attends in both directions": bool(getattr(config, "use_bidirectional_attention", False))
        or not getattr(config, "is_causal", True),
        "it is an encoder-decoder": getattr(config, "is_encoder_decoder", False),
    }
    return next((reason for reason, true in checks.items() if true), None)


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
    plan.num_calls += 1
    window = _window(module, kwargs.get("sliding_window"), plan)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    device = query.device.type  # under autocast rotary embeddings leave queries and keys wider than values
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
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
        out: Tensor = _MergedFlash.apply(q, k, v, plan, scale)  # type: ignore[no-untyped-call]
        return out
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

    def pad_additive(self, dtype: torch.dtype) -> Tensor | None:
        """(S, 1, 1, L) to add to attention logits: -inf on pads."""
        if self.real is None:
            return None
        inside = torch.arange(self.index.shape[1], device=self.index.device) < self.lengths[:, None]
        zeros = torch.zeros(inside.shape, dtype=dtype, device=inside.device)
        return zeros.masked_fill_(~inside, -torch.inf)[:, None, None]


def _buckets(sizes: list[tuple[int, int]]) -> list[list[int]]:
    """Indices of (queries, keys) stretches, in buckets in which padding to the longest wastes little.

    A new bucket costs a few kernel calls, about the time of 2^17 query-key pairs.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i][1], sizes[i][0]), reverse=True)
    buckets: list[list[int]] = []
    widest, tallest, useful = 0, 0, 0
    for i in order:
        queries, keys = sizes[i]
        if buckets:
            area = max(tallest, queries) * widest * (len(buckets[-1]) + 1)
            waste = area - useful - queries * keys
            if waste <= max(1 << 17, area // 8):
                buckets[-1].append(i)
                tallest, useful = max(tallest, queries), useful + queries * keys
                continue
        buckets.append([i])
        widest, tallest, useful = keys, queries, queries * keys
    return buckets


def _causal_batches(plan: Plan, device: torch.device) -> list[Batch]:
    """All segments, each to attend to itself."""
    spans = [(s, n) for s, n in zip(plan.starts, plan.lengths, strict=True) if n]
    return [Batch.of([spans[i] for i in bucket], device) for bucket in _buckets([(n, n) for _, n in spans])]


def _cross_batches(plan: Plan, device: torch.device) -> list[tuple[Batch, Batch]]:
    """Per group with a shared prompt: all its completions' tokens, which lie side by side, and the prompt's."""
    totals: dict[int, int] = {}
    for parent, length in zip(plan.parents, plan.lengths, strict=True):
        if parent >= 0 and length:
            totals[parent] = totals.get(parent, 0) + length
    groups = [((plan.starts[p] + plan.lengths[p], n), (plan.starts[p], plan.lengths[p])) for p, n in totals.items()]
    buckets = _buckets([(queries[1], keys[1]) for queries, keys in groups])
    return [
        (Batch.of([groups[i][0] for i in bucket], device), Batch.of([groups[i][1] for i in bucket], device))
        for bucket in buckets
    ]


def _cached(plan: Plan, name: Any, make: Any) -> Any:
    if name not in plan.cache:
        plan.cache[name] = make()
    return plan.cache[name]


# ---- CPU: flash kernel, merged by log-sum-exp --------------------------------------------------------------------

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _expand_heads(x: Tensor, repeat: int) -> Tensor:
    """(S, K, L, D) to (S, K * repeat, L, D)."""
    return x if repeat == 1 else x.repeat_interleave(repeat, 1)


def _fold(x: Tensor, heads: int) -> Tensor:
    """(S, H, Q, D) to (S, K, H / K * Q, D): query heads that share keys become more queries."""
    return x.reshape(x.shape[0], heads, -1, x.shape[-1])


class _MergedFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Tensor:  # type: ignore[override]
        repeat = q.shape[1] // k.shape[1]
        causal = _cached(plan, "causal", lambda: _causal_batches(plan, q.device))
        cross = _cached(plan, "cross", lambda: _cross_batches(plan, q.device))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        for batch in causal:
            keys, values = (_expand_heads(batch.take(x), repeat) for x in (k, v))
            o, part = _flash(batch.take(q), keys, values, 0.0, True, scale=scale)
            out[batch.tokens] = batch.compact(o)
            lse[batch.tokens] = batch.compact(part.unsqueeze(-1)).squeeze(-1)
        for queries, prompt in cross:
            taken = queries.take(q)
            mask = prompt.pad_additive(q.dtype)
            o, part = _flash(
                _fold(taken, k.shape[1]), prompt.take(k), prompt.take(v), 0.0, False, attn_mask=mask, scale=scale
            )
            o, part = o.reshape(taken.shape), part.reshape(taken.shape[:3])
            _merge(out, lse, queries.tokens, queries.compact(o), queries.compact(part.unsqueeze(-1)).squeeze(-1))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, repeat, heads = ctx.plan, ctx.scale, q.shape[1] // k.shape[1], k.shape[1]
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        for batch in plan.cache["causal"]:
            keys, values = (_expand_heads(batch.take(x), repeat) for x in (k, v))
            parts = _flash_backward(
                batch.take(grad), batch.take(q), keys, values, batch.take(out), _padded_lse(batch, lse), 0.0, True,
                scale=scale,
            )  # fmt: skip
            for target, part in zip(grads, parts, strict=True):
                if part.shape[1] != target.shape[1]:
                    part = part.unflatten(1, (heads, repeat)).sum(2)
                target[batch.tokens] = batch.compact(part)
        for queries, prompt in plan.cache["cross"]:
            folded = [_fold(queries.take(x), heads) for x in (grad, q, out)]
            folded_lse = _padded_lse(queries, lse).reshape(*folded[0].shape[:3])
            dq, dk, dv = _flash_backward(
                folded[0], folded[1], prompt.take(k), prompt.take(v), folded[2], folded_lse, 0.0, False,
                attn_mask=prompt.pad_additive(q.dtype), scale=scale,
            )  # fmt: skip
            shape = (dq.shape[0], q.shape[1], -1, dq.shape[3])
            grads[0].index_add_(0, queries.tokens, queries.compact(dq.reshape(shape)))
            grads[1].index_add_(0, prompt.tokens, prompt.compact(dk))
            grads[2].index_add_(0, prompt.tokens, prompt.compact(dv))
        return *grads, None, None


def _padded_lse(batch: Batch, lse: Tensor) -> Tensor:
    """(S, H, L) with +inf on pads: their probabilities are then exactly 0, and so are their gradients."""
    taken = batch.take(lse.unsqueeze(-1)).squeeze(-1)
    if batch.real is None:
        return taken
    inside = torch.arange(batch.index.shape[1], device=lse.device) < batch.lengths[:, None]
    return taken.masked_fill(~inside[:, None], torch.inf)


def _merge(out: Tensor, lse: Tensor, tokens: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Puts attention over two disjoint sets of keys together, in place."""
    own_lse = lse[tokens]
    total = torch.logaddexp(own_lse, other_lse)
    own, more = (own_lse - total).exp().unsqueeze(-1), (other_lse - total).exp().unsqueeze(-1)
    out[tokens] = (out[tokens] * own + other * more).to(out.dtype)
    lse[tokens] = total


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
    for bucket in _buckets([(n, n + extra) for (_, n, _), extra in zip(spans, prefix, strict=True)]):
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
    if not _compiled:
        _compiled.append(torch.compile(flex_attention, dynamic=True) if q.is_cuda else flex_attention)
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = _compiled[0](*heads_first, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
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

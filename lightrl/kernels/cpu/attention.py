"""Attention over the streams of `layouts.py` on a CPU, without a mask over the stream.

The stream is cut into *pieces*: segments of about one length, and the children of a segment together with the *prompt*
that they share, which is all of their ancestors end to end. A piece is small enough to stay in the processor's cache.
Where it can be, it is a view of the stream; only segments of unequal lengths and prompts of several segments are
gathered. Two kernels give the same numbers:

- short pieces: batched products and a softmax over the prompt's and the own keys side by side. With some ten or hundred
  keys this is about twice as fast as the flash kernel, which is made for long sequences; probabilities are kept.
- others: torch's flash kernel, once for a completion on itself and once for all completions of a group on the prompt;
  the two are merged by their log-sum-exp, as ring attention does. The backward pass calls the kernel's backward with
  the merged output and log-sum-exp.

Source: Liu et al. 2023 (ring attention), https://arxiv.org/abs/2310.01889, for merging partial attention; here the
parts are a shared prompt and a completion on one device, not blocks on several.

Shapes: N stream tokens, H heads, K key-value heads, R = H / K, D head size, F families of a piece, C segments of
each, L tokens of the longest, P tokens of the shared prompt (0 without one).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from lightrl.compat.torch import flash_attention, flash_attention_backward, softmax_backward

MOST_KEYS = 192  # up to here batched products are the faster kernel
CACHE_ELEMENTS = 1 << 19  # of a short piece's attention matrix: 2 MiB in float32
FLASH_ELEMENTS = 1 << 22  # of a long piece's, which is never whole; the flash kernel is fast with a thousand queries
NEW_PIECE = 1 << 15  # a piece costs some kernel calls, about the time of so many query-key pairs of a head


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, stream: Segments, scale: float) -> Tensor:
    out: Tensor = _Attention.apply(q, k, v, stream, scale)  # type: ignore[no-untyped-call]
    return out


class Segments(Protocol):
    """What the kernels read of a `TokenStream`: segments, and room for what is derived from them."""

    starts: list[int]
    lengths: list[int]
    parents: list[int]
    cache: dict[Any, Any]


def ancestors(stream: Segments, parent: int) -> list[tuple[int, int]]:
    """(start, length) of a segment and all its ancestors, the root first; none of segment -1."""
    path = []
    while parent >= 0:
        path.append((stream.starts[parent], stream.lengths[parent]))
        parent = stream.parents[parent]
    return path[::-1]


# ---- pieces ------------------------------------------------------------------------------------------------------

Stretches = list[list[tuple[int, int]]]
"""(start, length) pairs, by family."""


@dataclass
class Spans:
    """(F, C) stretches of the stream of up to L tokens."""

    shape: tuple[int, int, int]  # (F, C, L)
    first: int
    strides: tuple[int, int] | None  # tokens from a family to the next and from a stretch to the next: it is a view
    index: Tensor | None = None  # (F * C * L) otherwise; pads point at `first`
    real: Tensor | None = None  # which of these are no pads
    tokens: Tensor | None = None  # the stream's tokens at those places
    pads: Tensor | None = None  # (F, C, L, 1, 1) bool

    @staticmethod
    def of(families: Stretches, device: torch.device) -> Spans:
        """From the (start, length) pairs of each family, equally many in each."""
        flat = [span for family in families for span in family]
        shape = len(families), len(families[0]), max(length for _, length in flat)
        steps = [_step([family[0][0] for family in families]), _step([start for start, _ in families[0]])]
        if all(step is not None and step >= 0 for step in steps) and all(  # a view cannot go backwards
            (start, length) == (flat[0][0] + f * steps[0] + c * steps[1], shape[2])  # type: ignore[operator]
            for f, family in enumerate(families)
            for c, (start, length) in enumerate(family)
        ):
            return Spans(shape, flat[0][0], (steps[0], steps[1]))  # type: ignore[arg-type]
        starts, lengths = torch.tensor(flat, device=device).T
        slots = torch.arange(shape[2], device=device)
        inside = slots < lengths[:, None]
        index = torch.where(inside, starts[:, None] + slots, flat[0][0]).view(-1)
        real = inside.view(-1).nonzero().squeeze(1)
        pads = None if len(real) == len(index) else ~inside.view(*shape, 1, 1)
        return Spans(shape, flat[0][0], None, index, real, index[real], pads)

    @staticmethod
    def of_prompts(paths: Stretches, device: torch.device) -> Spans:
        """(F, 1) prompts from the stretches of each, equally many tokens in all."""
        if all(len(path) == 1 for path in paths):
            return Spans.of(paths, device)
        tokens = [i for path in paths for start, length in path for i in range(start, start + length)]
        shape = len(paths), 1, len(tokens) // len(paths)
        return Spans(shape, tokens[0], None, torch.tensor(tokens, device=device))

    def take(self, x: Tensor) -> Tensor:
        """(N, H, D) to (F, C, L, H, D)."""
        if self.strides is None:
            return x.index_select(0, self.index).view(*self.shape, *x.shape[1:])  # type: ignore[arg-type]
        step, offset = x.stride(0), x.storage_offset() + self.first * x.stride(0)
        family, stretch = self.strides
        strides = (family * step, stretch * step, *x.stride())
        return x.as_strided((*self.shape, *x.shape[1:]), strides, offset)

    def take_gradient(self, x: Tensor) -> Tensor:
        """The same with zeros in place of pads, which have no gradient."""
        taken = self.take(x)
        return taken if self.pads is None else taken.masked_fill_(self.pads, 0.0)

    def put(self, target: Tensor, values: Tensor) -> None:
        """Writes (F, C, L, H, D) into (N, H, D)."""
        if self.strides is not None:
            self.take(target).copy_(values)
        else:
            flat = values.reshape(-1, *target.shape[1:]).index_select(0, self.real)  # type: ignore[arg-type]
            target.index_copy_(0, self.tokens, flat)  # type: ignore[arg-type]

    def add(self, target: Tensor, values: Tensor) -> None:
        """Adds (F, C, L, H, D) to (N, H, D); there are no pads, and tokens may be among them more than once."""
        if self.strides is not None:
            self.take(target).add_(values)
        else:
            target.index_add_(0, self.index, values.reshape(-1, *target.shape[1:]))  # type: ignore[arg-type]


def _step(starts: list[int]) -> int | None:
    """The difference of neighbours, 0 for one; None if they differ."""
    steps = {b - a for a, b in pairwise(starts)}
    return (steps or {0}).pop() if len(steps) < 2 else None


@dataclass
class Piece:
    """Segments that are computed together."""

    queries: Spans
    prompts: Spans | None  # (F, 1) of P tokens
    short: bool  # which kernel
    mask: Tensor | None = None  # (1, R * L, P + L) to add, for short pieces

    @property
    def num_shared(self) -> int:
        """P."""
        return 0 if self.prompts is None else self.prompts.shape[2]


def buckets(sizes: list[tuple[int, int]], new_bucket: int = 1 << 17) -> list[list[int]]:
    """Indices of (queries, keys) stretches, in buckets in which padding to the longest wastes little.

    Args:
        sizes: queries and keys of each stretch.
        new_bucket: query-key pairs that take the time of a new bucket's kernel calls.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i][1], sizes[i][0]), reverse=True)
    result: list[list[int]] = []
    widest = tallest = useful = 0
    for i in order:
        queries, keys = sizes[i]
        if result:
            area = max(tallest, queries) * widest * (len(result[-1]) + 1)
            waste = area - useful - queries * keys
            if waste <= max(new_bucket, area // 8):
                result[-1].append(i)
                tallest, useful = max(tallest, queries), useful + queries * keys
                continue
        result.append([i])
        widest, tallest, useful = keys, queries, queries * keys
    return result


def _pieces(stream: Segments, heads: int, repeat: int, q: Tensor) -> list[Piece]:
    """All pieces, ancestors before their descendants, which add to their gradients."""
    spans = list(zip(stream.starts, stream.lengths, strict=True))
    roots = [span for span, parent in zip(spans, stream.parents, strict=True) if parent < 0]
    pieces: list[tuple[Stretches, Stretches | None, int]] = []
    for bucket in buckets([(n, n) for _, n in roots], NEW_PIECE):
        members = sorted(roots[i] for i in bucket)
        longest = max(n for _, n in members)
        for part in _split(members, heads * longest * longest, _most_elements(longest, q)):
            pieces.append(([part], None, longest))
    for prompts, families in _families(stream, spans):
        longest, shared = max(n for _, n in families[0]), sum(n for _, n in prompts[0])
        size = heads * longest * (shared + longest)
        per_family, most = size * len(families[0]), _most_elements(shared + longest, q)
        if per_family > CACHE_ELEMENTS or len(families) == 1:
            for prompt, family in zip(prompts, families, strict=True):
                pieces += [([part], [prompt], shared + longest) for part in _split(family, size, most)]
        else:
            many = CACHE_ELEMENTS // per_family
            for i in range(0, len(families), many):
                pieces.append((families[i : i + many], prompts[i : i + many], shared + longest))
    return [_piece(families, prompts, keys, repeat, q) for families, prompts, keys in pieces]


def _is_short(keys: int, q: Tensor) -> bool:
    return keys <= MOST_KEYS and q.dtype in (torch.float32, torch.float64)


def _most_elements(keys: int, q: Tensor) -> int:
    """Of a piece's attention matrix."""
    return CACHE_ELEMENTS if _is_short(keys, q) else FLASH_ELEMENTS


def _split(members: list[tuple[int, int]], size: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """Parts of at most `most` elements where one has `size`."""
    many = max(1, most // size)
    return (members[i : i + many] for i in range(0, len(members), many))


def _families(stream: Segments, spans: list[tuple[int, int]]) -> Iterator[tuple[Stretches, Stretches]]:
    """Prompts and the segments that follow them, by depth; neighbouring families of the same lengths come together."""
    children: dict[int, list[tuple[int, int]]] = {}
    for span, parent in zip(spans, stream.parents, strict=True):
        if parent >= 0:
            children.setdefault(parent, []).append(span)
    families = []
    for path, members in sorted(((ancestors(stream, p), own) for p, own in children.items()), key=lambda x: len(x[0])):
        shared = sum(n for _, n in path)
        for bucket in buckets([(n, shared + n) for _, n in members], NEW_PIECE):
            families.append((shared, path, sorted(members[i] for i in bucket)))

    def lengths(number: int) -> tuple[int, ...]:
        shared, _, members = families[number]
        own = [n for _, n in members]
        return (shared, *own) if len(set(own)) == 1 else (-1, number)  # unequal ones stay alone

    for _, same in groupby(range(len(families)), key=lengths):
        _, paths, segments = zip(*(families[i] for i in same), strict=True)
        yield list(paths), list(segments)


def _piece(families: Stretches, prompts: Stretches | None, keys: int, repeat: int, q: Tensor) -> Piece:
    queries = Spans.of(families, q.device)
    shared = None if prompts is None else Spans.of_prompts(prompts, q.device)
    short = _is_short(keys, q)
    piece = Piece(queries, shared, short)
    if short:
        own = torch.arange(queries.shape[2], device=q.device)
        hidden = torch.arange(piece.num_shared + len(own), device=q.device) > own[:, None] + piece.num_shared
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        piece.mask = mask.repeat(repeat, 1)[None]
    return piece


# ---- the two kernels ---------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, stream: Segments, scale: float) -> Tensor:  # type: ignore[override]
        heads, repeat = q.shape[1], q.shape[1] // k.shape[1]
        key = "pieces", heads, repeat, q.dtype
        if key not in stream.cache:
            stream.cache[key] = _pieces(stream, heads, repeat, q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kept = []
        for piece in stream.cache[key]:
            forward = _short_forward if piece.short else _flash_forward
            kept.append(forward(piece, q, k, v, out, scale))
        ctx.save_for_backward(q, k, v, out, *kept)
        ctx.pieces, ctx.scale = stream.cache[key], scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, *kept = ctx.saved_tensors
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        for piece, state in zip(ctx.pieces, kept, strict=True):
            if piece.short:
                parts = _short_backward(piece, q, k, v, state, grad, ctx.scale)
            else:
                parts = _flash_backward_piece(piece, q, k, v, out, state, grad, ctx.scale)
            for target, own, of_prompt in zip(grads, *parts, strict=True):
                piece.queries.put(target, own)
                if of_prompt is not None and piece.prompts is not None:
                    piece.prompts.add(target, of_prompt)
        return *grads, None, None


Parts = tuple[tuple[Tensor, Tensor, Tensor], tuple[None, Tensor | None, Tensor | None]]
"""Gradients of queries, keys and values of a piece, (F, C, L, ., D), and of its prompts, (F, 1, P, K, D)."""


def _queries_by_key(taken: Tensor, kv: int) -> Tensor:
    """(F, C, L, H, D) to (F * C * K, R * L, D): query heads that share keys become more queries."""
    f, c, length, heads, d = taken.shape
    return taken.unflatten(3, (kv, -1)).permute(0, 1, 3, 4, 2, 5).reshape(f * c * kv, heads // kv * length, d)


def _from_queries_by_key(x: Tensor, shape: tuple[int, int, int], kv: int) -> Tensor:
    """Back to (F, C, L, H, D)."""
    f, c, length = shape
    return x.view(f, c, kv, -1, length, x.shape[-1]).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)


def _keys_side_by_side(piece: Piece, x: Tensor) -> Tensor:
    """(N, K, D) to (F * C * K, P + L, D): the prompt's before the own."""
    own = piece.queries.take(x).transpose(2, 3)
    if piece.prompts is not None:
        shared = piece.prompts.take(x).transpose(2, 3)
        own = torch.cat([shared.expand(-1, own.shape[1], -1, -1, -1), own], 3)
    return own.reshape(-1, *own.shape[3:])


def _short_forward(piece: Piece, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> Tensor:
    queries = _queries_by_key(piece.queries.take(q), k.shape[1])
    keys, values = _keys_side_by_side(piece, k), _keys_side_by_side(piece, v)
    probs = torch.baddbmm(piece.mask, queries, keys.transpose(1, 2), alpha=scale).softmax(-1)  # type: ignore[arg-type]
    piece.queries.put(out, _from_queries_by_key(torch.bmm(probs, values), piece.queries.shape, k.shape[1]))
    return probs


def _short_backward(piece: Piece, q: Tensor, k: Tensor, v: Tensor, probs: Tensor, grad: Tensor, scale: float) -> Parts:
    shape, kv = piece.queries.shape, k.shape[1]
    queries, g = (_queries_by_key(x, kv) for x in (piece.queries.take(q), piece.queries.take_gradient(grad)))
    keys, values = _keys_side_by_side(piece, k), _keys_side_by_side(piece, v)
    d_probs = torch.bmm(g, values.transpose(1, 2))
    d_scores = softmax_backward(d_probs, probs)
    nothing = d_scores.new_empty(1)
    d_queries = torch.baddbmm(nothing, d_scores, keys, beta=0, alpha=scale)
    d_keys = torch.baddbmm(nothing, d_scores.transpose(1, 2), queries, beta=0, alpha=scale)
    d_values = torch.bmm(probs.transpose(1, 2), g)
    own, of_prompt = [], []
    for x in (d_keys, d_values):
        x = x.view(*shape[:2], kv, -1, x.shape[-1]).transpose(2, 3)
        own.append(x[:, :, piece.num_shared :])
        of_prompt.append(x[:, :, : piece.num_shared].sum(1, keepdim=True) if piece.num_shared else None)
    return (_from_queries_by_key(d_queries, shape, kv), *own), (None, *of_prompt)  # type: ignore[return-value]


def _rows(taken: Tensor, repeat: int = 1) -> Tensor:
    """(F, C, L, H, D) to (F * C, H * repeat, L, D)."""
    x = taken.flatten(0, 1).transpose(1, 2)
    return x if repeat == 1 else x.repeat_interleave(repeat, 1)


def _group_queries(taken: Tensor, kv: int) -> Tensor:
    """(F, C, L, H, D) to (F, K, C * R * L, D): all queries that meet one prompt's keys."""
    f, _, _, _, d = taken.shape
    return taken.unflatten(3, (kv, -1)).permute(0, 3, 1, 4, 2, 5).reshape(f, kv, -1, d)


def _from_group_queries(x: Tensor, shape: tuple[int, int, int], *size: int) -> Tensor:
    """(F, K, C * R * L, ...) to (F, C, L, H, ...), `size` being what follows."""
    f, c, length = shape
    x = x.reshape(f, x.shape[1], c, -1, length, *size)
    return x.permute(0, 2, 4, 1, 3, *range(5, 5 + len(size))).flatten(3, 4)


def _flash_forward(piece: Piece, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> Tensor:
    """Returns the merged log-sum-exp, (F, C, L, H)."""
    shape, kv, repeat = piece.queries.shape, k.shape[1], q.shape[1] // k.shape[1]
    taken = piece.queries.take(q)
    keys, values = (_rows(piece.queries.take(x), repeat) for x in (k, v))
    o, lse = flash_attention(_rows(taken), keys, values, causal=True, scale=scale)
    o, lse = o.transpose(1, 2).unflatten(0, shape[:2]), lse.transpose(1, 2).unflatten(0, shape[:2])
    if piece.prompts is not None:
        keys, values = (_rows(piece.prompts.take(x)) for x in (k, v))
        other, other_lse = flash_attention(_group_queries(taken, kv), keys, values, causal=False, scale=scale)
        other, other_lse = _from_group_queries(other, shape, q.shape[2]), _from_group_queries(other_lse, shape)
        total = torch.logaddexp(lse, other_lse)
        own_share, other_share = ((x - total).exp_().unsqueeze(-1) for x in (lse, other_lse))
        o, lse = (o * own_share).add_(other * other_share).to(out.dtype), total
    piece.queries.put(out, o)
    return lse


def _flash_backward_piece(
    piece: Piece, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float
) -> Parts:
    shape, kv, repeat, d = piece.queries.shape, k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    g, taken, o = piece.queries.take_gradient(grad), piece.queries.take(q), piece.queries.take(out)
    keys, values = (_rows(piece.queries.take(x), repeat) for x in (k, v))
    own_lse = _rows(lse.unsqueeze(-1)).squeeze(-1).contiguous()
    own = _rows(g), _rows(taken), keys, values, _rows(o), own_lse
    parts = flash_attention_backward(*own, causal=True, scale=scale)
    dq, dk, dv = (x.transpose(1, 2).unflatten(0, shape[:2]) for x in parts)
    if repeat > 1:
        dk, dv = (x.unflatten(3, (kv, repeat)).sum(4) for x in (dk, dv))
    if piece.prompts is None:
        return (dq, dk, dv), (None, None, None)
    keys, values = (_rows(piece.prompts.take(x)) for x in (k, v))
    folded_g, folded_q, folded_o = (_group_queries(x, kv) for x in (g, taken, o))
    folded_lse = _group_queries(lse.unsqueeze(-1), kv).squeeze(-1)
    parts = flash_attention_backward(folded_g, folded_q, keys, values, folded_o, folded_lse, causal=False, scale=scale)
    dq = dq + _from_group_queries(parts[0], shape, d)
    dk_prompt, dv_prompt = (x.transpose(1, 2).unsqueeze(1) for x in parts[1:])
    return (dq, dk, dv), (None, dk_prompt, dv_prompt)

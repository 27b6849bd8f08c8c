"""Turns a (B, T) batch into the cheapest stream of tokens that gives the same results.

The stream consists of *segments*, each a stretch of one row:

    packed    [row 0][row 1][row 2]...
    tree      [system prompt][prompt of group 0][rest of row 0][turn of rows 1, 2][rest of 1][rest of 2][prompt of ...

A token attends to its own segment up to itself and to all of the segment's ancestors: what rows begin with alike is
computed once, however often they branch (`prefixes.py` says where). Positions restart with every row and continue from
a parent, so each token sees exactly what it sees in a plain forward pass; the results differ by rounding only. Outputs
are handed out by row: a token of a shared segment may be trained in one row and be context in another. Tokens that no
wanted output depends on are left out: all padding and everything from a row's last response token on, whose successor
is not predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrl.kernels.cpu import enabled
from lightrl.models.packing.prefixes import Prefixes, no_prefixes, shared_prefixes
from lightrl.records import Routes


class LayoutError(ValueError):
    """A model does something that the packed layouts cannot do the same way."""


@dataclass
class TokenStream:
    """The stream of one batch and how to read it.

    Attributes:
        source: (N,) int64, index of each stream token in the flattened (B, T) batch.
        position_ids: (N,) int64, position of each token in its row.
        read: (M,) int64, index in the stream of the token whose output is read, for each of `targets`.
        targets: (M,) int64, index in the flattened (B, T) batch to which that output belongs.
        starts, lengths, parents: S integers, segments in stream order, each directly before its descendants; a parent
            is a segment's index, -1 for none.
        shown: rows whose images and the like go through the model, in stream order.
        shape: (B, T).
        cpu_kernels: whether attention on a CPU is that of `kernels.cpu`.
        group: process group over whose ranks the stream is spread (`context.py`), or None.
        num_calls: attention layers that have used the stream, so that a model that ignores it is found out.
        cache: what attention functions derive from the stream, kept for the next layer.
    """

    source: Tensor
    position_ids: Tensor
    read: Tensor
    targets: Tensor
    starts: list[int]
    lengths: list[int]
    parents: list[int]
    shown: list[int]
    shape: tuple[int, int]
    cpu_kernels: bool = True
    group: Any = None
    num_calls: int = 0
    cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """N, the tokens that go through the model."""
        return len(self.source)

    @property
    def offsets(self) -> list[int]:
        """Position in its row of each segment's first token, S integers."""
        offsets: list[int] = []
        for parent in self.parents:
            offsets.append(offsets[parent] + self.lengths[parent] if parent >= 0 else 0)
        return offsets

    @property
    def max_length(self) -> int:
        """Tokens of the longest row, ancestors included."""
        return max(offset + length for offset, length in zip(self.offsets, self.lengths, strict=True))

    @property
    def family_ends(self) -> list[int]:
        """Where the last descendant of each segment ends in the stream, S integers."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        for i in range(len(ends) - 1, -1, -1):
            if self.parents[i] >= 0:
                ends[self.parents[i]] = max(ends[self.parents[i]], ends[i])
        return ends


class _Segment(NamedTuple):
    """A stretch of `row`, and of all rows in places `first` to `last` (excluded) of the order."""

    row: int
    offset: int
    length: int
    parent: int
    first: int
    last: int


def make_stream(
    token_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor | None,
    *,
    share: bool = True,
    spans: Tensor | None = None,
    routes: Sequence[Routes | None] = (),
    cpu_kernels: bool | None = None,
    device: torch.device | None = None,
) -> TokenStream:
    """Plans the stream for outputs that are read one token early: those of response tokens, or of the last token.

    Args:
        token_ids: (B, T) int64. Of rows that show something: as `multimodal.marked_tokens` gives them.
        attention_mask: (B, T) bool, True on real tokens, which start at 0 without gaps.
        response_mask: (B, T) bool, tokens whose outputs are wanted; the one of token t is read at t - 1, token 0 has
            none. None wants one output per row, at its last token.
        share: whether to compute once what rows begin with alike.
        spans: (B, 2), see `shared_prefixes`.
        routes: B rows' recorded experts: only tokens with the same ones are shared.
        cpu_kernels: see `ModelSpec.cpu_kernels`.
        device: where the stream is to be, that of `token_ids` where None. Tensors that are on a device are read.

    Raises:
        ValueError: rows are not right-padded.
    """
    device = token_ids.device if device is None else device
    attention = attention_mask.to("cpu", torch.bool)
    if bool((attention[:, 1:] & ~attention[:, :-1]).any()):
        raise ValueError("attention_mask: rows must be right-padded, real tokens first and without gaps.")
    if response_mask is None:
        wanted = torch.zeros_like(attention)
        needed, prompts = attention.sum(1).clamp(min=1), torch.zeros(len(attention), dtype=torch.long)
    else:
        wanted = response_mask.to("cpu", torch.bool, copy=True)
        wanted[:, :1] = False
        needed, prompts = _extents(wanted)
    ids = Routes.told_apart(token_ids.cpu(), routes)
    prefixes = shared_prefixes(ids, needed, prompts, spans) if share else no_prefixes(needed)
    # Nothing is wanted: one token keeps the graph and the collectives alive.
    segments = _segments(prefixes, needed.tolist()) or [_Segment(0, 0, 1, -1, 0, 0)]
    rows, offsets, lengths, parents, _, _ = (list(column) for column in zip(*segments, strict=True))
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    segment_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    positions = torch.arange(len(segment_of)) - (starts - torch.tensor(offsets))[segment_of]
    width = token_ids.shape[1]
    source = torch.tensor(rows)[segment_of] * width + positions
    where = torch.full(attention.shape, -1)  # the place in the stream of each row's tokens
    order = torch.tensor(prefixes.order, dtype=torch.long)
    for segment, start in zip(segments, starts.tolist(), strict=True):
        own = order[segment.first : segment.last]
        where[own, segment.offset : segment.offset + segment.length] = torch.arange(start, start + segment.length)
    if response_mask is None:
        targets = torch.arange(len(attention)) * width + needed - 1
        read = where.view(-1)[targets]
    else:
        targets = wanted.view(-1).nonzero().squeeze(1)
        read = where.view(-1)[targets - 1]
    assert bool((read >= 0).all())
    begins = [-1] * len(attention) if spans is None else spans[:, 0].tolist()
    shown = [s.row for s in segments if s.offset <= begins[s.row] < s.offset + s.length]
    source, positions, read, targets = (x.to(device, non_blocking=True) for x in (source, positions, read, targets))
    return TokenStream(
        source, positions, read, targets,
        starts.tolist(), lengths, parents, shown, (len(attention), width), enabled(cpu_kernels),
    )  # fmt: skip


def _extents(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Per row: how many tokens must go through, and how many come before the first wanted one; 0 for neither."""
    positions = torch.arange(wanted.shape[1])
    last = torch.where(wanted, positions, 0).amax(1)
    first = torch.where(wanted, positions, wanted.shape[1]).amin(1)
    return last, torch.minimum(first, last)


def _segments(prefixes: Prefixes, lengths: list[int]) -> list[_Segment]:
    """The nodes of the trie, each before its descendants; a node ends where rows part."""
    order, shared = prefixes
    segments: list[_Segment] = []
    waiting = [(0, len(order), 0, -1)] if order else []
    while waiting:
        first, last, offset, parent = waiting.pop()
        low, high = first, last
        while True:
            end = lengths[order[low]] if high - low == 1 else min(shared[low + 1 : high])
            bounds = [low, *(i for i in range(low + 1, high) if shared[i] == end), high]
            parts = [(a, b) for a, b in pairwise(bounds) if b - a > 1 or lengths[order[a]] > end]
            if len(parts) != 1:
                break
            low, high = parts[0]  # the others end here: they are a beginning of it, and need no cut
        if end > offset:
            segments.append(_Segment(order[low], offset, end - offset, parent, first, last))
            parent = len(segments) - 1
        waiting += [(a, b, end, parent) for a, b in reversed(parts)]
    return segments

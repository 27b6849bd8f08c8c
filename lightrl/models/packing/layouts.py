"""Turns a (B, T) batch into the cheapest stream of tokens that gives the same results.

The stream consists of *segments*, each a stretch of one row:

    packed          [row 0][row 1][row 2]...
    shared prefix   [prompt of group 0][rest of row 0][rest of row 1]...[prompt of group 1]...

A token attends to its own segment up to itself and, where the segment has a parent (its group's prompt), to all of
the parent. Positions restart with every row and continue from a parent, so each token sees exactly what it sees in a
plain forward pass; the results differ by rounding only. Tokens that no wanted output depends on are left out: all
padding and everything from a row's last response token on, whose successor is not predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrl.kernels.cpu import enabled
from lightrl.types import Routes

__all__ = ["LayoutError", "TokenStream", "make_stream"]


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
        starts, lengths, parents: S integers, segments in stream order; a parent is a segment's index, -1 for none.
        rows: S integers, the row each segment comes from.
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
    rows: list[int]
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
    def max_length(self) -> int:
        """Tokens of the longest row, parent included."""
        own = zip(self.lengths, self.parents, strict=True)
        return max(length + (self.lengths[parent] if parent >= 0 else 0) for length, parent in own)


def make_stream(
    token_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor | None,
    group_ids: Tensor | None = None,
    *,
    share: bool = True,
    routes: Sequence[Routes | None] = (),
    cpu_kernels: bool | None = None,
    device: torch.device | None = None,
) -> TokenStream:
    """Plans the stream for outputs that are read one token early: those of response tokens, or of the last token.

    Args:
        token_ids: (B, T) int64.
        attention_mask: (B, T) bool, True on real tokens, which start at 0 without gaps.
        response_mask: (B, T) bool, tokens whose outputs are wanted; the one of token t is read at t - 1, token 0 has
            none. None wants one output per row, at its last token, and shares nothing.
        group_ids: (B,) int64; rows of one group whose prompts (tokens before the first response token) are
            really equal may share them. None shares nothing.
        share: whether to compute the prompt of a group once.
        routes: B rows' recorded experts: only prompts with the same ones are shared.
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
    segments = _segments(token_ids, needed.tolist(), prompts.tolist(), group_ids if share else None, routes)
    rows, offsets, lengths, parents = (list(column) for column in zip(*segments, strict=True))
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    segment_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    positions = torch.arange(len(segment_of)) - (starts - torch.tensor(offsets))[segment_of]
    width = token_ids.shape[1]
    source = torch.tensor(rows)[segment_of] * width + positions
    where = torch.full((attention.numel(),), -1)
    where[source] = torch.arange(len(source))
    for row, offset, parent in zip(rows, offsets, parents, strict=True):
        if parent >= 0:  # the first response token is read at the shared prompt's last
            where[row * width + offset - 1] = starts[parent] + lengths[parent] - 1
    if response_mask is None:
        targets = torch.arange(len(attention)) * width + needed - 1
        read = where[targets]
    else:
        targets = wanted.view(-1).nonzero().squeeze(1)
        read = where[targets - 1]
    assert bool((read >= 0).all())
    source, positions, read, targets = (x.to(device, non_blocking=True) for x in (source, positions, read, targets))
    return TokenStream(
        source, positions, read, targets,
        starts.tolist(), lengths, parents, rows, (len(attention), width), enabled(cpu_kernels),
    )  # fmt: skip


def _extents(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Per row: how many tokens must go through, and how many come before the first wanted one; 0 for neither."""
    positions = torch.arange(wanted.shape[1])
    last = torch.where(wanted, positions, 0).amax(1)
    first = torch.where(wanted, positions, wanted.shape[1]).amin(1)
    return last, torch.minimum(first, last)


def _segments(
    token_ids: Tensor,
    needed: list[int],
    prompts: list[int],
    group_ids: Tensor | None,
    routes: Sequence[Routes | None],
) -> list[tuple[int, int, int, int]]:
    """(row, first token, length, parent) of each segment, in stream order; never none at all."""
    families: dict[Any, list[int]] = {}
    ids = token_ids.cpu().numpy() if group_ids is not None else None
    groups = group_ids.tolist() if group_ids is not None else range(len(needed))
    for row, (group, prompt) in enumerate(zip(groups, prompts, strict=True)):
        taken = routes[row] if routes else None
        experts = b"" if taken is None else taken.upto(prompt).experts.numpy().tobytes()
        key = (group, row) if ids is None or prompt == 0 else (group, ids[row, :prompt].tobytes(), experts)
        if needed[row]:
            families.setdefault(key, []).append(row)
    segments: list[tuple[int, int, int, int]] = []
    for family in families.values():
        first, prompt = family[0], prompts[family[0]]
        if len(family) == 1:
            segments.append((first, 0, needed[first], -1))
            continue
        parent = len(segments)
        segments.append((first, 0, prompt, -1))
        segments.extend((row, prompt, needed[row] - prompt, parent) for row in family if needed[row] > prompt)
        if prompt_only := [row for row in family if needed[row] == prompt]:
            segments.extend((row, prompt, 0, parent) for row in prompt_only)
    return segments or [(0, 0, 1, -1)]  # nothing is wanted: one token keeps the graph and the collectives alive

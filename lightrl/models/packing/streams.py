"""Turns a (B, T) batch into the smallest stream of tokens with the same results.

The stream consists of *segments*, each a part of one row:

    packed         [row 0][row 1][row 2]...
    shared prefix  [system prompt][prompt of group 0][rest of row 0][turn of rows 1, 2][rest of 1][rest of 2][prompt...

A token attends to the tokens up to itself in its segment, and to all of the segment's ancestors. A shared prefix is
computed once, however often rows branch. Positions restart with every row and continue from a parent. Each token
therefore sees exactly what it sees in a plain forward pass, and results differ only by rounding.

Outputs are read by row: a token of a shared segment may be trained in one row and be context in another. Tokens that no
output depends on are dropped: padding, and everything from a row's last response token on.

Prefixes end at multiples of `GRID` tokens, so that rows with a few equal tokens by chance are not split. They also end
where a shared prompt ends, where one row is a prefix of another, and where the root of a tree ends, such as a system
prompt.

Source: Wang et al. 2025 (tree training), https://arxiv.org/abs/2511.00413, who restore the gradients of prefixes that
are computed once. Here, a prefix has one position in the stream, and autograd sums its descendants' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightrl.records import Routes

GRID = 32


class LayoutError(ValueError):
    """Raised if a model does something that packed layouts don't support."""


@dataclass
class TokenStream:
    """The stream of one batch, and how to read it."""

    source: Tensor  # (N,) int64 index of each stream token in the flattened (B, T) batch
    position_ids: Tensor  # (N,) int64 position of each token in its row
    read: Tensor  # (M,) int64 index in the stream of the token whose output is read, for each of `targets`
    targets: Tensor  # (M,) int64 index in the flattened (B, T) batch to which that output belongs
    starts: list[int]  # S first tokens of segments, in stream order; each directly precedes its descendants
    lengths: list[int]  # S lengths of segments
    parents: list[int]  # S indices of parent segments, -1 for none
    shown: list[int]  # rows whose media are computed, in stream order
    shape: tuple[int, int]  # (B, T)
    group: Any = None  # process group whose ranks share the stream (`context.py`), or None
    num_calls: int = 0  # attention layers that have used the stream, to detect models that ignore it
    cache: dict[Any, Any] = field(default_factory=dict)  # results of `cached`, reused by later layers

    def cached(self, name: Any, make: Callable[[], Any]) -> Any:
        """Returns a result that attention functions derive from the stream, computed once."""
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]

    @property
    def num_tokens(self) -> int:
        """N, the number of computed tokens."""
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
        """Number of tokens of the longest row, including ancestors."""
        return max(offset + length for offset, length in zip(self.offsets, self.lengths, strict=True))

    @property
    def family_ends(self) -> list[int]:
        """End of the last descendant of each segment in the stream, S integers."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        for i in range(len(ends) - 1, -1, -1):
            if self.parents[i] >= 0:
                ends[self.parents[i]] = max(ends[self.parents[i]], ends[i])
        return ends


class _Segment(NamedTuple):
    """A part of `row`, and of all `rows` as far as they go."""

    row: int
    offset: int
    length: int
    parent: int
    rows: list[int]


def make_stream(
    token_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    *,
    last: bool = False,
    share: bool = True,
    spans: Tensor | None = None,
    routes: Sequence[Routes | None] = (),
    device: torch.device | None = None,
) -> TokenStream:
    """Plans the stream for outputs that are read one token early: at response tokens, or at the last token of each row.

    The masks are (B, T) bool. Real tokens start at 0 without gaps. The output of response token t is read at t - 1;
    token 0 has none. With `last`, one output per row is read instead, at its last token. With `share`, shared prefixes
    are computed once, if they have the same experts in `routes`. For rows with media, `multimodal.marked_tokens`
    returns the (B, T) int64 `token_ids` and the (B, 2) `spans`. The stream is on `device`, by default that of
    `token_ids`. Device tensors are copied to the host.

    Raises:
        ValueError: Rows are not right-padded.
    """
    device = token_ids.device if device is None else device
    attention = attention_mask.to("cpu", torch.bool)
    if bool((attention[:, 1:] & ~attention[:, :-1]).any()):
        raise ValueError("attention_mask: has gaps or is not True at the start. Pad rows on the right.")
    wanted = response_mask.to("cpu", torch.bool, copy=True)
    wanted[:, :1] = False
    width, columns = token_ids.shape[1], torch.arange(token_ids.shape[1])
    # Number of tokens to compute per row, and before the first response token.
    needed = attention.sum(1).clamp(min=1) if last else torch.where(wanted, columns, 0).amax(1)
    prompts = torch.minimum(torch.where(wanted, columns, width).amin(1), needed)
    ids = token_ids.cpu()
    if any(of_row is not None for of_row in routes):
        from lightrl.records import Routes

        ids = Routes.told_apart(ids, routes)
    prefixes = shared_prefixes(ids, needed, prompts, spans) if share else no_prefixes(needed)
    # If no output is read, one token keeps the graph and the collectives alive.
    segments = _segments(prefixes, needed.tolist()) or [_Segment(0, 0, 1, -1, [])]
    rows, offsets, lengths, parents, _ = (list(column) for column in zip(*segments, strict=True))
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    segment_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    positions = torch.arange(len(segment_of)) - (starts - torch.tensor(offsets))[segment_of]
    source = torch.tensor(rows)[segment_of] * width + positions
    where = torch.full(attention.shape, -1)  # position in the stream of each token of the batch, -1 for dropped ones
    for segment, start in zip(segments, starts.tolist(), strict=True):
        where[segment.rows, segment.offset : segment.offset + segment.length] = start + torch.arange(segment.length)
    where = where.view(-1)
    if last:
        targets = torch.arange(len(attention)) * width + needed - 1
        read = where[targets]
    else:
        targets = wanted.view(-1).nonzero().squeeze(1)
        read = where[targets - 1]
    assert bool((read >= 0).all())
    begins = [-1] * len(attention) if spans is None else spans[:, 0].tolist()
    shown = [s.row for s in segments if s.offset <= begins[s.row] < s.offset + s.length]
    source, positions, read, targets = (x.to(device, non_blocking=True) for x in (source, positions, read, targets))
    return TokenStream(
        source, positions, read, targets,
        starts.tolist(), lengths, parents, shown, (len(attention), width),
    )  # fmt: skip


def _segments(prefixes: Prefixes, lengths: list[int]) -> list[_Segment]:
    """Returns the nodes of the trie, each before its descendants; a node ends where rows diverge."""
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
            low, high = parts[0]  # the other rows end here, so no split is needed
        if end > offset:
            segments.append(_Segment(order[low], offset, end - offset, parent, order[first:last]))
            parent = len(segments) - 1
        waiting += [(a, b, end, parent) for a, b in reversed(parts)]
    return segments


# ---- prefixes ----------------------------------------------------------------------------------------------------


class Prefixes(NamedTuple):
    """The trie of some rows, as an order in which rows with longer shared prefixes are closer together.

    Any two rows share the minimum of `shared` between them.
    """

    order: list[int]  # R row indices
    shared: list[int]  # R numbers of tokens shared with the previous row in `order`; 0 for the first


def no_prefixes(lengths: Tensor) -> Prefixes:
    """Returns rows in their own order without shared prefixes, excluding empty rows."""
    rows = lengths.nonzero().squeeze(1).tolist()
    return Prefixes(rows, [0] * len(rows))


def shared_prefixes(token_ids: Tensor, lengths: Tensor, prompts: Tensor, spans: Tensor | None = None) -> Prefixes:
    """Returns the trie of rows, excluding empty rows.

    Args:
        token_ids: (B, T) int64 below 2^31 in magnitude, in host memory.
        lengths: (B,) int64 number of computed tokens.
        prompts: (B,) int64 number of tokens before the first sampled one; 0 for none.
        spans: (B, 2) int64 first and last placeholder, -1 for none. No prefix ends between them. Defaults to no media.
    """
    rows = lengths.nonzero().squeeze(1)
    if len(rows) < 2:
        return no_prefixes(lengths)
    ids = token_ids[rows].numpy().astype(np.int32)
    keys = [row[:length].tobytes() for row, length in zip(ids, lengths[rows].tolist(), strict=True)]
    alike = sorted(range(len(keys)), key=keys.__getitem__)
    by_token = rows[torch.tensor(alike)]
    cut = _cut(ids[alike], lengths[by_token], prompts[by_token], None if spans is None else spans[by_token])
    return Prefixes(by_token.tolist(), [0, *cut])


def _cut(ids: np.ndarray, lengths: Tensor, prompts: Tensor, spans: Tensor | None) -> list[int]:
    """Returns the number of tokens that each row shares with the next one."""
    differ = ids[:-1] != ids[1:]
    common = torch.from_numpy(np.where(differ.any(1), differ.argmax(1), ids.shape[1]))
    shorter = torch.minimum(lengths[:-1], lengths[1:])
    common = torch.minimum(common, shorter)
    prompt = torch.tensor(_prompt_ends(prompts.tolist(), common.tolist()))
    cut = prompt + (common - prompt) // GRID * GRID
    cut = torch.where(common == shorter, common, cut)
    # In a tree, each row shares at least GRID tokens with the next one. It is also cut where its root ends.
    joined = common >= GRID
    tree = (~joined).cumsum(0)
    root = torch.full((len(common) + 1,), ids.shape[1]).scatter_reduce(0, tree[joined], common[joined], "amin")
    cut = torch.where(joined, torch.maximum(cut, root[tree]), cut)
    if spans is not None:
        first, last = spans[:-1, 0], torch.maximum(spans[:-1, 1], spans[1:, 1])
        inside = (first >= 0) & (first < cut) & (cut <= last)
        cut = torch.where(inside, torch.where(common > last, last + 1, first // GRID * GRID), cut)
    result: list[int] = cut.tolist()
    return result


def _prompt_ends(prompts: list[int], common: list[int]) -> list[int]:
    """Returns, for each row and the next one, the longest prompt of any row that both start with. 0 for none.

    Their own prompts are not enough: in a row that branches off another, more precedes the first sampled token.
    """

    def reached(own: list[int], shared: list[int]) -> list[set[int]]:
        live, found = set[int](), []
        for prompt, length in zip(own, shared, strict=False):
            live = {end for end in (*live, prompt) if end <= length}
            found.append(live)
        return found

    before, after = reached(prompts, common), reached(prompts[::-1], common[::-1])[::-1]
    return [max(one | other, default=0) for one, other in zip(before, after, strict=True)]

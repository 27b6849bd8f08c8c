"""Common prefixes of rows: their trie, as an order of the rows and how much neighbours in it share.

A common prefix is cut at whole multiples of `GRID` tokens, so that rows which agree by chance for a few tokens stay in
one piece; besides where a prompt ends that both begin with, and where one row is the beginning of another, which costs
nothing. In the order given here, rows that share more stand closer together: what any two share is the least that is
shared between neighbours from the one to the other, so both lists together are the whole trie.

Source: Wang et al. 2025 (tree training), https://arxiv.org/abs/2511.00413, who restore the gradients of prefixes that
are run once. Here nothing needs restoring: a prefix has one place in the stream, and autograd adds up what its
descendants send back.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

GRID = 32


class Prefixes(NamedTuple):
    """The trie of some rows.

    Attributes:
        order: R row numbers; among rows that share equally much, by number.
        shared: R integers: tokens that a row shares with the one before it in `order`; 0 for the first.
    """

    order: list[int]
    shared: list[int]


def no_prefixes(lengths: Tensor) -> Prefixes:
    """Rows in their own order that share nothing; those of length 0 are left out."""
    rows = lengths.nonzero().squeeze(1).tolist()
    return Prefixes(rows, [0] * len(rows))


def shared_prefixes(token_ids: Tensor, lengths: Tensor, prompts: Tensor, spans: Tensor | None = None) -> Prefixes:
    """The trie of rows, those of length 0 left out.

    Args:
        token_ids: (B, T) int64 below 2^31 in magnitude, in host memory.
        lengths: (B,) int64, tokens of each row that count.
        prompts: (B,) int64, tokens before the first that was sampled; 0 for none.
        spans: (B, 2) int64, first and last token that stands for a picture or the like, -1 for none; no prefix ends
            between them. None: no row shows anything.
    """
    rows = lengths.nonzero().squeeze(1)
    if len(rows) < 2:
        return no_prefixes(lengths)
    ids = token_ids[rows].numpy().astype(np.int32)
    keys = [row[:length].tobytes() for row, length in zip(ids, lengths[rows].tolist(), strict=True)]
    alike = sorted(range(len(keys)), key=keys.__getitem__)
    by_token = rows[torch.tensor(alike)]
    cut = _cut(ids[alike], lengths[by_token], prompts[by_token], None if spans is None else spans[by_token])
    return _in_own_order(by_token.tolist(), cut)


def _cut(ids: np.ndarray, lengths: Tensor, prompts: Tensor, spans: Tensor | None) -> list[int]:
    """How many tokens each row is to share with the next one."""
    differ = ids[:-1] != ids[1:]
    common = torch.from_numpy(np.where(differ.any(1), differ.argmax(1), ids.shape[1]))
    shorter = torch.minimum(lengths[:-1], lengths[1:])
    common = torch.minimum(common, shorter)
    prompt = torch.tensor(_prompt_ends(prompts.tolist(), common.tolist()))
    cut = prompt + (common - prompt) // GRID * GRID
    cut = torch.where(common == shorter, common, cut)
    if spans is not None:
        first, last = spans[:-1, 0], torch.maximum(spans[:-1, 1], spans[1:, 1])
        inside = (first >= 0) & (first < cut) & (cut <= last)
        cut = torch.where(inside, torch.where(common > last, last + 1, first // GRID * GRID), cut)
    result: list[int] = cut.tolist()
    return result


def _prompt_ends(prompts: list[int], common: list[int]) -> list[int]:
    """Of each row and the next one, the longest prompt of any row with which both begin. 0 for none.

    Theirs alone would not do: of a row that forks off another, what comes before the first sampled token is longer.
    """

    def reached(own: list[int], shared: list[int]) -> list[set[int]]:
        live, found = set[int](), []
        for prompt, length in zip(own, shared, strict=False):
            live = {end for end in (*live, prompt) if end <= length}
            found.append(live)
        return found

    before, after = reached(prompts, common), reached(prompts[::-1], common[::-1])[::-1]
    return [max(one | other, default=0) for one, other in zip(before, after, strict=True)]


def _in_own_order(rows: list[int], cut: list[int]) -> Prefixes:
    """Sorts what shares equally much by row number."""
    order: list[int] = []
    shared: list[int] = []
    waiting = [(0, len(rows), 0)]
    while waiting:
        start, end, link = waiting.pop()
        if end - start == 1:
            order.append(rows[start])
            shared.append(link)
            continue
        least = min(cut[start : end - 1])
        bounds = [start, *(i + 1 for i in range(start, end - 1) if cut[i] == least), end]
        parts = sorted(pairwise(bounds), key=lambda part: min(rows[part[0] : part[1]]))
        links = [link] + [least] * (len(parts) - 1)
        waiting += [(*part, own) for part, own in zip(reversed(parts), reversed(links), strict=True)]
    return Prefixes(order, shared)


def least_shared(shared: list[int], first: int, last: int) -> int:
    """Tokens that the rows at two places of the order share, `first` before `last`."""
    return min(shared[first + 1 : last + 1])

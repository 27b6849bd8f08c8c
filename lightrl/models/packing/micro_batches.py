"""Splits sequences into micro-batches by tokens, and runs models on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrl.distributed.strategies import gather_objects
from lightrl.models.packing.streams import Prefixes, no_prefixes, shared_prefixes
from lightrl.models.spec import Layout
from lightrl.records import Experience, RowBatch

Rows = TypeVar("Rows", bound=RowBatch)

PAIRS_PER_TOKEN = 6144  # query-key pairs that cost as much as a token's linear layers: 6 x hidden size, here 1024


def micro_batches(
    token_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    budget: int,
    num_bins: int | None = None,
    layout: Layout = "auto",
    units: Tensor | None = None,
) -> list[Tensor]:
    """Returns row indices of micro-batches of at most `budget` tokens, balanced by cost.

    A longer row (or unit) gets its own. A shared prefix counts once per micro-batch, as the shared-prefix layout
    computes it. A tree that exceeds the budget is split into branches that fit, and their common prefix is computed in
    each micro-batch. The cost is the number of tokens plus the number of query-key pairs / 6144. Parts are assigned
    largest first to the cheapest micro-batch with room (longest processing time first). In the packed layout, rows
    count in full. In the padded layout, a micro-batch counts as rows x longest row, and has rows of similar length.

    Takes (B, T) int64 token IDs and bool masks. Rows with different IDs share nothing. `num_bins` is the exact number
    of micro-batches, some possibly empty; by default, as few as the budget allows. Rows with an equal number in (B,)
    `units`, such as those of a trajectory, stay in one micro-batch, even above the budget.

    Returns:
        int64 index tensors on the CPU, each ascending, which together cover every row once. Deterministic.
    """
    lengths = attention_mask.sum(1).clamp(min=1).cpu()
    if layout == "padded":
        bins = _rectangles(lengths.tolist(), _by_unit(range(len(lengths)), units), budget, num_bins)
        return [torch.tensor(sorted(bin_), dtype=torch.long) for bin_ in bins]
    if layout == "packed":
        prefixes = no_prefixes(lengths)
    else:
        prompts = torch.where(response_mask.any(1), response_mask.int().argmax(1), attention_mask.sum(1)).cpu()
        prefixes = shared_prefixes(token_ids.cpu(), lengths, prompts)
    blocks = _blocks(prefixes, lengths.tolist(), budget, units)
    chosen = None if num_bins is None else _balanced(blocks, budget, num_bins)
    count = -(-sum(min(block.tokens, budget) for block in blocks) // budget)
    while chosen is None:
        chosen = _balanced(blocks, budget, count)
        count += 1
    chosen += [[] for _ in range((num_bins or 0) - len(chosen))]
    return [torch.tensor(sorted(row for i in bin_ for row in blocks[i].rows), dtype=torch.long) for bin_ in chosen]


def cut_micro_batches(
    rows: Rows, budget: int, layout: Layout, *, skip_zero: bool = False, whole_trajectories: bool = False
) -> list[Rows]:
    """Splits sequences into micro-batches, at least one and the same number on every rank. Collective.

    A rank without sequences gets one sequence with an empty response mask. `skip_zero` excludes trajectories whose
    advantages are all 0, and `whole_trajectories` keeps rows of a trajectory together, even above the budget.
    """
    units = None
    if isinstance(rows, Experience):
        if skip_zero:
            kept = _rows_with_advantage(rows)
            rows = rows.select(kept) if len(kept) else _without_response(rows)  # type: ignore[assignment]
        trajectory_ids = rows.on_host("trajectory_ids")
        if whole_trajectories and len(trajectory_ids.unique()) < len(rows):
            units = trajectory_ids
    found = _row_indices(rows, budget, layout, units)
    return [rows.select(index).crop() if len(index) else _without_response(rows) for index in found]


def run_micro_batches(
    forward: Callable[[RowBatch], dict[str, Tensor]], rows: RowBatch, budget: int, layout: Layout
) -> dict[str, Tensor]:
    """Runs `forward` over micro-batches, the same number of times on every rank, as sharded models require. Collective.

    Returns results by name: (B,) from (b,), or (B, T) from (b, t), 0 beyond a micro-batch's width.
    """
    out: dict[str, Tensor] = {}
    for index in _row_indices(rows, budget, layout):
        part = rows.select(index if len(index) else torch.zeros(1, dtype=torch.long)).crop()
        index = index.to(rows.token_ids.device)
        for name, value in forward(part).items():
            full = out.setdefault(name, value.new_zeros(rows.token_ids.shape[: value.ndim]))
            whole = full if value.ndim == 1 else full[:, : value.shape[1]]
            whole[index] = value[: len(index)]
    return out


def _row_indices(rows: RowBatch, budget: int, layout: Layout, units: Tensor | None = None) -> list[Tensor]:
    """Returns the row indices of `micro_batches`, the same number on every rank (some may be empty)."""
    ids = _told_apart(rows.on_host("token_ids"), rows.inputs)
    host = ids, rows.on_host("attention_mask"), rows.on_host("response_mask")
    bins = micro_batches(*host, budget, layout=layout, units=units)
    most = max(gather_objects(len(bins)))
    return bins if most == len(bins) else micro_batches(*host, budget, num_bins=most, layout=layout, units=units)


def _told_apart(token_ids: Tensor, inputs: Sequence[dict[str, Any]]) -> Tensor:
    """Returns token IDs for splitting micro-batches, in which rows share media only if inputs are the same object."""
    if not any(inputs):
        return token_ids
    ids = token_ids.clone()
    numbers: dict[int, int] = {}
    for i, row in enumerate(inputs):
        if row:
            ids[i, 0] = -1 - numbers.setdefault(id(row), i)
    return ids


def _rows_with_advantage(minibatch: Experience) -> Tensor:
    """Returns the rows of trajectories with a nonzero advantage on any token."""
    index = minibatch.trajectory_ids.unique(return_inverse=True)[1]
    trained = (minibatch.advantages != 0).any(1)
    return trained.new_zeros(len(index)).index_put_((index[trained],), trained.new_ones(()))[index].nonzero().squeeze(1)


def _without_response(rows: Rows) -> Rows:
    """Returns one row that participates in forward, backward, and collectives but contributes nothing."""
    row = rows.select(torch.zeros(1, dtype=torch.long)).crop()
    row.response_mask = torch.zeros_like(row.response_mask)
    if isinstance(row, Experience):
        row.advantages = torch.zeros_like(row.advantages)
        row.token_extras = {name: torch.zeros_like(x) for name, x in row.token_extras.items()}
    return row


# ---- plan ----------------------------------------------------------------------------------------------------------


@dataclass
class _Block:
    """Rows that stay together: a tree, or as much of it as fits the budget. Prefixes count once."""

    rows: list[int]
    tokens: int
    cost: float


def _by_unit(rows: Iterable[int], units: Tensor | None) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    names = None if units is None else units.tolist()
    for row in rows:
        members.setdefault(row if names is None else names[row], []).append(row)
    return list(members.values())


def _rectangles(lengths: list[int], units: list[list[int]], budget: int, num_bins: int | None) -> list[list[int]]:
    """Fills bins with the longest units first, up to the budget; then halves the fullest to get `num_bins`."""
    longest = [max(lengths[row] for row in unit) for unit in units]
    bins: list[list[int]] = []  # unit indices
    rows = 0  # in the last bin
    for i in sorted(range(len(units)), key=lambda i: -longest[i]):
        rows += len(units[i])
        if bins and rows * longest[bins[-1][0]] <= budget:
            bins[-1].append(i)
        else:
            bins.append([i])
            rows = len(units[i])
    while num_bins is not None and len(bins) < num_bins:
        fullest = max(range(len(bins)), key=lambda i: len(bins[i]))
        half = len(bins[fullest]) // 2
        bins[fullest], rest = bins[fullest][half:], bins[fullest][:half]
        bins.append(rest)
    return [[row for i in bin_ for row in units[i]] for bin_ in bins]


def _blocks(prefixes: Prefixes, lengths: list[int], budget: int, units: Tensor | None) -> list[_Block]:
    """Returns trees, or parts of them that fit the budget; single units without shared prefixes."""
    order, shared = prefixes
    sizes = [lengths[row] for row in order]

    def total(places: list[int], weigh: Callable[[int], float]) -> float:
        """Sums `weigh` over the rows at these positions, ascending, counting prefixes once."""
        own = sum(weigh(sizes[i]) for i in places)
        return own - sum(weigh(min(shared[a + 1 : b + 1])) for a, b in pairwise(places))

    def cost(size: int) -> float:
        return size + size**2 / 2 / PAIRS_PER_TOKEN

    if units is None:
        atoms = _branches(sizes, shared, budget)
    else:
        place = {row: i for i, row in enumerate(order)}
        atoms = [sorted(place[row] for row in unit) for unit in _by_unit(order, units)]
    parts: list[tuple[list[int], float]] = []
    for atom in atoms:
        tokens = total(atom, int)
        if parts:
            part, before = parts[-1]
            if part[-1] < atom[0]:
                joined, both = part + atom, before + tokens - min(shared[part[-1] + 1 : atom[0] + 1])
            else:
                joined = sorted(part + atom)
                both = total(joined, int)
            if both <= budget and both < before + tokens:
                parts[-1] = joined, both
                continue
        parts.append((atom, tokens))
    blocks = [_Block([order[i] for i in part], int(tokens), total(part, cost)) for part, tokens in parts]
    return sorted(blocks, key=lambda block: (-block.cost, min(block.rows)))


def _branches(sizes: list[int], shared: list[int], budget: int) -> list[list[int]]:
    """Returns the positions of the largest branches that fit the budget with their ancestors, or single rows."""
    branches: list[list[int]] = []
    waiting = [(0, len(sizes))]
    while waiting:
        first, last = waiting.pop()
        inner = shared[first + 1 : last]
        if not inner or (sum(sizes[first:last]) - sum(inner) <= budget and min(inner) > 0):
            branches.append(list(range(first, last)))
            continue
        least = min(inner)
        bounds = [first, *(i for i in range(first + 1, last) if shared[i] == least), last]
        waiting += reversed(list(pairwise(bounds)))
    return branches


def _balanced(blocks: list[_Block], budget: int, num_bins: int) -> list[list[int]] | None:
    """Assigns the most expensive blocks first, each to the cheapest bin with room; None if one doesn't fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    cost, room = [0.0] * num_bins, [budget] * num_bins
    for i, block in enumerate(blocks):
        fits = [b for b in range(num_bins) if block.tokens <= room[b] or not bins[b]]
        if not fits:
            return None
        at = min(fits, key=lambda b: (cost[b], b))
        bins[at].append(i)
        cost[at] += block.cost
        room[at] -= block.tokens
    return bins

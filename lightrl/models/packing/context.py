"""Context parallelism: the ranks of a group run all their micro-batches as one stream of tokens.

Each rank computes an equal part of the stream. Only attention looks across tokens. Around it, an all-to-all exchanges
tokens for heads and back (Jacobs et al. 2023, DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509). Finally, hidden
states go to the rank of their row, whose head and loss are unchanged. So a row may be as long as the group's memory
allows, and ranks have equal work.

Unlike in DeepSpeed-Ulysses, the ranks have different rows, and key-value heads fewer than ranks are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightrl.models.packing.streams import TokenStream, make_stream
from lightrl.records import HostRows, Routes


@dataclass
class SharedStream:
    """A rank's part of its group's stream.

    Attributes:
        stream: Stream of all the group's rows, padded to equal parts.
        ids: (n,) int64 token IDs of this rank's part.
        positions: (n,) int64 positions.
        taken: (m,) int64 indices of read states in the part, ordered by receiving rank.
        sent: Number of states sent to each rank of the group.
        received: Number of states received from each rank of the group.
        order: (M,) int64 permutation of received states to the order of `targets`.
        targets: (M,) int64 index of each state's token in this rank's flattened (B, T) batch, ascending.
        shape: (B, T) of this rank.
        experts: (n, L, K) experts of the part, see `Routes.at`. None if nothing was recorded.
    """

    stream: TokenStream
    ids: Tensor
    positions: Tensor
    taken: Tensor
    sent: list[int]
    received: list[int]
    order: Tensor
    targets: Tensor
    shape: tuple[int, int]
    experts: Tensor | None

    def collect(self, hidden: Tensor) -> Tensor:
        """Maps (n, D) states of this rank's part to the (M, D) states of its `targets`. Collective."""
        part = hidden.index_select(0, self.taken)
        return _traded(part, self.sent, self.received, self.stream.group).index_select(0, self.order)


def share_stream(
    host: HostRows,
    group: Any,
    *,
    share: bool,
    routes: Sequence[Routes | None],
    device: torch.device,
) -> SharedStream:
    """Plans the stream of all rows of a group, and this rank's part; `share` computes prefixes once. Collective."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    (ids, attention, response), begins, all_routes, grouped = _all_rows(host, group, routes)
    width = ids.shape[1]
    stream = make_stream(ids, attention, response, share=share and grouped, routes=all_routes)
    count = stream.num_tokens
    each = -(-count // ranks)
    stretch = slice(rank * each, (rank + 1) * each)
    source, positions = (F.pad(x, (0, ranks * each - count)) for x in (stream.source, stream.position_ids))
    owner = torch.bucketize(stream.targets // width, begins[1:], right=True)  # ascending, as targets are
    place = stream.read // each
    mine, here = owner == rank, place == rank
    row, column = stream.targets[mine] // width - int(begins[rank]), stream.targets[mine] % width
    experts = Routes.at(all_routes, source[stretch], width)
    by_place = place[mine].argsort(stable=True)
    if ranks * each > count:  # the padding of the last part is a separate segment
        stream = replace(
            stream,
            starts=[*stream.starts, count],
            lengths=[*stream.lengths, ranks * each - count],
            parents=[*stream.parents, -1],
        )
    taken, order, targets, ids, positions, whole = (
        x.to(device, non_blocking=True)
        for x in (
            stream.read[here] - stretch.start,
            by_place.argsort(),
            row * host.token_ids.shape[1] + column,
            ids.reshape(-1)[source[stretch]],
            positions[stretch],
            positions,
        )
    )
    return SharedStream(
        replace(stream, source=source, position_ids=whole, group=group),
        ids,
        positions,
        taken,
        torch.bincount(owner[here], minlength=ranks).tolist(),
        torch.bincount(place[mine], minlength=ranks).tolist(),
        order,
        targets,
        (host.token_ids.shape[0], host.token_ids.shape[1]),
        None if experts is None else experts.to(device),
    )


def run_spread(backbone: Any, batch: Any, group: Any) -> tuple[Tensor, Tensor, tuple[int, int], bool]:
    """Runs this rank's part of its group's stream with a `Backbone`; returns the fields of its output. Collective."""
    if batch.rows:
        raise ValueError("context_parallel_size above 1: images, videos, and audio are not supported. Set it to 1.")
    device = batch.token_ids.device
    share = share_stream(batch.host, group, share=backbone.layout != "packed", routes=batch.routes, device=device)
    with nullcontext() if share.experts is None else backbone.routers.replaying(share.experts):
        ids, positions = share.ids.unsqueeze(0), share.positions.unsqueeze(0)
        out = backbone.call(ids, None, position_ids=positions, stream=share.stream)
    if share.stream.num_calls != backbone.num_layers:
        raise ValueError(
            f"context_parallel_size above 1: only {share.stream.num_calls} of {backbone.name}'s {backbone.num_layers} "
            "layers use the replaced attention. Set it to 1."
        )
    own = out.last_hidden_state[0]
    hidden = share.collect(own)
    if len(share.targets):
        return hidden, share.targets, share.shape, False
    # The backward pass is collective, so sent states must stay in the graph.
    return own[:1] + 0.0 * hidden.sum(), share.targets.new_zeros(1), share.shape, True


def _all_rows(
    host: HostRows, group: Any, routes: Sequence[Routes | None]
) -> tuple[list[Tensor], Tensor, list[Routes | None], bool]:
    """Gathers the rows of P ranks. Collective.

    Returns:
        Token IDs, attention mask, and response mask of all rows; the P + 1 bounds of the ranks' rows; the recorded
        experts of all rows; and whether all ranks have group IDs.
    """
    taken = list(routes) or [None] * len(host.token_ids)
    rows: list[Any] = [None] * dist.get_world_size(group)
    own = (host.token_ids, host.attention_mask, host.response_mask, host.group_ids is not None, taken)
    dist.all_gather_object(rows, own, group=group)
    width = max(ids.shape[1] for ids, *_ in rows)
    tensors = [torch.cat([F.pad(row[i], (0, width - row[i].shape[1])) for row in rows]) for i in range(3)]
    bounds = torch.tensor([0, *(len(row[0]) for row in rows)]).cumsum(0)
    return tensors, bounds, [entry for row in rows for entry in row[4]], all(row[3] for row in rows)


def heads_for_tokens(x: Tensor, group: Any) -> Tensor:
    """Maps (n, H, D) of this rank's tokens to (P n, H / P, D) of all tokens of a group of P ranks. Collective.

    If P doesn't divide the heads, each is repeated in place up to the least common multiple.
    """
    ranks = dist.get_world_size(group)
    tokens, heads, width = x.shape
    x = x.repeat_interleave(lcm(heads, ranks) // heads, 1) if heads % ranks else x
    parts = x.reshape(tokens, ranks, -1, width).transpose(0, 1).contiguous()
    return _traded(parts, [1] * ranks, [1] * ranks, group).view(ranks * tokens, -1, width)


def tokens_for_heads(x: Tensor, group: Any) -> Tensor:
    """Reverses `heads_for_tokens`: (P n, H / P, D) to (n, H, D). Collective."""
    ranks = dist.get_world_size(group)
    parts = x.reshape(ranks, len(x) // ranks, *x.shape[1:]).contiguous()
    traded = _traded(parts, [1] * ranks, [1] * ranks, group)
    return traded.transpose(0, 1).reshape(len(x) // ranks, -1, x.shape[2])


def _traded(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Sends `sent[r]` rows of x to rank r, in order, and receives `received[r]` from it. Differentiable."""
    result: Tensor = _Trade.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    return result


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:  # type: ignore[override]
        ctx.trade = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        sent, received, group = ctx.trade
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received, group=group)
        return out, None, None, None

"""Context parallelism: the ranks of a group run all their micro-batches as one stream of tokens.

Each rank computes an equal part of the stream. Only attention looks across tokens. An all-to-all before it gives each
rank all tokens of some heads, and another one afterwards reverses this (Jacobs et al. 2023, DeepSpeed-Ulysses,
https://arxiv.org/abs/2309.14509). Finally, hidden states return to the rank that owns the row, which runs head and loss
as usual. So a row may be as long as the group's memory allows, and ranks have equal work.

Unlike in DeepSpeed-Ulysses, the ranks have different rows, and key-value heads fewer than ranks are repeated.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightrl.distributed.strategies import gather_objects
from lightrl.models.packing.streams import make_stream
from lightrl.records import Routes, RowBatch


def run_spread(backbone: Any, rows: RowBatch, group: Any) -> tuple[Tensor, Tensor, tuple[int, int], bool]:
    """Runs this rank's part of its group's stream with a `Backbone`; returns the fields of its output. Collective."""
    if any(rows.inputs):
        raise ValueError("context_parallel_size above 1: images, videos, and audio are not supported. Set it to 1.")
    ranks, rank, device = dist.get_world_size(group), dist.get_rank(group), rows.token_ids.device
    (ids, attention, response), bounds, routes, grouped = _all_rows(rows, group)
    width = ids.shape[1]
    stream = make_stream(ids, attention, response, share=backbone.layout != "packed" and grouped, routes=routes)
    each = -(-stream.num_tokens // ranks)  # tokens per rank; the padding of the last part is a separate segment
    padding = ranks * each - stream.num_tokens
    source, positions = (F.pad(x, (0, padding)) for x in (stream.source, stream.position_ids))
    if padding:
        stream.starts.append(stream.num_tokens)
        stream.lengths.append(padding)
        stream.parents.append(-1)
    stream = replace(stream, source=source, position_ids=positions.to(device, non_blocking=True), group=group)
    part = slice(rank * each, (rank + 1) * each)
    experts = Routes.at(routes, source[part], width)
    with nullcontext() if experts is None else backbone.routers.replaying(experts.to(device)):
        own_ids = ids.view(-1)[source[part]].to(device, non_blocking=True).unsqueeze(0)
        out = backbone.call(own_ids, None, position_ids=stream.position_ids[part].unsqueeze(0), stream=stream)
    if stream.num_calls != backbone.num_layers:
        raise ValueError(
            f"context_parallel_size above 1: only {stream.num_calls} of {backbone.name}'s {backbone.num_layers} "
            "layers use the replaced attention. Set it to 1."
        )
    # Each read state goes from the rank whose part has it to the rank of its row.
    owner, place = torch.bucketize(stream.targets // width, bounds[1:], right=True), stream.read // each
    mine, here = owner == rank, place == rank
    sent, received = (torch.bincount(x, minlength=ranks).tolist() for x in (owner[here], place[mine]))
    taken, order = stream.read[here] - part.start, place[mine].argsort(stable=True).argsort()
    row, column = stream.targets[mine] // width - bounds[rank], stream.targets[mine] % width
    targets = row * rows.token_ids.shape[1] + column
    taken, order, targets = (x.to(device, non_blocking=True) for x in (taken, order, targets))
    own, shape = out.last_hidden_state[0], (rows.token_ids.shape[0], rows.token_ids.shape[1])
    hidden = _traded(own.index_select(0, taken), sent, received, group).index_select(0, order)
    if len(targets):
        return hidden, targets, shape, False
    # The backward pass is collective, so sent states must stay in the graph.
    return own[:1] + 0.0 * hidden.sum(), targets.new_zeros(1), shape, True


def _all_rows(rows: RowBatch, group: Any) -> tuple[list[Tensor], Tensor, list[Routes | None], bool]:
    """Gathers the rows of P ranks. Collective.

    Returns token IDs, attention mask, and response mask of all rows; the P + 1 bounds of the ranks' rows; the recorded
    experts of all rows; and whether all ranks have group IDs.
    """
    own = [rows.on_host(name) for name in ("token_ids", "attention_mask", "response_mask")]
    routes = list(rows.routes) or [None] * len(rows)
    parts = gather_objects((*own, rows.group_ids is not None, routes), group)
    width = max(ids.shape[1] for ids, *_ in parts)
    tensors = [torch.cat([F.pad(part[i], (0, width - part[i].shape[1])) for part in parts]) for i in range(3)]
    bounds = torch.tensor([0, *(len(part[0]) for part in parts)]).cumsum(0)
    return tensors, bounds, [entry for part in parts for entry in part[4]], all(part[3] for part in parts)


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

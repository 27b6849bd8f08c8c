"""Tensor work between scored rollouts and losses: forwards in micro-batches, token rewards, cutting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrl.models.multimodal import told_apart
from lightrl.models.packing.micro_batches import micro_batches
from lightrl.models.policy import PolicyModel, ValueModel
from lightrl.models.spec import Layout
from lightrl.objectives.trajectories import TrajectoryLayout, first_rows
from lightrl.ops.masking import masked_whiten
from lightrl.records import Experience, Rollouts, SupervisedBatch

AllReduce = Callable[[Tensor], Tensor]
Rows = TypeVar("Rows", Experience, SupervisedBatch)


# ---- forwards ----------------------------------------------------------------------------------------------------


def widest_layout(*models: PolicyModel | ValueModel | None) -> Layout:
    """Of the layouts in which the models run, the one that computes most tokens."""
    used = {model.layout for model in models if model is not None}
    return "padded" if "padded" in used else "packed" if "packed" in used else "auto"


def policy_forward(model: PolicyModel, rows: Any, **wanted: Any) -> dict[str, Tensor]:
    """Runs the policy on some rows: `logprobs` and what else of a `PolicyOutput` is `wanted`, each (b, t)."""
    output = model(
        rows.token_ids,
        rows.attention_mask,
        rows.response_mask,
        group_ids=rows.group_ids,
        host=rows.host_rows(),
        temperature=rows.temperature,
        inputs=rows.inputs,
        supports=rows.supports,
        **{"routes": rows.routes, **wanted},
    )
    return {name: value for name, value in output._asdict().items() if value is not None}


def value_forward(critic: ValueModel, rows: Any) -> Tensor:
    """The critic's (b, t) values of some rows."""
    values: Tensor = critic(
        rows.token_ids,
        rows.attention_mask,
        rows.response_mask,
        group_ids=rows.group_ids,
        host=rows.host_rows(),
        inputs=rows.inputs,
    )
    return values


def batched_forward(
    forward: Callable[[Any], dict[str, Tensor]],
    rows: Rollouts | Experience,
    budget: int,
    all_max: AllReduce,
    layout: Layout = "auto",
) -> dict[str, Tensor]:
    """Runs `forward` over micro-batches and puts its (b, t) results back into (B, T) tensors.

    Args:
        forward: gets some rows, cropped to their longest, gives named (b, t) tensors.
        rows: all B rows.
        budget: most tokens per micro-batch.
        all_max: maximum over ranks; every rank calls `forward` equally often, as sharded models need.
        layout: of the model that `forward` runs.
    """
    out: dict[str, Tensor] = {}
    for index in _micro_batch_rows(rows, budget, all_max, layout):
        part = rows.select(index if len(index) else torch.zeros(1, dtype=torch.long)).crop()
        index = index.to(rows.token_ids.device)
        for name, value in forward(part).items():
            full = out.setdefault(name, value.new_zeros(rows.token_ids.shape))
            if len(index):
                full[index, : value.shape[1]] = value
    return out


def _micro_batch_rows(
    rows: Rollouts | Experience | SupervisedBatch,
    budget: int,
    all_max: AllReduce,
    layout: Layout,
    units: Tensor | None = None,
) -> list[Tensor]:
    """Row indices of micro-batches of at most `budget` tokens, the same number on every rank (some may be empty)."""
    ids = told_apart(rows.on_host("token_ids"), rows.inputs)
    host = ids, rows.on_host("attention_mask"), rows.on_host("response_mask")
    bins = micro_batches(*host, budget, layout=layout, units=units)
    most = int(all_max(torch.tensor(float(len(bins)))))
    if most > len(bins):
        bins = micro_batches(*host, budget, num_bins=most, layout=layout, units=units)
    return bins


# ---- rewards and advantages --------------------------------------------------------------------------------------


def shape_rewards(rollouts: Rollouts, totals: Tensor, valid: Tensor, layout: TrajectoryLayout) -> Tensor:
    """Per-token rewards: each turn's on its last token, the rest of the trajectory's on its last.

    Args:
        rollouts: B rows, with `turn_rewards`.
        totals: (B,) rewards of their trajectories, turn rewards included.
        valid: (B,) bool, rows that are scored.
        layout: Of the rows.

    Returns:
        (B, T) float32, 0 off the mask and in rows that are not scored.
    """
    positions = torch.arange(layout.mask.shape[1], device=layout.mask.device)
    last = torch.where(layout.mask, positions, -1).max(1).values
    has_response, joined = last >= 0, layout.join(totals)
    rewards = torch.zeros(layout.mask.shape, device=totals.device)
    for of_turns in rollouts.turn_rewards.values():
        rewards = rewards + layout.join(of_turns) * layout.mask
    rewards[has_response, last[has_response]] += (joined - rewards.sum(1))[has_response]
    return layout.split(rewards) * valid.unsqueeze(1)


def turn_anchors(rollouts: Rollouts) -> Tensor | None:
    """(B, T) int64 number of the state in which each sampled token's turn began, 0 elsewhere; None without states."""
    if not rollouts.states:
        return None
    numbers: dict[str, int] = {}
    count = max(len(states) for states in rollouts.states)
    rows = [[numbers.setdefault(state, len(numbers)) for state in states] for states in rollouts.states]
    table = torch.tensor([row + [0] * (count - len(row)) for row in rows], device=rollouts.token_ids.device)
    mask = rollouts.response_mask
    turns = torch.zeros_like(mask, dtype=torch.long) if rollouts.turn_ids is None else rollouts.turn_ids
    return torch.where(mask, table.gather(1, torch.where(mask, turns, 0)), 0)


def whiten_and_clip(
    advantages: Tensor, mask: Tensor, *, whiten: bool, clip: float | None, all_sum: AllReduce
) -> tuple[Tensor, dict[str, Tensor]]:
    """The one stage at which advantages are scaled and bounded, over the tokens on the mask.

    Returns:
        Advantages (B, T), 0 off the mask; metrics with the fraction of clipped tokens.
    """
    if whiten:
        advantages = masked_whiten(advantages, mask, all_sum=all_sum)
    metrics = {"advantage/abs": advantages.abs()}
    if clip is not None:
        metrics["advantage/clip_fraction"] = (advantages.abs() > clip).float()
        advantages = advantages.clamp(-clip, clip)
    return advantages * mask, metrics


def one_per_token(argument: str, part: object, found: object, like: Tensor) -> Tensor:
    """What a user's part returned, if it is (B, T); another shape would broadcast and be counted wrongly.

    Raises:
        ValueError: it isn't; the message names the argument and the class.
    """
    if isinstance(found, Tensor) and found.shape == like.shape:
        return found
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise ValueError(
        f"{argument}={type(part).__name__}: returned {shape} for tokens of shape {tuple(like.shape)}. Return one value "
        "per token."
    )


def checked_loss(loss: object, answer: Any, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What a policy loss returned, if it is what `PolicyLoss` asks for; a scalar would be weighted as tokens are.

    Raises:
        ValueError: it isn't.
    """
    name = f"loss={type(loss).__name__}"
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
        raise ValueError(f"{name}: it must return two things, (B, T) token losses and a dictionary of metrics.")
    token_loss, metrics = one_per_token("loss", loss, answer[0], mask), answer[1]
    for metric, value in metrics.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name}: its metric {metric!r} is a {type(value).__name__}: give a tensor, (B, T).")
    return token_loss, metrics


# ---- cutting -----------------------------------------------------------------------------------------------------


def shuffled_groups(group_ids: Tensor, *, seed: int) -> Tensor:
    """(B,) row order in which groups are shuffled but stay together; the same for the same seed."""
    groups = group_ids.unique()
    place = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).to(group_ids.device)
    return place[torch.searchsorted(groups, group_ids)].argsort(stable=True)


def cut_minibatches(experience: Experience, count: int, *, seed: int) -> list[Experience]:
    """Cuts a rollout into `count` mini-batches of equally many trajectories, groups in an order given by the seed.

    Groups stay whole where the mini-batch of a rank holds a multiple of the group size; rows of a trajectory always do.
    Supervised rows are dealt out in their own order, as evenly as they go.

    Raises:
        ValueError: there are fewer supervised rows than mini-batches.
    """
    if count == 1:
        return [experience]
    ids = experience.trajectory_ids
    firsts = first_rows(ids)
    order = firsts[shuffled_groups(experience.group_ids[firsts], seed=seed)]
    if len(firsts) == len(ids):
        shares = order.tensor_split(count)
    else:
        shares = tuple((ids[part][:, None] == ids).nonzero()[:, 1] for part in order.tensor_split(count))
    parts = [experience.select(rows) for rows in shares]
    extra = experience.supervised
    if extra is None:
        return parts
    if len(extra) < count:
        raise ValueError(
            f"ptx_batch_size={len(extra)} on each rank is less than the {count} mini-batches of a rollout: take at "
            f"least {count}, or a larger minibatch_size."
        )
    dealt = torch.arange(len(extra)).tensor_split(count)
    return [replace(part, supervised=extra.select(rows)) for part, rows in zip(parts, dealt, strict=True)]


def cut_micro_batches(
    minibatch: Rows,
    budget: int,
    all_max: AllReduce,
    *,
    skip_zero: bool = False,
    whole_trajectories: bool = False,
    layout: Layout = "auto",
) -> list[Rows]:
    """Cuts a mini-batch, or supervised rows, into micro-batches, equally many on every rank.

    Args:
        minibatch: rows of one optimizer step, normalisers set: rows left out here still count in them.
        budget: most tokens per micro-batch.
        all_max: maximum over ranks.
        skip_zero: (experience only) leave out trajectories whose advantages are all 0: their loss has no gradient.
        whole_trajectories: (experience only) keep the rows of a trajectory together, even above the budget.
        layout: of the models that run them, see `widest_layout`.

    Returns:
        at least one micro-batch; a rank without rows gets one row with an empty response mask.
    """
    units = None
    if isinstance(minibatch, Experience):
        if skip_zero:
            rows = _rows_with_advantage(minibatch)
            minibatch = minibatch.select(rows) if len(rows) else _without_response(minibatch)  # type: ignore[assignment]
        trajectory_ids = minibatch.on_host("trajectory_ids")
        if whole_trajectories and len(trajectory_ids.unique()) < len(minibatch):
            units = trajectory_ids
    pieces = []
    for index in _micro_batch_rows(minibatch, budget, all_max, layout, units):
        if len(index):
            pieces.append(minibatch.select(index).crop())
        else:
            pieces.append(_without_response(minibatch))
    return pieces


def _rows_with_advantage(minibatch: Experience) -> Tensor:
    """Rows of the trajectories that have an advantage on any token."""
    index = minibatch.trajectory_ids.unique(return_inverse=True)[1]
    trained = (minibatch.advantages != 0).any(1)
    return trained.new_zeros(len(index)).index_put_((index[trained],), trained.new_ones(()))[index].nonzero().squeeze(1)


def _without_response(rows: Rows) -> Rows:
    """One row that takes part in forward, backward and collectives and adds nothing."""
    row = rows.select(torch.zeros(1, dtype=torch.long)).crop()
    row.response_mask = torch.zeros_like(row.response_mask)
    if isinstance(row, Experience):
        row.advantages = torch.zeros_like(row.advantages)
        row.token_extras = {name: torch.zeros_like(x) for name, x in row.token_extras.items()}
    return row

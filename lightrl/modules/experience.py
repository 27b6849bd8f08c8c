"""The steps between scored rollouts and losses, as functions: batched no-grad forwards, token rewards, cutting.

Letters: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.models.batching import micro_batches
from lightrl.models.policy import PolicyModel, ValueModel
from lightrl.modules.kl import KLInReward
from lightrl.ops.masking import masked_whiten
from lightrl.types import Experience, Rollouts

if TYPE_CHECKING:
    from lightrl.modules.ppo import PPOLightningModule

__all__ = [
    "batched_forward",
    "cut_micro_batches",
    "evaluate_models",
    "policy_forward",
    "shape_rewards",
    "shuffled_groups",
    "value_forward",
    "whiten_and_clip",
]

AllReduce = Callable[[Tensor], Tensor]


def plan(rows: Rollouts | Experience, budget: int, all_max: AllReduce) -> list[Tensor]:
    """Row indices of micro-batches of at most `budget` tokens, the same number on every rank (some may be empty)."""
    bins = micro_batches(rows.attention_mask, rows.response_mask, rows.group_ids, budget)
    most = int(all_max(torch.tensor(float(len(bins)))))
    if most > len(bins):
        bins = micro_batches(rows.attention_mask, rows.response_mask, rows.group_ids, budget, num_bins=most)
    return bins


def policy_forward(model: PolicyModel, rows: Any, **wanted: bool) -> dict[str, Tensor]:
    """What the policy says about some rows: `logprobs` and, where `wanted`, `entropy` and `values`, each (b, t)."""
    output = model(
        rows.token_ids,
        rows.attention_mask,
        rows.response_mask,
        group_ids=rows.group_ids,
        temperature=rows.temperature,
        inputs=rows.inputs,
        **wanted,
    )
    return {name: value for name, value in output._asdict().items() if value is not None}


def value_forward(critic: ValueModel, rows: Any) -> Tensor:
    """The critic's (b, t) values of some rows."""
    values: Tensor = critic(
        rows.token_ids, rows.attention_mask, rows.response_mask, group_ids=rows.group_ids, inputs=rows.inputs
    )
    return values


def evaluate_models(module: PPOLightningModule, rollouts: Rollouts) -> Experience:
    """Old and reference log-probs and values, each only where something uses it."""

    def batched(forward: Callable[[Any], dict[str, Tensor]]) -> dict[str, Tensor]:
        return batched_forward(forward, rollouts, module.micro_batch_tokens, module.all_max)

    actor, critic, reference = module.actor, module.critic, module.reference
    experience = _from_rollouts(rollouts)
    shared = actor.value_head is not None
    updates = module.ppo_epochs * module.num_minibatches(len(rollouts))
    if updates > 1 or shared or isinstance(module.kl, KLInReward):
        out = batched(lambda x: policy_forward(actor, x, values=shared))
        experience.old_logprobs, experience.values = out["logprobs"], out.get("values")
    if critic is not None:
        experience.values = batched(lambda x: {"values": value_forward(critic, x)})["values"]
    if module.kl is not None:
        with actor.adapter_disabled() if reference is None else nullcontext():
            experience.ref_logprobs = batched(lambda x: policy_forward(reference or actor, x))["logprobs"]
    return experience


def _from_rollouts(rollouts: Rollouts) -> Experience:
    names = ("token_ids", "attention_mask", "response_mask", "group_ids", "engine_logprobs", "temperature", "inputs")
    return Experience(
        **{name: getattr(rollouts, name) for name in names},
        advantages=torch.zeros_like(rollouts.engine_logprobs),
        rewards=rollouts.rewards,
        valid=rollouts.rewards.isfinite(),
    )


def shuffled_groups(group_ids: Tensor, *, seed: int) -> Tensor:
    """(B,) row order in which groups are shuffled but stay together; the same for the same seed."""
    groups = group_ids.unique()
    place = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).to(group_ids.device)
    return place[torch.searchsorted(groups, group_ids)].argsort(stable=True)


def batched_forward(
    forward: Callable[[Any], dict[str, Tensor]], rows: Rollouts, budget: int, all_max: AllReduce
) -> dict[str, Tensor]:
    """Runs `forward` over micro-batches and puts its (b, t) results back into (B, T) tensors.

    Args:
        forward: gets some rows, cropped to their longest, gives named (b, t) tensors.
        rows: all B rows.
        budget: most tokens per micro-batch.
        all_max: maximum over ranks; every rank calls `forward` equally often, as sharded models need.
    """
    out: dict[str, Tensor] = {}
    for index in plan(rows, budget, all_max):
        index = index.to(rows.token_ids.device)
        part = rows.select(index if len(index) else torch.zeros(1, dtype=torch.long, device=index.device)).crop()
        for name, value in forward(part).items():
            full = out.setdefault(name, value.new_zeros(rows.token_ids.shape))
            if len(index):
                full[index, : value.shape[1]] = value
    return out


def cut_micro_batches(minibatch: Experience, budget: int, all_max: AllReduce, *, skip_zero: bool) -> list[Experience]:
    """Cuts a mini-batch into micro-batches, equally many on every rank.

    Args:
        minibatch: rows of one optimizer step, normalisers set: rows left out here still count in them.
        budget: most tokens per micro-batch.
        all_max: maximum over ranks.
        skip_zero: leave out rows whose advantages are all 0, because their loss has no gradient.

    Returns:
        at least one micro-batch; a rank without rows gets one row with an empty response mask.
    """
    device = minibatch.token_ids.device
    if skip_zero:
        rows = (minibatch.advantages != 0).any(1).nonzero().squeeze(1)
        minibatch = minibatch.select(rows if len(rows) else torch.zeros(1, dtype=torch.long, device=device))
    pieces = []
    for index in plan(minibatch, budget, all_max):
        if len(index):
            pieces.append(minibatch.select(index.to(device)).crop())
        else:
            pieces.append(_without_response(minibatch))
    return pieces


def _without_response(rows: Experience) -> Experience:
    """One row that takes part in forward, backward and collectives and adds nothing."""
    row = rows.select(torch.zeros(1, dtype=torch.long, device=rows.token_ids.device)).crop()
    row.response_mask = torch.zeros_like(row.response_mask)
    row.advantages = torch.zeros_like(row.advantages)
    return row


def shape_rewards(experience: Experience, penalty: KLInReward | None, kl_coef: float) -> Tensor:
    """Per-token rewards: the sequence's score on its last response token, minus the KL penalty on each.

    Returns:
        (B, T) float32, 0 off the mask and 0 in rows that no reward function scored.
    """
    mask = experience.response_mask
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).max(1).values
    rewards = torch.zeros_like(experience.engine_logprobs)
    has_response = last >= 0
    rewards[has_response, last[has_response]] = experience.rewards[has_response]
    if penalty is not None and experience.old_logprobs is not None and experience.ref_logprobs is not None:
        rewards = rewards - kl_coef * penalty(experience.old_logprobs, experience.ref_logprobs) * mask
    return rewards * experience.valid.unsqueeze(1)


def whiten_and_clip(
    advantages: Tensor, experience: Experience, *, whiten: bool, clip: float | None, all_sum: AllReduce
) -> tuple[Tensor, dict[str, Tensor]]:
    """The one stage at which advantages are scaled and bounded.

    Returns:
        advantages (B, T), 0 off the mask; metrics with the true fraction of clipped tokens.
    """
    mask = experience.response_mask & experience.valid.unsqueeze(1)
    if whiten:
        advantages = masked_whiten(advantages, mask, all_sum=all_sum)
    metrics = {"advantage/abs": advantages.abs()}
    if clip is not None:
        metrics["advantage/clip_fraction"] = (advantages.abs() > clip).float()
        advantages = advantages.clamp(-clip, clip)
    return advantages * mask, metrics

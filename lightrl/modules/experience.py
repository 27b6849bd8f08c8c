"""The steps between scored rollouts and losses, as functions: batched no-grad forwards, token rewards, cutting.

Letters: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lightrl.models.batching import micro_batches
from lightrl.models.policy import PolicyModel, ValueModel
from lightrl.models.spec import Layout
from lightrl.modules.kl import KLInLoss, KLInReward
from lightrl.modules.metrics import MetricSums
from lightrl.ops.entropy import top_entropy_mask
from lightrl.ops.masking import masked_whiten
from lightrl.types import Experience, Rollouts, SupervisedBatch

if TYPE_CHECKING:
    from lightrl.modules.ppo import PPOLightningModule

__all__ = [
    "batched_forward",
    "count_minibatches",
    "cut_micro_batches",
    "cut_minibatches",
    "evaluate_models",
    "finish_advantages",
    "policy_forward",
    "set_rewards",
    "shape_rewards",
    "shuffled_groups",
    "value_forward",
    "whiten_and_clip",
    "whole_logprobs",
    "widest_layout",
    "with_normalizers",
    "zero_rows_are_free",
]

AllReduce = Callable[[Tensor], Tensor]
Rows = TypeVar("Rows", Experience, SupervisedBatch)


def plan(
    rows: Rollouts | Experience | SupervisedBatch, budget: int, all_max: AllReduce, layout: Layout = "auto"
) -> list[Tensor]:
    """Row indices of micro-batches of at most `budget` tokens, the same number on every rank (some may be empty)."""
    masks = rows.attention_mask, rows.response_mask, rows.group_ids
    bins = micro_batches(*masks, budget, layout=layout)
    most = int(all_max(torch.tensor(float(len(bins)))))
    if most > len(bins):
        bins = micro_batches(*masks, budget, num_bins=most, layout=layout)
    return bins


def widest_layout(*models: PolicyModel | ValueModel | None) -> Layout:
    """Of the layouts in which the models run, the one that computes most tokens."""
    used = {model.layout for model in models if model is not None}
    return "padded" if "padded" in used else "packed" if "packed" in used else "auto"


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


def whole_logprobs(model: PolicyModel, token_ids: Tensor) -> Tensor:
    """(B, T) log-probs at temperature 1 of all tokens but the first of each row, none of which is padding."""
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    response = mask.clone()
    response[:, 0] = False
    logprobs: Tensor = model(token_ids, mask, response).logprobs
    return logprobs


def evaluate_models(module: PPOLightningModule, rollouts: Rollouts) -> Experience:
    """Old and reference log-probs and values, each only where something uses it."""

    def batched(model: Any, forward: Callable[[Any], dict[str, Tensor]]) -> dict[str, Tensor]:
        return batched_forward(forward, rollouts, module.micro_batch_tokens, module.all_max, model.layout)

    actor, critic, reference = module.actor, module.critic, module.reference
    experience = _from_rollouts(rollouts)
    shared = actor.value_head is not None
    updates = module.ppo_epochs * count_minibatches(module, len(rollouts))
    filtered, replaced = module.top_entropy_fraction < 1, module.loss.replaces_old_logprobs
    if shared or filtered or (not replaced and (updates > 1 or isinstance(module.kl, KLInReward))):
        out = batched(actor, lambda x: policy_forward(actor, x, values=shared, entropy=filtered))
        experience.old_logprobs = out["logprobs"]
        experience.values, experience.entropy = out.get("values"), out.get("entropy")
    if replaced:
        experience.old_logprobs = rollouts.engine_logprobs
    if critic is not None:
        experience.values = batched(critic, lambda x: {"values": value_forward(critic, x)})["values"]
    if module.kl is not None:
        with actor.adapter_disabled() if reference is None else nullcontext():
            base = reference or actor
            experience.ref_logprobs = batched(base, lambda x: policy_forward(base, x))["logprobs"]
    return experience


def _from_rollouts(rollouts: Rollouts) -> Experience:
    names = ("token_ids", "attention_mask", "response_mask", "group_ids", "engine_logprobs", "temperature", "inputs")
    return Experience(
        **{name: getattr(rollouts, name) for name in names},
        advantages=torch.zeros_like(rollouts.engine_logprobs),
        rewards=rollouts.rewards,
        valid=rollouts.rewards.isfinite(),
        supervised=rollouts.supervised,
    )


def shuffled_groups(group_ids: Tensor, *, seed: int) -> Tensor:
    """(B,) row order in which groups are shuffled but stay together; the same for the same seed."""
    groups = group_ids.unique()
    place = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).to(group_ids.device)
    return place[torch.searchsorted(groups, group_ids)].argsort(stable=True)


def count_minibatches(module: PPOLightningModule, num_sequences: int) -> int:
    """Optimizer steps per pass over a rollout of which this rank holds `num_sequences` rows. Collective.

    Raises:
        ValueError: `minibatch_size` does not divide the rollout.
    """
    size = module.minibatch_size
    if size is None:
        return 1
    ranks = module.trainer.world_size
    total = int(module.all_sum(torch.tensor(float(num_sequences))))
    if size % ranks:
        raise ValueError(
            f"minibatch_size={size} counts sequences over all ranks and cannot be shared by {ranks}: take a "
            f"multiple of {ranks}."
        )
    if total % size:
        raise ValueError(
            f"minibatch_size={size} does not divide the rollout's {total} sequences (prompts x group size, over all "
            f"ranks): take a divisor of {total}, or null for one update per epoch."
        )
    return total // size


def cut_minibatches(experience: Experience, count: int, *, seed: int) -> list[Experience]:
    """Cuts a rollout into `count` mini-batches, groups in an order that depends on the seed.

    Groups stay whole where the mini-batch of a rank holds a multiple of the group size.

    Supervised rows are dealt out in their own order, as evenly as they go.

    Raises:
        ValueError: there are fewer supervised rows than mini-batches.
    """
    if count == 1:
        return [experience]
    parts = [experience.select(rows) for rows in shuffled_groups(experience.group_ids, seed=seed).tensor_split(count)]
    extra = experience.supervised
    if extra is None:
        return parts
    if len(extra) < count:
        raise ValueError(
            f"ptx_batch_size={len(extra)} on each rank is less than the {count} mini-batches of a rollout: take at "
            f"least {count}, or a larger minibatch_size."
        )
    shares = torch.arange(len(extra)).tensor_split(count)
    return [replace(part, supervised=extra.select(rows)) for part, rows in zip(parts, shares, strict=True)]


def batched_forward(
    forward: Callable[[Any], dict[str, Tensor]],
    rows: Rollouts,
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
    for index in plan(rows, budget, all_max, layout):
        index = index.to(rows.token_ids.device)
        part = rows.select(index if len(index) else torch.zeros(1, dtype=torch.long, device=index.device)).crop()
        for name, value in forward(part).items():
            full = out.setdefault(name, value.new_zeros(rows.token_ids.shape))
            if len(index):
                full[index, : value.shape[1]] = value
    return out


def cut_micro_batches(
    minibatch: Rows, budget: int, all_max: AllReduce, *, skip_zero: bool = False, layout: Layout = "auto"
) -> list[Rows]:
    """Cuts a mini-batch, or supervised rows, into micro-batches, equally many on every rank.

    Args:
        minibatch: rows of one optimizer step, normalisers set: rows left out here still count in them.
        budget: most tokens per micro-batch.
        all_max: maximum over ranks.
        skip_zero: (experience only) leave out rows whose advantages are all 0, because their loss has no gradient.
        layout: of the models that run them, see `widest_layout`.

    Returns:
        at least one micro-batch; a rank without rows gets one row with an empty response mask.
    """
    device = minibatch.token_ids.device
    if skip_zero and isinstance(minibatch, Experience):
        rows = (minibatch.advantages != 0).any(1).nonzero().squeeze(1)
        minibatch = minibatch.select(rows if len(rows) else torch.zeros(1, dtype=torch.long, device=device))
    pieces = []
    for index in plan(minibatch, budget, all_max, layout):
        if len(index):
            pieces.append(minibatch.select(index.to(device)).crop())
        else:
            pieces.append(_without_response(minibatch))
    return pieces


def with_normalizers(module: PPOLightningModule, minibatch: Experience) -> Experience:
    """The mini-batch with what its summed losses are divided by. Collective."""
    mask, ptx = minibatch.response_mask, minibatch.supervised
    learnt = mask.new_zeros(()) if ptx is None else ptx.response_mask.sum()
    counts = torch.stack([module.aggregation.count(mask).double(), mask.sum().double(), learnt.double()])
    ranks = module.trainer.world_size
    policy, tokens, supervised = (max(x, 1.0) / ranks for x in module.all_sum(counts).tolist())
    ptx = None if ptx is None else replace(ptx, normalizer=supervised)
    return replace(minibatch, normalizer=policy, token_normalizer=tokens, supervised=ptx)


def zero_rows_are_free(module: PPOLightningModule) -> bool:
    """Whether a row whose advantages are all 0 has no gradient and no reader, so that it need not be run.

    What a subclass does in a `compute_loss` of its own is not known, so there all rows are run.
    """
    from lightrl.modules.ppo import PPOLightningModule

    if type(module).compute_loss is not PPOLightningModule.compute_loss:
        return False
    terms = (module.critic_spec is not None, isinstance(module.kl, KLInLoss), module.entropy_coef, module.aux_loss_coef)
    return not any(terms) and not module.entropy_is_read and module.loss.zero_advantage_is_zero_loss


def _without_response(rows: Rows) -> Rows:
    """One row that takes part in forward, backward and collectives and adds nothing."""
    row = rows.select(torch.zeros(1, dtype=torch.long, device=rows.token_ids.device)).crop()
    row.response_mask = torch.zeros_like(row.response_mask)
    if isinstance(row, Experience):
        row.advantages = torch.zeros_like(row.advantages)
    return row


def set_rewards(module: PPOLightningModule, experience: Experience, rewards: Tensor, sums: MetricSums) -> Tensor:
    """Clips the (B,) rewards, writes them and `valid` into the experience, and lays them out per token.

    Returns:
        (B, T) token rewards, a KL in the reward already inside; `sums` gets the true clip fraction.
    """
    bound = module.reward_clip
    if bound is not None:
        sums.add({"reward/clip_fraction": (rewards.abs() > bound).float()})
        rewards = rewards.clamp(-bound, bound)
    experience.valid = rewards.isfinite()
    experience.rewards = torch.where(experience.valid, rewards, 0.0)
    penalty = module.kl if isinstance(module.kl, KLInReward) else None
    return shape_rewards(experience, penalty, module.kl_coef)


def finish_advantages(
    module: PPOLightningModule, experience: Experience, advantages: Tensor, rollouts: Rollouts, sums: MetricSums
) -> None:
    """Takes truncated rows out of training, whitens, clips and filters advantages, and writes them down.

    A token that the entropy filter leaves out gets advantage 0, so that its policy loss is 0 and it still counts in
    the normaliser. Statistics of the whitening are those of all trained tokens.
    """
    if module.mask_truncated:
        experience.response_mask = experience.response_mask & ~rollouts.truncated.unsqueeze(1)
    advantages, metrics = whiten_and_clip(
        advantages, experience, whiten=module.whiten_advantages, clip=module.advantage_clip, all_sum=module.all_sum
    )
    sums.add(metrics, experience.response_mask)
    if experience.entropy is not None:
        fraction, mask = module.top_entropy_fraction, experience.response_mask
        keep = top_entropy_mask(experience.entropy, mask, fraction, all_sum=module.all_sum)
        sums.add({"policy/top_entropy": experience.entropy[keep]})
        advantages = advantages * keep
    experience.advantages = advantages
    sums.add({"advantage/nonzero_fraction": (advantages != 0).any(1).float()})


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

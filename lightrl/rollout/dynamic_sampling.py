"""Dynamic sampling: groups of new prompts replace groups without reward spread.

Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.2, which samples batches of a fixed size until one is full and
    drops surplus groups. We sample only the missing groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightrl.environments.episodes import request_seed
from lightrl.ops.formulas import group_stats
from lightrl.rollout.collector import Collection, ScoredGroup


def refill(sampler: Any, rollout: Any, gather: Callable[[int], list[int]]) -> None:
    """Replaces the groups of a rollout without reward spread, in place. Collective.

    In each of up to `dynamic_sampling_rounds` rounds, every rank takes one new prompt per missing group. The ranks
    share consecutive prompts, so the cursor is equal on all ranks and no prompt is skipped. Remaining places are filled
    with the oldest dropped groups, which add nothing to a group estimator. `gather` returns the integers of all ranks.
    """
    data, wanted, rounds = sampler.data, len(rollout.groups), 0
    while rounds < data.dynamic_sampling_rounds:
        missing = gather(wanted - sum(map(has_spread, rollout.sampled)))
        if not any(missing):
            break
        if count := missing[data.rank]:
            offset = sum(missing[: data.rank])
            prompts = sampler.prompts.batch(rollout.cursor + offset, count)
            seeds = [request_seed(data.seed, "train", rollout.cursor, offset + i) for i in range(count)]
            more = sampler.start(prompts, rollout.sampling, data.group_size, seeds, partial(Collection, trained=True))
            rollout.sampled = [*rollout.sampled, *more.finish()]
            for name, value in more.metrics.items():
                rollout.metrics[name] += value
        rollout.cursor, rounds = rollout.cursor + sum(missing), rounds + 1
    kept = [group for group in rollout.sampled if has_spread(group)]
    flat = [group for group in rollout.sampled if not has_spread(group)]
    rollout.groups = [*kept, *flat[: wanted - len(kept)]]
    rewards = [reward for group in rollout.sampled for reward in group.rewards if not math.isnan(reward)]
    rollout.metrics |= {
        "rollout/refills": float(rounds),
        "rollout/dropped_groups": float(len(rollout.sampled) - wanted),
        "rollout/flat_groups": float(wanted - len(kept)),
        "reward/sampled_mean": math.fsum(rewards) / len(rewards) if rewards else 0.0,
    }


def has_spread(group: ScoredGroup) -> bool:
    """Whether the rewards of the scored trajectories differ. See `GroupStats.varied`."""
    rewards = torch.tensor(group.rewards)
    stats = group_stats(rewards, torch.zeros(len(rewards), dtype=torch.long), ~rewards.isnan())
    return bool(stats.varied.any())

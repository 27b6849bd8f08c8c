"""Groups that teach nothing are replaced by those of further prompts."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightrl.rollout.collation import ScoredGroup


def refill(
    groups: list[ScoredGroup],
    cursor: int,
    rounds: int,
    *,
    collect: Callable[[int, int, int], list[ScoredGroup]],
    gather: Callable[[int], list[int]],
    rank: int,
) -> tuple[list[ScoredGroup], int, dict[str, float]]:
    """Replaces groups without reward spread by those of further prompts, in at most `rounds` generations.

    A group whose trajectories all failed has no spread either. Per generation each rank takes one prompt for each group
    it lacks, all ranks together a contiguous run of prompts, so the cursor stays the same everywhere and no prompt is
    lost. Groups still lacking at the end are made up for by dropped ones, the oldest first: the batch keeps its size,
    and they add nothing to a group estimator.

    Args:
        groups: this rank's groups.
        cursor: number of the prompt after those taken so far.
        rounds: bound on further generations.
        collect: (start, offset, count) gives the groups of prompts start + offset ... start + offset + count - 1.
        gather: every rank's number from this rank's. Collective; called equally often on every rank.
        rank: of this process.

    Returns:
        as many groups as came in; the cursor after all generations; metrics.

    Source: DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476, section 3.2. It keeps sampling until the batch is
        full, with generation batches of a fixed size, and throws surplus groups away; here no surplus is made.
    """
    wanted, everything, refills = len(groups), list(groups), 0
    while refills < rounds:
        missing = gather(wanted - sum(group.has_spread for group in everything))
        if not any(missing):
            break
        if missing[rank]:
            everything += collect(cursor, sum(missing[:rank]), missing[rank])
        cursor += sum(missing)
        refills += 1
    kept = [group for group in everything if group.has_spread]
    flat = [group for group in everything if not group.has_spread]
    rewards = [reward for group in everything for reward in group.rewards if not math.isnan(reward)]
    metrics = {
        "rollout/refills": float(refills),
        "rollout/dropped_groups": float(len(everything) - wanted),
        "rollout/flat_groups": float(wanted - len(kept)),
        "reward/sampled_mean": math.fsum(rewards) / len(rewards) if rewards else 0.0,
    }
    return [*kept, *flat[: wanted - len(kept)]], cursor, metrics

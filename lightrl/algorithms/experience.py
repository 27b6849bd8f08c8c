"""From a scored rollout to experience: changed rewards, token rewards, advantages, and metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightrl.algorithms.settings import Shaping
from lightrl.distributed.reduction import MetricSums, Reduction
from lightrl.objectives.estimators import AdvantageEstimator, AdvantageInput, Credit
from lightrl.objectives.kl import KLInReward, KLPenalty
from lightrl.objectives.trajectories import TrajectoryLayout, first_rows, trajectory_lengths
from lightrl.ops.advantages import group_stats
from lightrl.ops.entropy import top_entropy_mask
from lightrl.ops.losses import explained_variance
from lightrl.ops.masking import AllSum, masked_whiten
from lightrl.records import Advantages, Experience, ModelOutputs, Rollouts


class RewardWatch:
    """Compares the rewards of a rollout with what they were, since hooks and callbacks may change them, also in place.

    Attributes:
        rollouts: Owner of the rewards.
        missed: For which `AdvantageEstimator.credit` a change would be lost or land elsewhere. "total" misses a change
            of parts alone. "parts" misses one of the total that the weighted parts don't add up to. "turns" misses one
            that the turn rewards don't, which would land on the last turn.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.missed = set[str]()
        self._remember()

    def _remember(self) -> None:
        self._total = self.rollouts.rewards.clone()
        self._parts = {name: part.clone() for name, part in self.rollouts.reward_parts.items()}
        self._turns = _turn_totals(self.rollouts)

    def compare(self, *credits: str) -> None:
        """Adds what the changes since the last call miss to `missed`, only these `credits` if any are given."""
        rollouts, scored = self.rollouts, self.rollouts.rewards.isfinite()

        def change(now: Tensor, before: Tensor) -> Tensor:
            return torch.where(scored, now.nan_to_num(0.0) - before.nan_to_num(0.0), 0.0)

        total = change(rollouts.rewards, self._total)
        parts, any_part = torch.zeros_like(total), False
        for name, part in rollouts.reward_parts.items():
            moved = change(part, self._parts.get(name, torch.zeros_like(part)))
            any_part |= bool((moved != 0).any())
            parts += rollouts.reward_weights.get(name, 1.0) * moved
        turns = change(_turn_totals(rollouts), self._turns)
        bound = 8 * torch.finfo(torch.float32).eps * (1.0 + self._total.nan_to_num(0.0).abs().max())
        found = {
            "total": any_part and not bool((total != 0).any()),
            "parts": bool(((total - parts).abs() > bound).any()),
            "turns": bool(((total - turns).abs() > bound).any()),
        }
        self.missed |= {name for name, missed in found.items() if missed and name in (credits or found)}
        self._remember()

    def require_credit(self, estimator: AdvantageEstimator, credit: Credit) -> None:
        """Raises a ValueError if the estimator, which reads `credit`, didn't see a change."""
        if credit not in self.missed:
            return
        estimator.refuse_shaped_rewards("on_rollout_scored: a callback, or a hook before it, changes rewards", credit)
        raise ValueError(
            "on_rollout_scored: a callback changed rollouts.reward_parts but not rollouts.rewards, which "
            f"advantage={type(estimator).__name__} reads. Change rollouts.rewards by the same amount."
        )


def _turn_totals(rollouts: Rollouts) -> Tensor:
    """(B,) sum of the turn rewards of each row's trajectory."""
    if not rollouts.turn_rewards:
        return torch.zeros_like(rollouts.rewards)
    layout = TrajectoryLayout(rollouts.trajectory_ids, rollouts.response_mask)
    turns = [(layout.join(x) * layout.mask).sum(1) for x in rollouts.turn_rewards.values()]
    return layout.split(torch.stack(turns).sum(0))


# ---- advantages ------------------------------------------------------------------------------------------------------


def estimate_advantages(
    rollouts: Rollouts,
    outputs: ModelOutputs,
    estimator: AdvantageEstimator,
    kl: KLPenalty | None,
    reward_clip: float | None,
    all_sum: AllSum,
) -> tuple[Advantages, Credit]:
    """Advantages of B scored rows before whitening and clipping, and which rewards the estimator has read.

    Raises:
        ValueError: The estimator doesn't read the rewards that the clip or a KL in the reward changes.
    """
    rewards = rollouts.rewards if reward_clip is None else rollouts.rewards.clamp(-reward_clip, reward_clip)
    valid = rewards.isfinite()
    rewards = torch.where(valid, rewards, 0.0)
    layout = TrajectoryLayout(rollouts.trajectory_ids, rollouts.response_mask)
    token_rewards = shape_rewards(rollouts, rewards, valid, layout)
    if isinstance(kl, KLInReward) and outputs.old_logprobs is not None and outputs.ref_logprobs is not None:
        penalty = one_per_token("kl", kl, kl(outputs.old_logprobs, outputs.ref_logprobs), token_rewards)
        token_rewards = token_rewards - kl.coef * penalty * rollouts.response_mask
    anchors = turn_anchors(rollouts)
    given = AdvantageInput(
        layout.join(token_rewards),
        layout.mask,
        layout.join(rollouts.group_ids),
        values=None if outputs.values is None else layout.join(outputs.values),
        valid=layout.join(valid),
        reward_parts={name: layout.join(part) for name, part in rollouts.reward_parts.items()},
        part_weights=rollouts.reward_weights,
        turn_ids=None if rollouts.turn_ids is None else layout.join(rollouts.turn_ids),
        anchors=None if anchors is None else layout.join(anchors),
        all_sum=all_sum,
    )
    advantages, returns = estimator(given)
    credit = estimator.credit or given.credit
    if reward_clip is not None:
        estimator.refuse_shaped_rewards(f"reward_clip={reward_clip}", credit)
    if isinstance(kl, KLInReward) and credit == "parts":
        estimator.refuse_shaped_rewards("kl=KLInReward", credit)
    returns = None if returns is None else layout.split(returns)
    return Advantages(layout.split(advantages), returns, rewards, valid), credit


def shape_rewards(rollouts: Rollouts, totals: Tensor, valid: Tensor, layout: TrajectoryLayout) -> Tensor:
    """Rewards of tokens: each turn's on its last token, the rest of the trajectory's on its last.

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


def one_per_token(argument: str, part: object, found: object, like: Tensor) -> Tensor:
    """What a user's part returned, if it is (B, T); another shape would broadcast and be counted wrongly.

    Raises:
        ValueError: It isn't; the message names the argument and the class.
    """
    if isinstance(found, Tensor) and found.shape == like.shape:
        return found
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise ValueError(
        f"{argument}={type(part).__name__}: returned {shape} for tokens of shape {tuple(like.shape)}. Return one value "
        "per token."
    )


# ---- experience ------------------------------------------------------------------------------------------------------


def join_experience(
    rollouts: Rollouts,
    outputs: ModelOutputs,
    found: Advantages,
    raw_rewards: Tensor,
    shaping: Shaping,
    reduction: Reduction,
    *,
    whiten: bool,
    is_stale: bool,
) -> Experience:
    """Joins a rollout with log-probs, values, and advantages. Collective.

    Rows that aren't trained leave the mask, advantages are whitened and clipped, tokens are filtered by entropy.

    Args:
        rollouts: B rows.
        outputs: Of the models.
        found: Advantages before whitening and clipping.
        raw_rewards: (B,) rewards before callbacks changed them, NaN if no function scored the row.
        shaping: Clips and filters.
        reduction: Over ranks.
        whiten: Scale advantages to mean 0, std 1 over all tokens that are trained.
        is_stale: Older weights than those that start the updates sampled the rows.
    """
    sums, clip = MetricSums(), shaping.advantage_clip
    trained = found.valid & ~rollouts.truncated if shaping.mask_truncated else found.valid
    mask = rollouts.response_mask & trained.unsqueeze(1)
    advantages = masked_whiten(found.advantages, mask, all_sum=reduction.sum) if whiten else found.advantages
    sums.add({"advantage/abs": advantages.abs()}, mask)
    if clip is not None:
        sums.add({"advantage/clip_fraction": (advantages.abs() > clip).float()}, mask)
        advantages = advantages.clamp(-clip, clip)
    advantages = advantages * mask
    if shaping.reward_clip is not None:
        clipped = (rollouts.rewards.abs() > shaping.reward_clip).float()
        sums.add({"reward/clip_fraction": clipped[first_rows(rollouts.trajectory_ids)]})
    keep = None
    if shaping.top_entropy_fraction < 1 and outputs.entropy is not None:
        keep = top_entropy_mask(outputs.entropy, mask, shaping.top_entropy_fraction, all_sum=reduction.sum)
        sums.add({"policy/top_entropy": outputs.entropy[keep]})
    layout = TrajectoryLayout(rollouts.trajectory_ids, mask)
    sums.add({"advantage/nonzero_fraction": (layout.join(advantages) != 0).any(1).float()})
    sums.add(rollout_metrics(rollouts, outputs, raw_rewards))
    metrics = _with_spread(rollouts, raw_rewards, sums, reduction)
    if outputs.values is not None and found.returns is not None:
        explained = explained_variance(outputs.values, found.returns, mask, reduction.sum)
        metrics["value/explained_variance"] = float(explained)
    names = (
        *("token_ids", "attention_mask", "group_ids", "trajectory_ids", "turn_ids", "engine_logprobs"),
        *("temperature", "supports", "routes", "inputs", "supervised"),
    )
    experience = Experience(
        **{name: getattr(rollouts, name) for name in names},
        response_mask=mask,
        advantages=advantages,
        returns=found.returns,
        rewards=found.rewards,
        valid=found.valid,
        old_logprobs=outputs.old_logprobs,
        ref_logprobs=outputs.ref_logprobs,
        values=outputs.values,
        entropy=outputs.entropy,
        in_policy_loss=keep,
        is_stale=is_stale,
        token_extras=outputs.token_extras,
        row_extras=outputs.row_extras,
        metrics=metrics,
    )
    return experience.with_host_of(rollouts)


def rollout_metrics(rollouts: Rollouts, outputs: ModelOutputs, raw_rewards: Tensor) -> dict[str, Tensor]:
    """Values of a rollout per trajectory and per token; the caller averages them over both and over ranks."""
    mask, rows = rollouts.response_mask, first_rows(rollouts.trajectory_ids)
    lengths = trajectory_lengths(mask, rollouts.trajectory_ids)[rows].float()
    rewards = raw_rewards[rows]
    scored = rewards.isfinite()
    varied = group_stats(rollouts.rewards, rollouts.group_ids, rollouts.rewards.isfinite()).varied
    before = torch.where(mask.any(1), mask.int().argmax(1), rollouts.attention_mask.sum(1))
    metrics: dict[str, Tensor] = {
        "reward/mean": rewards[scored],
        "reward/scored_fraction": scored.float(),
        "reward/zero_std_fraction": (~varied[rows]).float(),
        **dict.fromkeys(("completions/length", "completions/length_max", "completions/length_min"), lengths),
        "rollout/truncated_fraction": rollouts.truncated[rows].float(),
        "rollout/prompt_length": before[rows].float(),
    }
    finished = lengths[~rollouts.truncated[rows]]
    if len(finished):
        names = ("rollout/finished_length", "rollout/finished_length_min", "rollout/finished_length_max")
        metrics |= dict.fromkeys(names, finished)
    for name, part in rollouts.reward_parts.items():
        given = part[rows]
        metrics[f"reward/{name}"] = given[given.isfinite()]
    if outputs.old_logprobs is not None:
        if outputs.old_logprobs is not rollouts.engine_logprobs:
            gap = (rollouts.engine_logprobs - outputs.old_logprobs)[mask]
            metrics |= {"kl/engine": gap, "kl/engine_gap_max": gap.abs()}
        if outputs.ref_logprobs is not None:
            metrics["kl/ref"] = (outputs.old_logprobs - outputs.ref_logprobs)[mask]
    if outputs.values is not None:
        metrics["value/mean"] = outputs.values[mask]
    return metrics


def _with_spread(rollouts: Rollouts, raw_rewards: Tensor, sums: MetricSums, reduction: Reduction) -> dict[str, float]:
    """Metrics reduced over ranks, with the standard deviation of the rewards and of each part.

    Two passes, mean first: `E[r^2] - E[r]^2` would lose a small spread of large rewards.
    """
    metrics, squares, rows = reduction.means(sums), MetricSums(), first_rows(rollouts.trajectory_ids)
    owners: dict[str, Any] = {"reward/mean": ("reward", raw_rewards)}
    owners |= {f"reward/{name}": (f"reward/{name}", part) for name, part in rollouts.reward_parts.items()}
    for name, (owner, values) in owners.items():
        if name in metrics:
            given = values[rows]
            squares.add({f"{owner}/std": (given[given.isfinite()].double() - metrics[name]).square()})
    return metrics | {name: value**0.5 for name, value in reduction.means(squares).items()}

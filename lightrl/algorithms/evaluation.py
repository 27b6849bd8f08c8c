"""Metrics of rollouts, for training (`reward/`, `kl/`, `rollout/`) and evaluation (`eval/`), and prediction records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightrl.distributed.reduction import MetricSums
from lightrl.objectives.trajectories import first_rows, trajectory_lengths
from lightrl.ops.advantages import group_stats
from lightrl.ops.losses import explained_variance
from lightrl.ops.masking import AllSum
from lightrl.records import Experience, ModelOutputs, Rollouts
from lightrl.rollout.collation import asked


def rollout_metrics(rollouts: Rollouts, outputs: ModelOutputs, raw_rewards: Tensor) -> dict[str, Tensor]:
    """Values of a rollout per trajectory and per token; the caller averages them over both and over ranks.

    Args:
        rollouts: the rows. outputs: of the models.
        raw_rewards: (B,) rewards before normalisation and clipping, NaN where no function scored.
    """
    mask, rows = rollouts.response_mask, first_rows(rollouts.trajectory_ids)
    lengths = trajectory_lengths(mask, rollouts.trajectory_ids)[rows].float()
    rewards = raw_rewards[rows]
    scored = rewards.isfinite()
    rewards = rewards[scored]
    varied = group_stats(rollouts.rewards, rollouts.group_ids, rollouts.rewards.isfinite()).varied
    before = torch.where(mask.any(1), mask.int().argmax(1), rollouts.attention_mask.sum(1))
    metrics: dict[str, Tensor] = {
        "reward/mean": rewards,
        "reward/scored_fraction": scored.float(),
        "reward/zero_std_fraction": (~varied[rows]).float(),
        "completions/length": lengths,
        "completions/length_max": lengths,
        "completions/length_min": lengths,
        "rollout/truncated_fraction": rollouts.truncated[rows].float(),
        "rollout/prompt_length": before[rows].float(),
    }
    finished = lengths[~rollouts.truncated[rows]]
    if len(finished):
        metrics["rollout/finished_length"] = finished
        metrics["rollout/finished_length_min"] = finished
        metrics["rollout/finished_length_max"] = finished
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


def critic_metrics(experience: Experience, all_sum: AllSum) -> dict[str, float]:
    """How good the critic was before the update, over all ranks; nothing without one."""
    if experience.values is None or experience.returns is None:
        return {}
    explained = explained_variance(experience.values, experience.returns, experience.response_mask, all_sum)
    return {"value/explained_variance": float(explained)}


def with_std(
    rollouts: Rollouts, raw_rewards: Tensor, sums: MetricSums, means: Callable[[MetricSums], dict[str, float]]
) -> dict[str, float]:
    """Metrics reduced over ranks, with the standard deviation of the rewards and of each part.

    Two passes, mean first: `E[r^2] - E[r]^2` would lose a small spread of large rewards. Collective.

    Args:
        rollouts: The rows. raw_rewards: (B,) rewards before callbacks, NaN where no function scored.
        sums: Metrics of the rollout, among them the means of rewards. means: Reduces sums over ranks.
    """
    metrics, squares, rows = means(sums), MetricSums(), first_rows(rollouts.trajectory_ids)
    owners = {"reward/mean": ("reward", raw_rewards)}
    owners |= {f"reward/{name}": (f"reward/{name}", part) for name, part in rollouts.reward_parts.items()}
    for name, (owner, values) in owners.items():
        if name in metrics:
            given = values[rows]
            squares.add({f"{owner}/std": (given[given.isfinite()].double() - metrics[name]).square()})
    return metrics | {name: value**0.5 for name, value in means(squares).items()}


def eval_metrics(rollouts: Rollouts, success_reward: float) -> dict[str, Tensor]:
    """Values of one evaluation batch, per trajectory or per group; the caller averages them over the whole evaluation.

    Returns:
        `eval/reward`, `eval/reward/<function>` (rows that were scored), `eval/length`,
        `eval/truncated_fraction`, and with several completions per prompt `eval/pass@k` (k = 1, 2, 4, ... G) and
        `eval/maj@G`; of one of several sets of prompts `eval/<set>/...`.
    """
    within = f"eval/{rollouts.eval_set}/" if rollouts.eval_set else "eval/"
    lengths = trajectory_lengths(rollouts.response_mask, rollouts.trajectory_ids)
    firsts = first_rows(rollouts.trajectory_ids)
    if len(firsts) < len(rollouts):
        rollouts, lengths = rollouts.select(firsts), lengths[firsts]
    metrics = {
        "eval/reward": rollouts.rewards[rollouts.rewards.isfinite()],
        "eval/length": lengths.float(),
        "eval/truncated_fraction": rollouts.truncated.float(),
    }
    for name, part in rollouts.reward_parts.items():
        metrics[f"eval/reward/{name}"] = part[part.isfinite()]
    groups = [(rollouts.group_ids == g).nonzero().squeeze(1) for g in rollouts.group_ids.unique()]
    size = max(len(rows) for rows in groups)
    success = (rollouts.rewards >= success_reward).float()
    if size > 1:
        k = 1
        while k <= size:
            rates = [pass_at_k(len(rows), int(success[rows].sum()), min(k, len(rows))) for rows in groups]
            metrics[f"eval/pass@{k}"] = torch.tensor(rates)
            k *= 2
        metrics[f"eval/maj@{size}"] = torch.tensor([_majority(rollouts, rows, success) for rows in groups])
    return {key.replace("eval/", within, 1): value for key, value in metrics.items()}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from n samples.

    `1 - C(n - c, k) / C(n, k)`, computed as a product (Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1).
    """
    wrong = n - correct
    if wrong < k:
        return 1.0
    miss = 1.0
    for i in range(k):
        miss *= (wrong - i) / (n - i)
    return 1.0 - miss


def _majority(rollouts: Rollouts, rows: Tensor, success: Tensor) -> float:
    """Success of the commonest answer of a group; among equally common ones the first sampled."""
    answers = rollouts.answers or [completion.strip() for completion in rollouts.completions]
    texts = [answers[i] for i in rows.tolist()]
    winner = Counter(texts).most_common(1)[0][0]
    return float(success[rows[texts.index(winner)]])


def records(rollouts: Rollouts, tokenizer: Any = None) -> list[dict[str, Any]]:
    """One plain dictionary per trajectory, as `lightrl predict` writes them; with its conversation where it has one.

    `tokenizer` decodes what was asked; see `asked`.
    """
    lengths = trajectory_lengths(rollouts.response_mask, rollouts.trajectory_ids)

    def number(value: Tensor) -> float | None:
        return float(value) if bool(value.isfinite()) else None

    out = []
    for i in first_rows(rollouts.trajectory_ids).tolist():
        record: dict[str, Any] = {name: values[i] for name, values in rollouts.columns.items()}
        record |= {
            "prompt": asked(rollouts, i, tokenizer),
            "completion": rollouts.completions[i],
            "reward": number(rollouts.rewards[i]),
            "num_tokens": int(lengths[i]),
            "truncated": bool(rollouts.truncated[i]),
        }
        record |= {f"reward/{name}": number(part[i]) for name, part in rollouts.reward_parts.items()}
        if rollouts.messages:
            record |= {"messages": rollouts.messages[i], "stop_reason": rollouts.stop_reasons[i]}
        out.append(record)
    return out

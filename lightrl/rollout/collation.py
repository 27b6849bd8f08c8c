"""Groups of scored trajectories and their collation into `Rollouts`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, get_args

import torch
from torch import Tensor

from lightrl.ops.advantages import group_stats
from lightrl.records import Media, Prompts, Rollouts, Scores, StopReason, Trajectory, TrajectoryRow
from lightrl.rewards.base import mean

ENVIRONMENT = "environment"
"""Name of the turn rewards among the reward components."""


@dataclass
class ScoredGroup:
    """The G trajectories of one prompt and their scores, which are None without reward functions."""

    prompt: Prompts
    trajectories: list[Trajectory]
    scores: Scores | None

    @property
    def rewards(self) -> list[float]:
        """Weighted sum of function rewards plus turn rewards per trajectory; NaN if it failed or was not scored."""
        scored = [math.nan] * len(self.trajectories) if self.scores is None else self.scores.total
        return [_reward(t, total) for t, total in zip(self.trajectories, scored, strict=True)]

    @property
    def has_spread(self) -> bool:
        """Whether the rewards of the scored trajectories differ. See `GroupStats.varied`."""
        rewards = torch.tensor(self.rewards)
        stats = group_stats(rewards, torch.zeros(len(rewards), dtype=torch.long), ~rewards.isnan())
        return bool(stats.varied.any())


def _reward(trajectory: Trajectory, scored: float) -> float:
    if trajectory.failed:
        return math.nan
    if not trajectory.turn_rewards:
        return scored
    return math.fsum([0.0 if math.isnan(scored) else scored, *trajectory.turn_rewards])


def collate(groups: Sequence[ScoredGroup], pad_token_id: int, temperature: float, masked_tokens: int = 0) -> Rollouts:
    """Collates groups into right-padded (B, T) sequences, ordered by group and trajectory.

    Args:
        groups: P groups.
        pad_token_id: Token ID used for padding.
        temperature: Sampling temperature.
        masked_tokens: Number of tokens at the start of each turn to exclude from the response mask.
            `rollout/masked_tokens` counts them.
    """
    of_group, of_trajectory = list[int](), list[int]()  # for each sequence
    owners, rows, count = list[Trajectory](), list[TrajectoryRow](), 0
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            of_group += [number] * len(trajectory.rows)
            of_trajectory += [count] * len(trajectory.rows)
            owners += [trajectory] * len(trajectory.rows)
            rows += trajectory.rows
            count += 1
    prompts = [group.prompt for group in groups]
    rewards = [reward for group in groups for reward in group.rewards]
    scores = Scores.concat([group.scores for group in groups if group.scores is not None])
    assert len(scores.total) in (0, count), "either all groups are scored by functions, or none"
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    turn_ids = _padded([row.turn_ids for row in rows], real, -1, torch.long)
    masked = _first_of_turns(turn_ids, masked_tokens)
    turn_ids[masked] = -1
    trained = turn_ids >= 0
    logprobs = _padded([row.logprobs for row in rows], real, 0.0, torch.float32)
    versions = sorted(set[int]().union(*(row.policy_versions for row in rows)) - {-1})
    return Rollouts(
        token_ids=_padded([row.token_ids for row in rows], real, pad_token_id, torch.long),
        attention_mask=real,
        response_mask=trained,
        engine_logprobs=logprobs.masked_fill_(masked, 0.0),
        group_ids=torch.tensor(of_group),
        rewards=torch.tensor([rewards[i] for i in of_trajectory], dtype=torch.float32),
        reward_parts={
            name: torch.tensor([part[i] for i in of_trajectory], dtype=torch.float32)
            for name, part in scores.parts.items()
        },
        truncated=torch.tensor([owner.stop_reason != "stop" for owner in owners]),
        policy_version=versions[0] if versions else -1,
        trajectory_ids=torch.tensor(of_trajectory),
        turn_ids=turn_ids if bool((turn_ids > 0).any()) else None,
        turn_rewards=_turn_rewards(owners, turn_ids),
        policy_versions=(
            _padded([row.policy_versions for row in rows], real, -1, torch.long).masked_fill_(masked, -1)
            if len(versions) > 1
            else None
        ),
        stop_reasons=[owner.stop_reason for owner in owners],
        messages=[owner.messages for owner in owners] if any(owner.messages for owner in owners) else [],
        states=[owner.states for owner in owners] if any(owner.states for owner in owners) else [],
        temperature=temperature,
        supports=[row.support for row in rows],
        routes=[row.routes for row in rows],
        prompts=[prompts[p].texts[0] for p in of_group],
        raw_prompts=[prompts[p].raw[0] for p in of_group] if prompts[0].raw else [],
        completions=[owner.completion for owner in owners],
        columns={
            **{name: [prompts[p].columns[name][0] for p in of_group] for name in prompts[0].columns},
            **{name: [values[i] for i in of_trajectory] for name, values in scores.extra.items()},
        },
        inputs=_shown("inputs", dict, prompts, of_group, rows),
        media=_shown("media", Media, prompts, of_group, rows),
        metrics=dict(scores.metrics) | ({"rollout/masked_tokens": float(masked.sum())} if masked_tokens else {}),
    )


def asked(rollouts: Rollouts, row: int, tokenizer: Any) -> str:
    """Returns the text of a trajectory's first request to the engine, including tools and the system prompt.

    Repeated special tokens, such as image placeholders, appear once.

    Args:
        rollouts: B sequences.
        row: Index of the trajectory's first sequence.
        tokenizer: The policy's tokenizer. None returns the prompt from the data.
    """
    if tokenizer is None:
        return rollouts.prompts[row]
    real = int(rollouts.attention_mask[row].sum())
    sampled = rollouts.response_mask[row].nonzero()
    ids = rollouts.token_ids[row, : int(sampled[0]) if len(sampled) else real].tolist()
    special = set(tokenizer.all_special_ids)
    runs = ((token, list(run)) for token, run in groupby(ids))
    return str(tokenizer.decode([i for token, run in runs for i in (run[:1] if token in special else run)]))


def question(rollouts: Rollouts, row: int) -> str:
    """Returns the last user message of a prompt, or the whole prompt if it is not a conversation."""
    raw = rollouts.raw_prompts[row] if rollouts.raw_prompts else rollouts.prompts[row]
    if isinstance(raw, str) or not raw:
        return raw or rollouts.prompts[row]
    content = next((m.get("content") for m in reversed(raw) if m.get("role") == "user"), raw[-1].get("content"))
    if isinstance(content, list):  # content blocks, including media
        content = "\n".join(block.get("text") or f"[{block.get('type')}]" for block in content)
    return content or rollouts.prompts[row]


def _padded(rows: Sequence[Sequence[float]], real: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    """Fills the True positions of (B, T) `real` with the rows and all others with `value`."""
    out = torch.full(real.shape, value, dtype=dtype)
    out[real] = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return out


def _first_of_turns(turn_ids: Tensor, count: int) -> Tensor:
    """(B, T) mask of the first `count` tokens of each turn of (B, T) `turn_ids`."""
    places = torch.arange(turn_ids.shape[1])
    begins = torch.ones_like(turn_ids, dtype=torch.bool)
    begins[:, 1:] = turn_ids[:, 1:] != turn_ids[:, :-1]
    start = torch.where(begins, places, 0).cummax(1).values
    return (turn_ids >= 0) & (places - start < count)


def _turn_rewards(owners: Sequence[Trajectory], turn_ids: Tensor) -> dict[str, Tensor]:
    """Places each turn's reward on its last trained token. Empty if there are no turn rewards."""
    if not any(owner.turn_rewards for owner in owners):
        return {}
    rewards = torch.zeros(turn_ids.shape)
    for i, (owner, row) in enumerate(zip(owners, turn_ids.tolist(), strict=True)):
        last = {turn: t for t, turn in enumerate(row) if turn >= 0}
        for turn, t in last.items():
            rewards[i, t] = owner.turn_rewards[turn] if turn < len(owner.turn_rewards) else 0.0
    return {ENVIRONMENT: rewards}


def _shown(
    name: str, empty: Callable[[], Any], prompts: Sequence[Prompts], of_group: Sequence[int], rows: Sequence[Any]
) -> list[Any]:
    """Returns `inputs` or `media` of each sequence, or of its prompt. Empty if none has any."""
    if not getattr(prompts[0], name) and all(getattr(row, name) is None for row in rows):
        return []
    of_prompts = [found[0] if (found := getattr(prompt, name)) else empty() for prompt in prompts]
    own = [getattr(row, name) for row in rows]
    return [of_prompts[p] if shown is None else shown for p, shown in zip(of_group, own, strict=True)]


def trajectory_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Returns the fraction of trajectories per stop reason and the means of their metrics."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    reasons = Counter(trajectory.stop_reason for trajectory in trajectories)
    metrics = {f"rollout/stop_{reason}": reasons[reason] / len(trajectories) for reason in get_args(StopReason)}
    for name in sorted({name for trajectory in trajectories for name in trajectory.metrics}):
        values = [trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics]
        metrics[f"rollout/{name}"] = mean(values)
    return metrics

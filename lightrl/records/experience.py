"""Rollouts with log-probs, values, and advantages: what the losses read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrl.records.rollouts import RowBatch, SupervisedBatch
from lightrl.records.sampling import Routes, Support


@dataclass
class Experience(RowBatch):
    """What the losses need: rollouts with log-probs, values and advantages. All (B, T) float32 unless said.

    Attributes:
        token_ids, attention_mask, response_mask, group_ids, trajectory_ids, turn_ids, temperature, supports, inputs: as
            in `Rollouts`. All log-probs and entropies here are over what `supports` left.
        routes: as in `Rollouts`.
        old_logprobs: log-probs under the policy that starts the update; None when there is exactly one update per
            rollout, where they equal the current ones and are not computed twice.
        ref_logprobs: log-probs under the reference; None without one.
        teacher_logprobs: log-probs under each row's teacher; None without one.
        teacher_numbers: (B,) int64, index of each row's teacher; None where full distributions are not compared.
        engine_logprobs: as in `Rollouts`.
        advantages: 0 off the mask.
        teacher_top_ids: (B, T, K) int64 on the host, a served teacher's top-K tokens at each position, or None.
        teacher_top_logprobs: (B, T, K) on the host, their log-probs.
        teacher_prompts: B lists of token ids that the teacher reads in place of what comes before the first sampled
            token; empty where it reads the same.
        values: critic's values at the start of the update; None without critic.
        returns: targets for the critic; None without critic.
        rewards: (B,) sequence rewards after shaping; valid: (B,) bool, False where no reward function scored.
        normalizer: what summed policy losses of a micro-batch are divided by: the aggregation's count over the whole
            optimizer batch, all micro-batches and ranks, divided by the number of ranks (which average gradients).
        token_normalizer: the same for losses that are means over tokens (the critic's).
        num_trained: tokens of all ranks in the optimizer batch that some loss is over, supervised ones too; the update
            is skipped where there are none.
        metrics: scalars of the making, already reduced over ranks.
        entropy: entropies of the policy that starts the update; None where nothing uses them.
        loss_weights: weight of each token's policy loss, of the whole mini-batch before it is cut; None before that.
        supervised: this mini-batch's share of `Rollouts.supervised`.
    """

    attention_mask: Tensor
    response_mask: Tensor
    group_ids: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    rewards: Tensor
    valid: Tensor
    temperature: float = 1.0
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_numbers: Tensor | None = None
    teacher_top_ids: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None
    teacher_prompts: list[list[int]] = field(default_factory=list)
    values: Tensor | None = None
    returns: Tensor | None = None
    normalizer: float = 1.0
    token_normalizer: float = 1.0
    num_trained: int = 1
    inputs: list[dict[str, Any]] = field(default_factory=list)
    supports: list[Support | None] = field(default_factory=list)
    routes: list[Routes | None] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    entropy: Tensor | None = None
    loss_weights: Tensor | None = None
    supervised: SupervisedBatch | None = None
    trajectory_ids: Tensor = None  # type: ignore[assignment]  # filled in below
    turn_ids: Tensor | None = None

    def __post_init__(self) -> None:
        if self.trajectory_ids is None:
            self.trajectory_ids = torch.arange(len(self), device=self.token_ids.device)

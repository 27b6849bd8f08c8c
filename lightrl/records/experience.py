"""Rollouts with log-probs, values, and advantages, and the micro-batches used for losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrl.records.rollouts import RowBatch, SupervisedBatch, per_row, per_token
from lightrl.records.sampling import Routes, Support


@dataclass
class ModelOutputs:
    """Outputs of the module's models on a rollout, before its updates. All (B, T) float32, 0 outside the mask.

    Attributes:
        old_logprobs: Log-probs of the policy that starts the updates. None if exactly one update follows, whose own
            log-probs are the old ones.
        ref_logprobs: Log-probs of the reference. None without one.
        values: Values of the critic. None without a critic.
        entropy: Entropy of the policy that starts the updates. None if unused.
        token_extras: Additional (B, T, ...) tensors by name, copied to `Experience.token_extras`.
        row_extras: Additional (B, ...) tensors or lists of B by name, copied to `Experience.row_extras`.
    """

    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    entropy: Tensor | None = None
    token_extras: dict[str, Tensor] = field(default_factory=dict)
    row_extras: dict[str, Any] = field(default_factory=dict)


@dataclass
class Advantages:
    """Result of `compute_advantages`.

    Attributes:
        advantages: (B, T) float32, 0 outside the response mask, before whitening and clipping.
        returns: (B, T) float32 targets for the critic. None without one.
        rewards: (B,) float32 finite sequence rewards.
        valid: (B,) bool, False on rows without a reward, which are excluded from all losses.
    """

    advantages: Tensor
    returns: Tensor | None
    rewards: Tensor
    valid: Tensor


@dataclass
class Experience(RowBatch):
    """Rollouts with log-probs, values, and advantages: everything that an update reads.

    Attributes:
        token_ids, attention_mask, group_ids, trajectory_ids, turn_ids, engine_logprobs: As in `Rollouts`.
        temperature, supports, routes, inputs: As in `Rollouts`. Log-probs and entropies are over the tokens in
            `supports`.
        response_mask: (B, T) bool, True on trained tokens. Excludes rows without a reward and, if the module masks
            them, truncated rows.
        advantages: (B, T) float32, 0 outside the mask.
        rewards: (B,) float32 sequence rewards after shaping, 0 on rows that are not `valid`.
        valid: (B,) bool, False on rows without a reward.
        old_logprobs: (B, T) log-probs. None if exactly one update follows, see `ModelOutputs`.
        ref_logprobs: (B, T) log-probs of the reference. None without one.
        values: (B, T) values of the critic at the start of the updates. None without a critic.
        returns: (B, T) targets for the critic. None without a critic.
        entropy: (B, T) entropy of the policy that starts the updates. None if unused.
        in_policy_loss: (B, T) bool, True on tokens whose policy loss has a gradient. None for all masked tokens. Other
            tokens still count in the normalizer, the KL penalty, the entropy bonus, and the critic's loss.
        is_stale: Whether the rows were sampled by older weights than those that start the updates.
        token_extras: Additional (B, T, ...) tensors by name, which follow their rows into micro-batches.
        row_extras: Additional (B, ...) tensors or lists of B by name, which follow their rows into micro-batches.
        supervised: Examples of the supervised loss (`ptx_coef`). None without one.
        metrics: Scalars measured while creating the experience, reduced over ranks.
    """

    attention_mask: Tensor = per_token()
    response_mask: Tensor = per_token()
    group_ids: Tensor = per_row()
    engine_logprobs: Tensor = per_token()
    advantages: Tensor = per_token()
    rewards: Tensor = per_row()
    valid: Tensor = per_row()
    temperature: float = 1.0
    old_logprobs: Tensor | None = per_token(default=None)
    ref_logprobs: Tensor | None = per_token(default=None)
    values: Tensor | None = per_token(default=None)
    returns: Tensor | None = per_token(default=None)
    entropy: Tensor | None = per_token(default=None)
    in_policy_loss: Tensor | None = per_token(default=None)
    is_stale: bool = False
    inputs: list[dict[str, Any]] = per_row(default_factory=list)
    supports: list[Support | None] = per_row(default_factory=list)
    routes: list[Routes | None] = per_row(default_factory=list)
    trajectory_ids: Tensor = per_row(default=None)  # filled in below
    turn_ids: Tensor | None = per_token(default=None)
    token_extras: dict[str, Tensor] = per_token(default_factory=dict)
    row_extras: dict[str, Any] = per_row(default_factory=dict)
    supervised: SupervisedBatch | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.trajectory_ids is None:
            self.trajectory_ids = torch.arange(len(self), device=self.token_ids.device)


@dataclass
class MicroBatch:
    """Sequences of one forward/backward pass, with weights that make micro-batch losses sum to the mini-batch loss.

    Attributes:
        rows: b sequences, cropped to their longest.
        policy_weights: (b, T) float32 weights of the policy loss: those of the aggregation, divided by its count over
            the whole mini-batch on all ranks. None for supervised examples.
        token_weight: Weight of each token in token-mean losses: 1 / tokens of the whole mini-batch.
    """

    rows: Experience | SupervisedBatch
    policy_weights: Tensor | None
    token_weight: float

    def total(self, losses: Mapping[str, Tensor], only: str | None = None) -> Tensor:
        """Computes the scalar loss: `policy` weighted by the aggregation, every other loss as a mean over tokens.

        Args:
            losses: (b, T) token losses by name. Values outside the response mask are ignored.
            only: Name of the only loss to count. The others keep their graph, so that every rank runs the same backward
                pass. Defaults to all.

        Raises:
            ValueError: A loss is not per token. A mean inside `compute_loss` would grow with the number of
                micro-batches.
        """
        mask = self.rows.response_mask
        total = torch.zeros((), device=mask.device)
        for name, loss in losses.items():
            if not isinstance(loss, Tensor) or loss.shape != mask.shape:
                found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(
                    f"compute_loss: the loss {name!r} has {found}, but tokens have shape {tuple(mask.shape)}. Return "
                    "one loss per token; LightRL averages them over the whole mini-batch."
                )
            on_mask = torch.where(mask, loss, torch.zeros_like(loss))
            weighs_tokens = name != "policy" or self.policy_weights is None
            weights: Any = self.token_weight if weighs_tokens else self.policy_weights
            total = total + (1.0 if only in (None, name) else 0.0) * (weights * on_mask).sum()
        return total

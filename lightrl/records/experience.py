"""Rollouts with log-probs, values, and advantages, and the micro-batches that losses are computed on."""

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
    """Forward passes of the module's models over a rollout, before its updates. All (B, T) float32, 0 off the mask.

    Attributes:
        old_logprobs: Log-probs under the policy that starts the updates. None if the module knows that it makes
            exactly one update of the rollout, where the update's own log-probs are the old ones.
        ref_logprobs: Log-probs under the reference; None without one.
        values: The critic's values; None without a critic.
        entropy: Entropy of the policy that starts the updates; None if nothing uses it.
        token_extras: Further tensors of a subclass, name -> (B, T, ...), copied into `Experience.token_extras`.
        row_extras: The same per row: (B, ...) tensors or lists of B, copied into `Experience.row_extras`.
    """

    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    entropy: Tensor | None = None
    token_extras: dict[str, Tensor] = field(default_factory=dict)
    row_extras: dict[str, Any] = field(default_factory=dict)


@dataclass
class Advantages:
    """What `compute_advantages` returns.

    Attributes:
        advantages: (B, T) float32, 0 off the response mask, before whitening and clipping.
        returns: (B, T) float32, targets for the critic; None without one.
        rewards: (B,) float32, the sequence rewards behind them, finite.
        valid: (B,) bool, False for rows without a reward, which are in no loss.
    """

    advantages: Tensor
    returns: Tensor | None
    rewards: Tensor
    valid: Tensor


@dataclass
class Experience(RowBatch):
    """Rollouts with log-probs, values, and advantages: everything that an update reads. Complete when it is made.

    Attributes:
        token_ids, attention_mask, group_ids, trajectory_ids, turn_ids, engine_logprobs: As in `Rollouts`.
        temperature, supports, routes, inputs: As in `Rollouts`. Log-probs and entropies are over what `supports` left.
        response_mask: (B, T) bool, the sampled tokens that are trained: rows without a reward are out, as are
            truncated ones if the module masks them.
        advantages: (B, T) float32, 0 off the mask.
        rewards: (B,) float32, sequence rewards after shaping; 0 where not `valid`.
        valid: (B,) bool, False for rows without a reward.
        old_logprobs: (B, T); None if exactly one update follows, see `ModelOutputs`.
        ref_logprobs: (B, T) under the reference; None without one.
        values: (B, T) of the critic at the start of the updates; None without a critic.
        returns: (B, T) targets for the critic; None without a critic.
        entropy: (B, T) of the policy that starts the updates; None if nothing uses it.
        in_policy_loss: (B, T) bool, tokens whose policy loss has a gradient; None for all on the mask. The others still
            count in the normalizer, and KL, entropy bonus, and critic see them.
        is_stale: Whether older weights than those that start the updates sampled the rows.
        token_extras: name -> (B, T, ...) tensors of a subclass or callback. They follow their rows into micro-batches.
        row_extras: name -> (B, ...) tensors or lists of B, in the same way.
        supervised: Rows of the second, supervised loss (`ptx_coef`); None without one.
        metrics: Scalars measured while the experience was made, reduced over ranks.
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
    """Rows of one forward and backward pass, with the weights that make micro-batch losses add up to the mini-batch's.

    Attributes:
        rows: b rows, cropped to their longest.
        policy_weights: (b, T) float32, weight of each token's policy loss: the aggregation's, divided by its count over
            the whole mini-batch, all micro-batches and ranks. None for supervised rows.
        token_weight: Weight of each token in losses that are means over tokens: 1 / tokens of the whole mini-batch.
    """

    rows: Experience | SupervisedBatch
    policy_weights: Tensor | None
    token_weight: float

    def total(self, losses: Mapping[str, Tensor], only: str | None = None) -> Tensor:
        """The scalar loss: the `policy` term weighted by the aggregation, every other term a mean over tokens.

        Args:
            losses: name -> (b, T) losses per token; values off the response mask don't count.
            only: The one term that counts; the others keep their graph, so that every wrapper sees the same backward.

        Raises:
            ValueError: a term isn't one loss per token. A mean inside `compute_loss` would grow with the number of
                micro-batches.
        """
        if not isinstance(losses, Mapping):
            found = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"compute_loss: returned {found}. Return a dictionary, name -> (b, T) losses, and metrics."
            )
        mask = self.rows.response_mask
        total = torch.zeros((), device=mask.device)
        for name, loss in losses.items():
            if not isinstance(loss, Tensor) or loss.shape != mask.shape:
                found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(
                    f"compute_loss: the loss {name!r} has {found} for tokens of shape {tuple(mask.shape)}. Return one "
                    "loss per token; LightRL averages them over the whole mini-batch."
                )
            on_mask = torch.where(mask, loss, torch.zeros_like(loss))
            weighs_tokens = name != "policy" or self.policy_weights is None
            weights: Any = self.token_weight if weighs_tokens else self.policy_weights
            total = total + (1.0 if only in (None, name) else 0.0) * (weights * on_mask).sum()
        return total

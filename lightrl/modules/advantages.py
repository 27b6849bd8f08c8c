"""Advantage estimators: what a token is credited with, from rewards and nothing the policy's gradient flows through.

Letters: B sequences, T tokens, G sequences per group (the completions of one prompt). The *score* of a sequence is the
sum of its token rewards: the reward on its last token, less the KL of its tokens where the KL is in the reward.

| class | advantage | scope |
|---|---|---|
| `GAE` | temporal differences with a critic | group |
| `Reinforce` | discounted return | group |
| `GroupNorm` | (score - group mean) / std | group, batch for `scale="batch"` |
| `RLOO` | score - mean of the others | group, batch for `normalize` |
| `OPO` | score - length-weighted group mean | group |
| `MaxRL` | (score - group mean) / group mean | group |
| `PassAtK` | what the sample adds to pass@k | group |
| `GDPO` | each reward part normalised in its group, summed, normalised over the batch | batch |
| `ReinforcePlusPlus` | return, normalised over the batch | batch |
| `ReinforcePlusPlusBaseline` | score - group mean, normalised over the batch | batch |
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.modules.estimator import AdvantageEstimator, clean, fraction
from lightrl.modules.group_advantages import GDPO, OPO, RLOO, GroupNorm, MaxRL, PassAtK, ReinforcePlusPlusBaseline
from lightrl.ops.advantages import gae, returns_to_go
from lightrl.ops.masking import AllSum, identity, masked_whiten

__all__ = [
    "GAE",
    "GDPO",
    "OPO",
    "RLOO",
    "AdvantageEstimator",
    "GroupNorm",
    "MaxRL",
    "PassAtK",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
]


class GAE(AdvantageEstimator):
    """Generalised advantage estimation: `A_t = sum_l (gamma * lam)**l * delta_{t+l}`; returns are `A + V`.

    Counts sampled tokens only: tokens off the mask inside a response are skipped. Rows that are not valid get returns
    equal to their values, which leave an unclipped critic where it is.

    Args:
        gamma: discount per token, in [0, 1]; 1 for a reward at the end of a text.
        lam: in [0, 1]; 1 is the return minus V (no bias from the critic), 0 the one-step difference.

    Raises:
        ValueError: an argument is out of range; on call, `values` is missing.

    Source: https://arxiv.org/abs/1506.02438; see `lightrl.ops.advantages.gae` for how others differ.
    """

    needs_critic = True

    def __init__(self, gamma: float = 1.0, lam: float = 0.95) -> None:
        self.gamma = fraction("GAE", "gamma", gamma)
        self.lam = fraction("GAE", "lam", lam)

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        groups: Tensor,
        *,
        values: Tensor | None = None,
        valid: Tensor | None = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor]:
        if values is None:
            raise ValueError("GAE: values=None: it needs a critic. Give the module one, or use RLOO or GroupNorm.")
        rewards, valid = clean(rewards, mask, valid)
        advantages, returns = gae(rewards, values, mask, self.gamma, self.lam)
        keep = mask & valid[:, None]
        zero = torch.zeros_like(advantages)
        return torch.where(keep, advantages, zero), torch.where(keep, returns, torch.where(mask, values, zero))


class Reinforce(AdvantageEstimator):
    """The discounted sum of the rewards from each token on, without a baseline: `A_t = r_t + gamma * A_{t+1}`.

    Args:
        gamma: discount per sampled token, in [0, 1].

    Raises:
        ValueError: gamma is out of range.

    Source: https://doi.org/10.1007/BF00992696.
    """

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = fraction("Reinforce", "gamma", gamma)

    def __call__(
        self, rewards: Tensor, mask: Tensor, groups: Tensor, *, valid: Tensor | None = None, **unused: object
    ) -> tuple[Tensor, None]:
        rewards, _ = clean(rewards, mask, valid)
        return returns_to_go(rewards, mask, self.gamma), None


class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE with the KL in the reward and one normalisation over all tokens of all ranks.

        A_t = (R_t - mean) / (std + 1e-8),    R_t the discounted return from token t on

    Args:
        gamma: discount per sampled token, in [0, 1].

    Raises:
        ValueError: gamma is out of range.

    Source: https://arxiv.org/abs/2501.03262, eq. 7-9. LightRFT's `reinforce++` raises; verl and TRL-based ones
        normalise on one rank.
    """

    scope = "batch"
    normalizes = True

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = fraction("ReinforcePlusPlus", "gamma", gamma)

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        groups: Tensor,
        *,
        valid: Tensor | None = None,
        all_sum: AllSum = identity,
        **unused: object,
    ) -> tuple[Tensor, None]:
        rewards, valid = clean(rewards, mask, valid)
        returns = returns_to_go(rewards, mask, self.gamma)
        return masked_whiten(returns, mask & valid[:, None], all_sum=all_sum), None

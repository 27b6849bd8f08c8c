"""The Bradley-Terry likelihood of preferences."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, *, centering_coef: float = 0.0
) -> Tensor:
    """Negative log-likelihood of each preference, and a pull of the scores towards 0.

        loss = -log sigmoid(r_c - r_r - m) + c (r_c + r_r)^2

    Args:
        chosen: (P,) scores r_c of the preferred completions.
        rejected: (P,) scores r_r of the others.
        margin: (P,) m, how much better the preferred one is, in units of score; None is 0.
        centering_coef: c, at least 0. The likelihood knows differences only; this term settles the sum.

    Returns:
        (P,) losses, not averaged.

    Source: the likelihood is that of Ouyang et al. 2022, https://arxiv.org/abs/2203.02155 (eq. 1), the margin that of
    Llama 2, https://arxiv.org/abs/2307.09288 (eq. 2), the centering that of Eisenstein et al. 2023,
    https://arxiv.org/abs/2312.09244. Pairs are not averaged per prompt: each counts once, wherever it comes from.
    """
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    loss = -F.logsigmoid(difference)
    if centering_coef:
        loss = loss + centering_coef * (chosen + rejected) ** 2
    return loss

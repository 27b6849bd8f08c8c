"""Divergences between the student's and the teacher's next-token distributions.

With p the student's and q the teacher's distribution for the same prefix, m = beta q + (1 - beta) p, and
w(l)_j = p_j (l_j - sum_i p_i l_i):

| class | value | gradient w.r.t. the student's logits |
|---|---|---|
| `ReverseKL` | `sum_j p_j log(p_j / q_j)` | `w(log(p / q))` |
| `ForwardKL` | `sum_j q_j log(q_j / p_j)` | `p - q` |
| `JensenShannon` | `beta KL(q, m) + (1 - beta) KL(p, m)` | `(1 - beta) w(log(p / m))` |

All are nonnegative, and 0 only if p = q.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Divergence(ABC):
    """Divergence between two distributions over the same vocabulary."""

    @abstractmethod
    def __call__(self, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        """Computes the (M,) divergence of each token, in nats and at least 0, differentiable in `logprobs`.

        Both are (M, V) and finite. Those of the student have a graph, those of the teacher don't.
        """


class ReverseKL(Divergence):
    """Reverse KL, KL(student || teacher): mode-seeking, the student avoids what the teacher finds unlikely.

    With an additional reward r in one step, the optimum is `pi ~ pi_teacher * exp(r / coef)`.

    Source: https://arxiv.org/abs/2306.08543, eq. 1.
    """

    def __call__(self, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        return (logprobs.exp() * (logprobs - teacher_logprobs)).sum(-1)


class ForwardKL(Divergence):
    """Forward KL, KL(teacher || student): mass-covering, the student covers all that the teacher finds likely.

    Source: https://arxiv.org/abs/1503.02531; on the student's own samples: https://arxiv.org/abs/2306.13649.
    """

    def __call__(self, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        return (teacher_logprobs.exp() * (teacher_logprobs - logprobs)).sum(-1)


class JensenShannon(Divergence):
    """Generalized Jensen-Shannon divergence. At most `log 2` if beta is 0.5.

    Divided by beta, it approaches the forward KL as beta goes to 0. Divided by 1 - beta, it approaches the reverse KL
    as beta goes to 1.

    Args:
        beta: Weight of the teacher in the mixture, in (0, 1).

    Source: GKD, https://arxiv.org/abs/2306.13649, eq. 1. TRL uses beta 0 and 1 for the two KLs, which are classes here.
    """

    def __init__(self, beta: float = 0.5) -> None:
        self.beta = beta

    def __call__(self, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        of_teacher, of_student = teacher_logprobs + math.log(self.beta), logprobs + math.log1p(-self.beta)
        mixture = torch.logaddexp(of_teacher, of_student)
        forward = (teacher_logprobs.exp() * (teacher_logprobs - mixture)).sum(-1)
        reverse = (logprobs.exp() * (logprobs - mixture)).sum(-1)
        return self.beta * forward + (1 - self.beta) * reverse

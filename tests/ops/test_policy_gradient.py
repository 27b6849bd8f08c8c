"""The gradient of each estimator on an enumerable two-token policy is the exact policy gradient: a z-test.

Policy: softmax tables, 3 actions, first token from `first` (3 logits), second from the row of `second` (3 x 3) of the
first action: 12 parameters, 9 sequences. Samples are drawn in many independent chunks; each chunk's gradient, through
estimator, loss and aggregation, is one draw, so z = (mean - exact) / (std / sqrt(chunks)) is normal, parameter by
parameter.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightrl.objectives import (
    CISPO,
    CPG,
    DPPO,
    GAE,
    OPO,
    RLOO,
    SAPO,
    VESPO,
    AdvantageEstimator,
    AdvantageInput,
    GroupRelative,
    KLInReward,
    LossInput,
    MaxRL,
    PolicyLoss,
    PPOClip,
    Reinforce,
    RLOOSequence,
    SequenceMean,
    SequenceSum,
)

K, G, BETA = 3, 4, 0.3
SEQUENCES = torch.tensor(list(itertools.product(range(K), range(K))))
torch.manual_seed(0)
FIRST, SECOND = torch.randn(K, dtype=torch.float64), torch.randn(K, K, dtype=torch.float64)
REF_FIRST, REF_SECOND = torch.randn(K, dtype=torch.float64), torch.randn(K, K, dtype=torch.float64)
REWARDS = torch.randn(K * K, dtype=torch.float64) + 1.0


def token_logprobs(first: Tensor, second: Tensor, actions: Tensor) -> Tensor:
    """(B, 2) log-probs of (B, 2) actions."""
    one = first.log_softmax(0)[actions[:, 0]]
    two = second.log_softmax(1)[actions[:, 0], actions[:, 1]]
    return torch.stack([one, two], 1)


def flat_gradient(value: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([x.flatten() for x in torch.autograd.grad(value, [first, second])])


def exact_gradient(rewards: Tensor, beta: float) -> Tensor:
    """Of E[reward] - beta * KL(pi || ref) over whole sequences, by enumeration."""
    first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
    logp = token_logprobs(first, second, SEQUENCES).sum(1)
    ref = token_logprobs(REF_FIRST, REF_SECOND, SEQUENCES).sum(1)
    return flat_gradient((logp.exp() * (rewards - beta * (logp - ref))).sum(), first, second)


def true_values(rewards: Tensor) -> Tensor:
    """(9, 2): V before the first and before the second token of each sequence."""
    second = SECOND.softmax(1)
    after_first = (second * rewards.view(K, K)).sum(1)
    start = (FIRST.softmax(0) * after_first).sum()
    return torch.stack([start.expand(K * K), after_first[SEQUENCES[:, 0]]], 1)


def sampled_gradients(
    estimator: AdvantageEstimator, loss: PolicyLoss, rewards: Tensor, beta: float, values: Tensor | None, chunks: int
) -> Tensor:
    """(chunks, 12) ascent gradients, each from 32 groups of G sequences."""
    torch.manual_seed(1)
    groups = torch.arange(32).repeat_interleave(G)
    mask = torch.ones(len(groups), 2, dtype=torch.bool)
    aggregation = SequenceMean() if isinstance(loss, RLOOSequence) else SequenceSum()
    probabilities = token_logprobs(FIRST, SECOND, SEQUENCES).sum(1).exp()
    draws = torch.multinomial(probabilities, chunks * len(groups), replacement=True).view(chunks, -1)
    first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
    out = []
    for rows in draws:
        logprobs = token_logprobs(first, second, SEQUENCES[rows])
        old, ref = logprobs.detach(), token_logprobs(REF_FIRST, REF_SECOND, SEQUENCES[rows])
        token_rewards = torch.stack([torch.zeros_like(rewards[rows]), rewards[rows]], 1)
        token_rewards = token_rewards - beta * KLInReward()(old, ref)
        v = None if values is None else values[rows]
        advantages, _ = estimator(AdvantageInput(token_rewards, mask, groups, values=v))
        token_loss, _ = loss(LossInput(logprobs, old, advantages, mask))
        total = (aggregation.weights(mask) * token_loss).sum() / aggregation.count(mask)
        out.append(-flat_gradient(total, first, second))
    return torch.stack(out)


def assert_unbiased(samples: Tensor, exact: Tensor) -> None:
    error = samples.std(0) / len(samples) ** 0.5
    z = (samples.mean(0) - exact) / error
    assert z.abs().max() < 4, f"z scores {z.tolist()}"
    assert error.norm() < 0.08 * exact.norm(), "enough samples for a wrong gradient to show"


ZERO = torch.zeros(K * K, 2, dtype=torch.float64)
CASES = {
    # estimator, values, factor of the exact gradient
    "GAE, true values": (GAE(1.0, 0.95), true_values(REWARDS), 1.0),
    "GAE, true values, lam 0": (GAE(1.0, 0.0), true_values(REWARDS), 1.0),
    "GAE, no critic's help": (GAE(1.0, 1.0), ZERO, 1.0),
    "RLOO": (RLOO(), None, 1.0),
    "REINFORCE": (Reinforce(), None, 1.0),
    # the group mean holds the row's own score: E[A grad log pi] is (1 - 1 / G) of the gradient
    "GroupRelative, not scaled": (GroupRelative("none"), None, 1 - 1 / G),
    "OPO": (OPO(), None, 1 - 1 / G),
}


@pytest.mark.parametrize("name", CASES)
def test_estimator_is_unbiased(name: str) -> None:
    estimator, values, factor = CASES[name]
    samples = sampled_gradients(estimator, PPOClip(), REWARDS, 0.0, values, 250)
    assert_unbiased(samples, factor * exact_gradient(REWARDS, 0.0))


@pytest.mark.parametrize("name", ["RLOO", "REINFORCE", "GroupRelative, not scaled", "GAE, no critic's help"])
def test_kl_in_the_reward_has_the_gradient_of_the_sequence_kl(name: str) -> None:
    estimator, values, factor = CASES[name]
    samples = sampled_gradients(estimator, PPOClip(), REWARDS, BETA, values, 250)
    assert_unbiased(samples, factor * exact_gradient(REWARDS, BETA))


@pytest.mark.parametrize(
    "loss", [RLOOSequence(), CISPO(), SAPO(), CPG(), VESPO(), DPPO()], ids=lambda x: type(x).__name__
)
def test_losses_agree_on_policy(loss: PolicyLoss) -> None:
    """On-policy every loss has the gradient of -A log pi (GSPO and GMPO up to the sequence's length)."""
    samples = sampled_gradients(RLOO(), loss, REWARDS, 0.0, None, 150)
    plain = sampled_gradients(RLOO(), PPOClip(), REWARDS, 0.0, None, 150)
    assert torch.allclose(samples, plain, atol=1e-12)


def test_maxrl_climbs_the_truncated_log_likelihood() -> None:
    """E[gradient] is that of sum_{k=1}^{G-1} 1/k * pass@k = -sum 1/k * (1 - p)^k + const."""
    wins = REWARDS.gt(REWARDS.median()).double()
    first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
    p = (token_logprobs(first, second, SEQUENCES).sum(1).exp() * wins).sum()
    exact = flat_gradient(-sum((1 - p) ** k / k for k in range(1, G)), first, second)
    assert_unbiased(sampled_gradients(MaxRL(), PPOClip(), wins, 0.0, None, 250), exact)

"""Where each pair of advantage and KL placement leads on a one-token bandit: exact expectations, gradient ascent.

For estimators that look at groups, the expectation is over all K^G groups of actions, weighted by their probability;
for large groups, over one group whose counts are the policy's probabilities. Nothing is sampled, so the policy that
gradient ascent ends at is the fixed point itself, and its distance to the closed form is a test of the algebra.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightrl.objectives import (
    CISPO,
    CPG,
    GAE,
    GMPO,
    GSPO,
    OPO,
    RLOO,
    SAPO,
    VESPO,
    AdvantageEstimator,
    AdvantageInput,
    GroupRelative,
    KLInLoss,
    KLInReward,
    KLPenalty,
    LossInput,
    PolicyLoss,
    PPOClip,
    Reinforce,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RLOOSequence,
)

G = 3
BETA = 0.2
R = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
REF = torch.tensor([0.05, 0.5, 0.45], dtype=torch.float64)
GROUP_ACTIONS = torch.tensor(list(itertools.product(range(len(R)), repeat=G)))  # (K^G, G)


def tempered(beta: float) -> Tensor:
    """pi ~ pi_ref * exp(r / beta)."""
    return (REF.log() + R / beta).softmax(0)


def forward_kl_optimum(beta: float, rewards: Tensor = R) -> Tensor:
    """pi = beta * pi_ref / (lambda - r) with lambda > max r such that it sums to 1, by bisection."""
    low, high = float(rewards.max()), float(rewards.max()) + beta
    for _ in range(200):
        middle = (low + high) / 2
        total = float((beta * REF / (middle - rewards)).sum())
        low, high = (middle, high) if total > 1 else (low, middle)
    return beta * REF / (high - rewards)


def tv(p: Tensor, q: Tensor) -> float:
    return 0.5 * float((p - q).abs().sum())


def objective(
    logits: Tensor, estimator: AdvantageEstimator, loss: PolicyLoss, kl: KLPenalty, population: int | None, beta: float
) -> Tensor:
    """Expected loss of one on-policy update."""
    logp = logits.log_softmax(0)
    pi = logp.detach().exp()
    if population is None:
        actions = GROUP_ACTIONS
        weights = pi[actions].prod(1, keepdim=True).expand(-1, G) / G
        groups = torch.arange(len(actions)).repeat_interleave(G)
        actions, weights = actions.flatten(), weights.flatten()
    else:
        counts = (pi * population).round().long().clamp(min=1)
        actions = torch.arange(len(R)).repeat_interleave(counts)
        weights = pi[actions] / counts[actions]
        groups = torch.zeros_like(actions)
    logprobs = logp[actions][:, None]
    old, ref = logprobs.detach(), REF.log()[actions][:, None]
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    rewards = R[actions][:, None]
    values = (pi * R).sum().expand_as(rewards)
    if isinstance(kl, KLInReward):
        rewards = rewards - beta * kl(old, ref)
    advantages, _ = estimator(AdvantageInput(rewards, mask, groups, values=values))
    token_loss, _ = loss(LossInput(logprobs, old, advantages, mask))
    if isinstance(kl, KLInLoss):
        token_loss = token_loss + beta * kl(logprobs, old, ref)
    return (weights[:, None] * token_loss).sum()


def ascend(
    estimator: AdvantageEstimator,
    kl: KLPenalty,
    loss: PolicyLoss | None = None,
    population: int | None = None,
    beta: float = BETA,
) -> Tensor:
    """The policy that gradient ascent from the reference ends at."""
    logits = REF.log().clone().requires_grad_()
    steps = 220
    optimizer = torch.optim.Adam([logits], lr=0.2, betas=(0.8, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    for _ in range(steps):
        optimizer.zero_grad()
        objective(logits, estimator, loss or PPOClip(), kl, population, beta).backward()
        optimizer.step()
        schedule.step()
    return logits.detach().softmax(0)


def self_consistent(advantage_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Solves pi ~ pi_ref * exp(h(pi) / beta) by damped iteration; h is written without any code under test."""
    pi = REF
    for _ in range(300):
        pi = 0.9 * pi + 0.1 * (REF.log() + advantage_of(pi) / BETA).softmax(0)
    return pi


def group_std_advantage(pi: Tensor) -> Tensor:
    """E[(r_1 - mean) / (std + eps) | a_1 = a] over groups of G, the others drawn from pi."""
    out = []
    for a in range(len(R)):
        total = 0.0
        for others in itertools.product(range(len(R)), repeat=G - 1):
            rewards = [float(R[i]) for i in (a, *others)]
            weight = math.prod(float(pi[i]) for i in others)
            total += weight * (rewards[0] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)
        out.append(total)
    return torch.tensor(out, dtype=torch.float64)


@functools.cache
def group_std_optimum() -> Tensor:
    return self_consistent(group_std_advantage)


UNBIASED: dict[str, AdvantageEstimator] = {"GAE": GAE(), "Reinforce": Reinforce(), "RLOO": RLOO()}
MEAN_BASELINE: dict[str, AdvantageEstimator] = {"GroupRelative none": GroupRelative("none"), "OPO": OPO()}
REVERSE = {
    "k2 in loss": KLInLoss("k2"),
    "k3 in loss, ratio": KLInLoss("k3", ratio_correction=True),
    "k1 in loss, ratio": KLInLoss("k1", ratio_correction=True),
    "k2 in loss, ratio": KLInLoss("k2", ratio_correction=True),
}


def test_the_optima_are_apart() -> None:
    points = [
        tempered(BETA),
        forward_kl_optimum(BETA),
        tempered(BETA * G / (G - 1)),
        group_std_optimum(),
    ]
    for p, q in itertools.combinations([*points, REF], 2):
        assert tv(p, q) > 0.1
    assert forward_kl_optimum(BETA).sum().item() == pytest.approx(1)


@pytest.mark.parametrize("name", [*UNBIASED, *MEAN_BASELINE, "GroupRelative group"])
def test_k1_in_the_reward_leads_to_the_reverse_kl_optimum(name: str) -> None:
    """With any baseline and any scale: at the optimum r - beta * k1 is the same for every action, and A is 0."""
    estimator = (UNBIASED | MEAN_BASELINE | {"GroupRelative group": GroupRelative("group")})[name]
    assert tv(ascend(estimator, KLInReward()), tempered(BETA)) < 0.01


@pytest.mark.parametrize("placement", REVERSE)
@pytest.mark.parametrize("name", UNBIASED)
def test_reverse_kl_in_the_loss_leads_to_the_same(name: str, placement: str) -> None:
    assert tv(ascend(UNBIASED[name], REVERSE[placement]), tempered(BETA)) < 0.01


@pytest.mark.parametrize("placement", REVERSE)
@pytest.mark.parametrize("name", MEAN_BASELINE)
def test_a_mean_that_holds_the_row_itself_raises_the_effective_beta(name: str, placement: str) -> None:
    """A is (1 - 1 / G) of r - E[r] while the KL in the loss is whole: beta acts as beta * G / (G - 1)."""
    assert tv(ascend(MEAN_BASELINE[name], REVERSE[placement]), tempered(BETA * G / (G - 1))) < 0.01


@pytest.mark.parametrize("name", UNBIASED)
def test_plain_k3_in_the_loss_leads_to_the_forward_kl_optimum(name: str) -> None:
    assert tv(ascend(UNBIASED[name], KLInLoss("k3")), forward_kl_optimum(BETA)) < 0.01


def test_plain_k3_with_a_group_mean() -> None:
    assert tv(ascend(GroupRelative("none"), KLInLoss("k3")), forward_kl_optimum(BETA * G / (G - 1))) < 0.01


@pytest.mark.parametrize("placement", REVERSE)
def test_group_std_moves_the_optimum(placement: str) -> None:
    """To pi ~ pi_ref * exp(h(a) / beta), h(a) the expected normalised advantage of a under that pi."""
    point = group_std_optimum()
    assert tv(ascend(GroupRelative("group"), REVERSE[placement]), point) < 0.01
    assert tv(point, tempered(BETA)) > 0.1


def test_group_std_with_plain_k3() -> None:
    """GRPO as published: pi = beta * pi_ref / (lambda - h(a)), h under that very pi."""
    point = ascend(GroupRelative("group"), KLInLoss("k3"))
    assert tv(point, forward_kl_optimum(BETA, group_std_advantage(point))) < 0.01
    assert tv(point, forward_kl_optimum(BETA)) > 0.1


LARGE_BATCH: dict[str, AdvantageEstimator] = {
    "GroupRelative group": GroupRelative("group"),
    "GroupRelative batch": GroupRelative("batch"),
    "RLOO normalized": RLOO(normalize=True),
    "REINFORCE++": ReinforcePlusPlus(),
    "REINFORCE++ baseline": ReinforcePlusPlusBaseline(),
}


@pytest.mark.parametrize("name", LARGE_BATCH)
def test_std_of_a_large_batch_divides_beta(name: str) -> None:
    """G and B without bound: pi ~ pi_ref * exp(r / (beta * std)), std that of r under this very pi."""
    beta = 1.5
    point = ascend(LARGE_BATCH[name], KLInLoss("k2"), population=800, beta=beta)
    std = float(((point * R**2).sum() - (point * R).sum() ** 2).sqrt())
    assert std > 0.2, "not collapsed"
    assert tv(point, tempered(beta * std)) < 0.01
    assert tv(point, tempered(beta)) > 0.1


@pytest.mark.parametrize("name", LARGE_BATCH)
def test_std_does_not_matter_with_k1_in_the_reward(name: str) -> None:
    assert tv(ascend(LARGE_BATCH[name], KLInReward(), population=800), tempered(BETA)) < 0.01


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_in_the_reward_lead_elsewhere(estimator: str) -> None:
    """They are taken for constants: at the fixed point r - beta * k(a) is equal over a, which is no KL's optimum."""
    point = ascend(Reinforce(), KLInReward(estimator))  # type: ignore[arg-type]
    assert tv(point, tempered(BETA)) > 0.05


@pytest.mark.parametrize(
    "loss", [GSPO(), RLOOSequence(), GMPO(), CISPO(), SAPO(), CPG(), VESPO()], ids=lambda loss: type(loss).__name__
)
def test_every_loss_has_the_same_optimum_on_policy(loss: PolicyLoss) -> None:
    assert tv(ascend(RLOO(), KLInReward(), loss), tempered(BETA)) < 0.01

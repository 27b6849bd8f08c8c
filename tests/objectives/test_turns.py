"""Credit of turns: by hand, and against the exact policy gradient of a process with a "one more turn" action.

The process: three actions a turn, of which the last asks for one more turn, at most three turns; each turn has its own
softmax table and its own rewards. Groups are drawn many times; a group's gradient is one draw, so
z = (mean - exact) / (std / sqrt(groups)) is normal, parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightrl.objectives import RLOO, AdvantageEstimator, AdvantageInput, GiGPO, TurnGAE, TurnReturns

TURNS, ACTIONS, AGAIN, GROUP = 3, 3, 2, 4
LOGITS = torch.tensor([[0.3, -0.2, 0.5], [-0.4, 0.1, 0.2], [0.6, 0.0, -0.3]], dtype=torch.float64)
REWARDS = torch.tensor([[0.4, -0.3, 0.7], [1.5, 0.2, -0.6], [2.0, -1.0, 0.5]], dtype=torch.float64)
P = LOGITS.softmax(1)
AGAIN_ONCE = float(P[0, AGAIN])


def paths() -> Iterator[list[int]]:
    """The actions of every possible attempt."""
    for first in range(ACTIONS):
        for second in range(ACTIONS) if first == AGAIN else [None]:
            for third in range(ACTIONS) if second == AGAIN else [None]:
                yield [a for a in (first, second, third) if a is not None]


def exact(gamma: float = 1.0, weights: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Tensor:
    """(3, 3) gradient, turn k's by `weights[k]`; each turn answers for its own and for later rewards."""
    gradient = torch.zeros_like(LOGITS)
    for actions in paths():
        chance = torch.stack([P[k, a] for k, a in enumerate(actions)]).prod()
        for k, action in enumerate(actions):
            to_go = sum(gamma**d * REWARDS[k + d, a] for d, a in enumerate(actions[k:]))
            gradient[k] += weights[k] * chance * to_go * (torch.eye(ACTIONS)[action] - P[k])
    return gradient


def attempts(groups: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Actions, rewards, mask and turn numbers, all (B, 3), and groups (B,), of `groups` groups."""
    generator = torch.Generator().manual_seed(seed)
    count = groups * GROUP
    actions = torch.stack([torch.multinomial(P[k], count, True, generator=generator) for k in range(TURNS)], 1)
    goes_on = (actions == AGAIN).cumprod(1).bool()
    mask = torch.cat([torch.ones(count, 1).bool(), goes_on[:, :-1]], 1)
    rewards = torch.stack([REWARDS[k][actions[:, k]] for k in range(TURNS)], 1) * mask
    turn_ids = torch.where(mask, torch.arange(TURNS), -1)
    return actions, rewards, mask, turn_ids, torch.arange(groups).repeat_interleave(GROUP)


def deviations(advantages: Tensor, actions: Tensor, mask: Tensor, expected: Tensor) -> Tensor:
    """(9,) z of the mean gradient over groups."""
    score = torch.eye(ACTIONS, dtype=torch.float64)[actions] - P
    draws = (advantages * mask)[..., None] * score
    draws = draws.view(-1, GROUP, TURNS * ACTIONS).mean(1)
    error = draws.std(0) / len(draws) ** 0.5
    assert float(expected.norm()) > 10 * float(error.max()), "the test could not tell it from no gradient"
    return (draws.mean(0) - expected.flatten()) / error


def run(estimator: AdvantageEstimator, groups: int = 30_000) -> tuple[Tensor, Tensor, Tensor]:
    actions, rewards, mask, turn_ids, group_ids = attempts(groups)
    values = torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64).expand_as(rewards)  # a wrong critic
    anchors = torch.where(turn_ids > 0, 1, 0)  # turns 2 and 3 begin in the same state
    advantages, _ = estimator(
        AdvantageInput(rewards, mask, group_ids, values=values, turn_ids=turn_ids, anchors=anchors)
    )
    return advantages, actions, mask


@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_the_gradient_of_turn_returns_is_the_policy_gradient(gamma: float) -> None:
    assert float(deviations(*run(TurnReturns(gamma)), exact(gamma)).abs().max()) < 4


@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_the_gradient_of_turn_gae_is_the_policy_gradient_with_any_critic(gamma: float) -> None:
    assert float(deviations(*run(TurnGAE(gamma, lam=1.0)), exact(gamma)).abs().max()) < 4


def test_turn_gae_with_the_true_critic_needs_no_lambda_of_one() -> None:
    value = torch.zeros(TURNS + 1, dtype=torch.float64)
    for k in reversed(range(TURNS)):
        value[k] = (P[k] * REWARDS[k]).sum() + P[k, AGAIN] * value[k + 1]
    actions, rewards, mask, turn_ids, groups = attempts(30_000)
    values = value[:TURNS].expand_as(rewards)
    advantages, _ = TurnGAE(lam=0.4)(AdvantageInput(rewards, mask, groups, values=values, turn_ids=turn_ids))
    assert float(deviations(advantages, actions, mask, exact()).abs().max()) < 4


def test_the_gradient_of_gigpo_weighs_states_by_the_chance_that_another_saw_them() -> None:
    """Whole attempts: the exact one. Steps: the first state is everybody's; the other one is seen with 1 - (1-p)^3."""
    seen = 1 - (1 - AGAIN_ONCE) ** (GROUP - 1)
    expected = exact() + 0.5 * exact(weights=(1.0, seen, seen))
    advantages = run(GiGPO(gamma=1.0, step_weight=0.5, scale="none"))
    assert float(deviations(*advantages, expected).abs().max()) < 4
    assert float(deviations(*advantages, 1.5 * exact()).abs().max()) > 4


def test_gigpo_without_steps_is_the_policy_gradient() -> None:
    assert float(deviations(*run(GiGPO(gamma=1.0, step_weight=0.0, scale="none")), exact()).abs().max()) < 4


def test_turn_returns_by_hand() -> None:
    """Returns to go: (3, 2), (1), (0, 0); the second ended after one turn and is compared by that one at both."""
    rewards = torch.tensor([[1.0, 2.0], [1.0, 9.0], [0.0, 0.0], [7.0, 7.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    turn_ids = torch.tensor([[0, 1], [0, -1], [0, 1], [0, 1]])
    valid = torch.tensor([True, True, True, False])
    advantages, _ = TurnReturns()(AdvantageInput(rewards, mask, torch.zeros(4).long(), valid=valid, turn_ids=turn_ids))
    expected = [[2.5, 1.5], [-0.5, 0.0], [-2.0, -1.5], [0.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_with_a_reward_at_the_end_turn_returns_are_rloo() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0], [0.25, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    turn_ids = torch.where(mask, torch.arange(3), -1)
    groups = torch.zeros(3).long()
    expected, _ = RLOO()(AdvantageInput(rewards, mask, groups))
    torch.testing.assert_close(TurnReturns()(AdvantageInput(rewards, mask, groups, turn_ids=turn_ids))[0], expected)


def test_turn_gae_by_hand() -> None:
    """Two turns of two tokens, context between: A_1 = 1 - 0.5, A_0 = 0.25 + 0.5 - 0.2 + 0.5 * A_1."""
    mask = torch.tensor([[False, True, True, False, True, True]])
    turn_ids = torch.tensor([[-1, 0, 0, -1, 1, 1]])
    rewards = torch.tensor([[0.0, 0.0, 0.25, 0.0, 0.0, 1.0]])
    values = torch.tensor([[9.0, 0.2, 9.0, 9.0, 0.5, 9.0]])
    advantages, returns = TurnGAE(lam=0.5)(
        AdvantageInput(rewards, mask, torch.zeros(1).long(), values=values, turn_ids=turn_ids)
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.8, 0.8, 0.0, 0.5, 0.5]]))
    torch.testing.assert_close(returns, torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]]))
    unscored = TurnGAE()(
        AdvantageInput(rewards, mask, torch.zeros(1).long(), values=values, valid=mask[:, 0], turn_ids=turn_ids)
    )
    torch.testing.assert_close(unscored[0], torch.zeros(1, 6))
    torch.testing.assert_close(unscored[1], values * mask)


def test_gigpo_by_hand() -> None:
    """Attempts: 2 and 0, so +-2. State 0: returns 2 and 0; state 1 is seen twice by the first attempt alone."""
    rewards = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    turn_ids = torch.where(mask, torch.arange(3), -1)
    anchors = torch.tensor([[0, 1, 1], [0, 0, 0]])
    groups = torch.zeros(2).long()
    advantages, _ = GiGPO(1.0, scale="none")(AdvantageInput(rewards, mask, groups, turn_ids=turn_ids, anchors=anchors))
    torch.testing.assert_close(advantages, torch.tensor([[4.0, 2.0, 2.0], [-4.0, 0.0, 0.0]]))
    same = GiGPO(1.0, scale="none")(
        AdvantageInput(rewards, mask, groups, turn_ids=turn_ids, anchors=torch.zeros_like(anchors))
    )[0]
    # state 0 everywhere: the first attempt's turns (2, 2, 1) against 0; the second's 0 against their mean, 5 / 3
    torch.testing.assert_close(same, torch.tensor([[4.0, 4.0, 3.0], [-2 - 5 / 3, 0.0, 0.0]]))


@pytest.mark.parametrize("estimator", [TurnReturns(), GiGPO()])
def test_equal_returns_give_exactly_nothing(estimator: AdvantageEstimator) -> None:
    rewards, mask = torch.full((3, 2), 0.1), torch.ones(3, 2).bool()
    turn_ids = torch.arange(2).expand(3, 2)
    advantages, _ = estimator(AdvantageInput(rewards, mask, torch.zeros(3).long(), turn_ids=turn_ids, anchors=turn_ids))
    assert not advantages.any()


def test_a_turn_that_is_not_trained_is_skipped() -> None:
    """Turn 0 is context (a malformed call): its attempt is compared by turn 1 at both."""
    mask = torch.tensor([[True, False], [True, True]])
    turn_ids = torch.tensor([[1, -1], [0, 1]])
    rewards = torch.tensor([[1.0, 0.0], [0.5, 0.25]])
    advantages, _ = TurnReturns()(AdvantageInput(rewards, mask, torch.zeros(2).long(), turn_ids=turn_ids))
    torch.testing.assert_close(advantages, torch.tensor([[0.75, 0.0], [-0.25, -0.75]]))


def test_missing_states_are_refused() -> None:
    mask, turn_ids = torch.ones(1, 2).bool(), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="GiGPO: anchors=None"):
        GiGPO()(AdvantageInput(torch.ones(1, 2), mask, torch.zeros(1).long(), turn_ids=turn_ids))

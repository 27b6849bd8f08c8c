"""Estimators against numbers worked by hand, and what must not change them: padding, order, labels, ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.objectives import (
    GAE,
    GDPO,
    OPO,
    RLOO,
    AdvantageEstimator,
    AdvantageInput,
    GroupRelative,
    MaxRL,
    PassAtK,
    Reinforce,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from tests.toys import on_ranks

ALL: list[AdvantageEstimator] = [
    GAE(0.9, 0.8),
    Reinforce(0.9),
    GroupRelative("group"),
    GroupRelative("batch"),
    GroupRelative("none"),
    RLOO(),
    RLOO(normalize=True),
    OPO(),
    MaxRL(),
    PassAtK(2),
    GDPO(),
    ReinforcePlusPlus(0.9),
    ReinforcePlusPlusBaseline(),
]
IDS = [f"{type(e).__name__}-{i}" for i, e in enumerate(ALL)]


def sequences(scores: list[float], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rewards with the score on the last token, and the mask, of responses that start at token 1."""
    width = max(lengths) + 1
    rewards, mask = torch.zeros(len(scores), width), torch.zeros(len(scores), width, dtype=torch.bool)
    for i, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        mask[i, 1 : 1 + length] = True
        rewards[i, length] = score
    return rewards, mask


def per_sequence(
    estimator: AdvantageEstimator,
    scores: list[float],
    groups: list[int],
    lengths: list[int] | None = None,
    **kwargs: Any,
) -> list[float]:
    rewards, mask = sequences(scores, lengths or [2] * len(scores))
    advantages, returns = estimator(AdvantageInput(rewards, mask, torch.tensor(groups), **kwargs))
    assert returns is None and (advantages[~mask] == 0).all()
    assert all((row[m] == row[m][0]).all() for row, m in zip(advantages, mask, strict=True)), "the same on each token"
    return advantages[:, 1].tolist()


def approx(values: list[float]) -> Any:
    return pytest.approx(values, abs=2e-6)


def test_group_norm_by_hand() -> None:
    # group 0: 1 0 0 0: mean 0.25, std sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5. group 1: 2 4: mean 3, std sqrt(2)
    scores, groups = [1.0, 0, 0, 0, 2, 4], [0, 0, 0, 0, 1, 1]
    assert per_sequence(GroupRelative("none"), scores, groups) == approx([0.75, -0.25, -0.25, -0.25, -1, 1])
    a, b, c = 0.75 / 0.5001, -0.25 / 0.5001, 1 / (2**0.5 + 1e-4)
    assert per_sequence(GroupRelative("group"), scores, groups) == approx([a, b, b, b, -c, c])
    # batch: mean 7/6, squares 1/36 + 3 * 49/36 + 25/36 + 289/36 = 462/36, variance 462/180, std 1.602082
    s = 1.602082 + 1e-4
    assert per_sequence(GroupRelative("batch"), scores, groups) == approx(
        [x / s for x in (0.75, -0.25, -0.25, -0.25, -1, 1)]
    )
    # eps 0.5 halves the first: 0.75 / 1.0
    assert per_sequence(GroupRelative("group", eps=0.5), scores, groups)[0] == pytest.approx(0.75)


def test_rloo_by_hand() -> None:
    # 1 - (0 + 0.5) / 2 = 0.75, 0 - 1.5 / 2 = -0.75, 0.5 - 1 / 2 = 0
    assert per_sequence(RLOO(), [1.0, 0, 0.5], [4, 4, 4]) == approx([0.75, -0.75, 0])
    # whitened: mean 0, std sqrt(2 * 0.5625 / 2) = 0.75
    k = 0.75 / 0.7501
    assert per_sequence(RLOO(normalize=True), [1.0, 0, 0.5], [4, 4, 4]) == approx([k, -k, 0])


def test_opo_by_hand() -> None:
    # lengths 3 and 1, rewards 1 and 0: baseline 3/4
    assert per_sequence(OPO(), [1.0, 0], [0, 0], [3, 1]) == approx([0.25, -0.75])


def test_maxrl_by_hand() -> None:
    # mean 1/4: (1 - 1/4) / (1/4) = 3 and -1; without a success 0
    assert per_sequence(MaxRL(), [1.0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]) == approx([3, -1, -1, -1, 0, 0])
    with pytest.raises(ValueError, match="-0.5"):
        per_sequence(MaxRL(), [1.0, -0.5], [0, 0])


def test_pass_at_k_by_hand() -> None:
    # 4 rows, 1 success, k = 2: 1 and -1/3 (tests/ops/test_advantages.py); k = 1 is the population-std GRPO: q = 3/4,
    # std = sqrt(3)/4: success (3/4) / std = sqrt(3), failure (3/4 - 1) / std = -1/sqrt(3)
    assert per_sequence(PassAtK(2), [1.0, 0, 0, 0], [0] * 4) == approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert per_sequence(PassAtK(1), [1.0, 0, 0, 0], [0] * 4) == approx([3**0.5, *[-(3**-0.5)] * 3])
    # a threshold of 2 makes 1.0 a failure like the others
    assert per_sequence(PassAtK(2, threshold=2.0), [1.0, 0, 0, 0], [0] * 4) == approx([0, 0, 0, 0])


def test_reinforce_by_hand() -> None:
    rewards, mask = sequences([1.0, -2.0], [3, 1])
    # gamma 0.5: 0.25, 0.5, 1 and -2
    advantages, _ = Reinforce(0.5)(AdvantageInput(rewards, mask, torch.tensor([0, 1])))
    assert advantages.tolist() == [[0, 0.25, 0.5, 1], [0, -2, 0, 0]]


def test_reinforce_plus_plus_by_hand() -> None:
    # gamma 0.5: returns 0.5, 1 and 0; mean 0.5, std sqrt((0 + 0.25 + 0.25) / 2) = 0.5
    rewards, mask = sequences([1.0, 0.0], [2, 1])
    advantages, _ = ReinforcePlusPlus(0.5)(AdvantageInput(rewards, mask, torch.tensor([0, 1])))
    assert advantages[mask].tolist() == approx([0, 1, -1])


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # centred 0.5 (2 tokens), -0.5 (1 token): mean 1/6, variance (2 * 1/9 + 4/9) / 2 = 1/3
    out = per_sequence(ReinforcePlusPlusBaseline(), [1.0, 0.0], [0, 0], [2, 1])
    assert out == approx([(1 / 3) * 3**0.5, (-2 / 3) * 3**0.5])
    # a group of one has no baseline: 0, and it does not move the others
    assert per_sequence(ReinforcePlusPlusBaseline(), [1.0, 0.0, 9.0], [0, 0, 5], [2, 1, 3]) == approx([*out, 0])


def test_gae_by_hand() -> None:
    # gamma 1, lam 0.5, values 0.5, 0.25: A_1 = 1 - 0.25 = 0.75, A_0 = 0.25 - 0.5 + 0.5 * 0.75 = 0.125
    rewards, mask = sequences([1.0], [2])
    values = torch.tensor([[9.0, 0.5, 0.25]])
    advantages, returns = GAE(1.0, 0.5)(AdvantageInput(rewards, mask, torch.tensor([0]), values=values))
    assert advantages[0].tolist() == approx([0, 0.125, 0.75])
    assert returns[0].tolist() == approx([0, 0.625, 1.0])
    # an unscored row: no advantage, and returns that ask nothing of the critic
    advantages, returns = GAE()(
        AdvantageInput(rewards, mask, torch.tensor([0]), values=values, valid=torch.tensor([False]))
    )
    assert advantages.abs().sum() == 0 and returns[0].tolist() == [0, 0.5, 0.25]


def test_gdpo_by_hand() -> None:
    # part a: group 0 has 1 0, group 1 has 0 1: each +-0.5 / (sqrt(0.5) + 1e-4) = +-0.707007
    # part b, weight 2: group 0 has 1 1 (no spread: 0), group 1 has 1 0: +-1.414014
    # sums: 0.707007, -0.707007, 0.707007, -0.707007; std sqrt(4 * 0.499858 / 3) = 0.816381; A = +-0.707007 / 0.816481
    parts = {"a": torch.tensor([1.0, 0, 0, 1]), "b": torch.tensor([1.0, 1, 1, 0])}
    kwargs: dict[str, Any] = {"reward_parts": parts, "part_weights": {"a": 1.0, "b": 2.0}}
    k = 0.707007 / 0.816481
    assert per_sequence(GDPO(), [0.0] * 4, [0, 0, 1, 1], **kwargs) == approx([k, -k, k, -k])
    # with weight 1 the parts cancel in group 1: sums +-0.707007, 0, 0, std sqrt(2 * 0.499858 / 3) = 0.577269
    kwargs["part_weights"] = {"a": 1.0, "b": 1.0}
    assert per_sequence(GDPO(), [0.0] * 4, [0, 0, 1, 1], **kwargs) == approx(
        [0.707007 / 0.577369, -0.707007 / 0.577369, 0, 0]
    )


def test_gdpo_keeps_apart_what_grpo_makes_equal() -> None:
    """The paper's example: two rewards of 0 or 1 and two completions, whose sums are (0, 1), (0, 2) and (1, 2).

    Normalised sums are (-0.7071, 0.7071) for all three; sums of normalised rewards are twice that for (0, 2).
    """
    parts = {"a": torch.tensor([0.0, 1, 0, 1, 1, 1]), "b": torch.tensor([0.0, 0, 0, 1, 0, 1])}
    groups, total = [0, 0, 1, 1, 2, 2], (parts["a"] + parts["b"]).tolist()
    grpo = per_sequence(GroupRelative(eps=1e-8), total, groups)
    assert grpo == approx([-0.7071068, 0.7071068] * 3)
    weights = {"a": 1.0, "b": 1.0}
    gdpo = per_sequence(GDPO(eps=1e-8), total, groups, reward_parts=parts, part_weights=weights)
    # over the batch: mean 0, squares 4 * 0.5 + 2 * 2 = 6, std sqrt(6 / 5) = 1.0954451
    k = 0.7071068 / 1.0954451
    assert gdpo == approx([-k, k, -2 * k, 2 * k, -k, k])


def test_gdpo_leaves_out_a_part_that_does_not_apply() -> None:
    # part a is None for row 2: rows 0 and 1 are its group, row 2 gets 0 from it (and 0 from nothing else)
    parts = {"a": torch.tensor([1.0, 0.0, float("nan")])}
    out = per_sequence(GDPO(), [0.0] * 3, [0, 0, 0], reward_parts=parts, part_weights={"a": 1.0})
    assert out[2] == pytest.approx(0, abs=1e-6) and out[0] == pytest.approx(-out[1]) and out[0] > 0.5


def batch(seed: int = 0) -> dict[str, Any]:
    """Six groups of 4 with unequal lengths, an unscored row (NaN) and binary scores on the last token."""
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (24,), generator=gen).tolist()
    scores = torch.randint(0, 2, (24,), generator=gen).float().tolist()
    rewards, mask = sequences(scores, lengths)
    valid = torch.ones(24, dtype=torch.bool)
    valid[5] = False
    rewards[5] = float("nan")
    parts = {name: torch.rand(24, generator=gen) for name in "ab"}
    return {
        "rewards": rewards,
        "mask": mask,
        "groups": torch.arange(6).repeat_interleave(4),
        "values": torch.randn(rewards.shape, generator=gen),
        "valid": valid,
        "reward_parts": parts,
    }


def rows(data: dict[str, Any], pick: Any) -> dict[str, Any]:
    return {k: {n: p[pick] for n, p in v.items()} if isinstance(v, dict) else v[pick] for k, v in data.items()}


def run(estimator: AdvantageEstimator, data: dict[str, Any], **kwargs: Any) -> Tensor:
    return estimator(AdvantageInput(**data, part_weights={"a": 1.0, "b": 0.5}, **kwargs))[0]


@pytest.mark.parametrize("estimator", ALL, ids=IDS)
def test_invariances(estimator: AdvantageEstimator) -> None:
    data = batch()
    base = run(estimator, data)
    assert torch.isfinite(base).all() and base.abs().sum() > 0
    assert (base[~data["mask"]] == 0).all() and (base[5] == 0).all(), "0 off the mask and for the unscored row"

    wide = dict(data)
    for name in ("rewards", "mask", "values"):
        wide[name] = torch.nn.functional.pad(data[name], (0, 3))
    assert torch.allclose(run(estimator, wide)[:, : base.shape[1]], base, atol=1e-6), "padding columns"

    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(run(estimator, rows(data, order)), base[order], atol=1e-6), "row order"

    relabelled = {**data, "groups": 100 - 7 * data["groups"]}
    assert torch.allclose(run(estimator, relabelled), base, atol=1e-6), "group labels"

    without = rows(data, torch.arange(24) != 5)
    assert torch.allclose(run(estimator, without), base[torch.arange(24) != 5], atol=1e-6), "the unscored row"


@pytest.mark.parametrize("estimator", [e for e in ALL if e.needs_groups])
def test_a_group_of_one_scored_row_gets_zero(estimator: AdvantageEstimator) -> None:
    data = batch()
    data["valid"][:3] = False
    out = run(estimator, data)
    assert out[:4].abs().max() < 1e-6 and out[4:].abs().max() > 0


@pytest.mark.parametrize("estimator", [RLOO(normalize=True), GDPO()])
def test_normalization_leaves_groups_without_spread_at_zero(estimator: AdvantageEstimator) -> None:
    scores = [0.1, 0.2, 0.7, 0.3, 0.3, 0.3]
    parts = {"reward_parts": {"a": torch.tensor(scores)}, "part_weights": {"a": 1.0}}
    out = per_sequence(estimator, scores, [0, 0, 0, 1, 1, 1], **parts)
    assert out[3:] == [0.0] * 3 and 0.0 not in out[:3]


@pytest.mark.parametrize("estimator", ALL, ids=IDS)
def test_two_ranks_equal_one(estimator: AdvantageEstimator) -> None:
    data = batch()
    whole = run(estimator, data)
    shards = [rows(data, slice(0, 8)), rows(data, slice(8, 24))]
    ranks = torch.cat(on_ranks(lambda shard, all_sum: run(estimator, shard, all_sum=all_sum), *((s,) for s in shards)))
    assert torch.allclose(ranks, whole, atol=1e-6)


@pytest.mark.parametrize("answer", [lambda given: (given.scores, None), lambda given: (given.rewards, given.scores)])
def test_an_estimator_that_breaks_its_contract_is_named(answer: Any) -> None:
    class Own(AdvantageEstimator):
        def estimate(self, given: Any) -> Any:
            return answer(given)

    with pytest.raises(ValueError, match="advantage=Own"):
        Own()(AdvantageInput(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0])))


def test_an_estimator_that_reads_parts_declares_it() -> None:
    class Own(AdvantageEstimator):
        def estimate(self, given: AdvantageInput) -> Any:
            assert given.reward_parts is not None
            return given.rewards, None

    class Declared(Own):
        credit = "parts"

    mask, parts = torch.ones(2, 3, dtype=torch.bool), {"a": torch.zeros(2)}
    given = AdvantageInput(torch.zeros(2, 3), mask, torch.tensor([0, 0]), reward_parts=parts)
    with pytest.raises(ValueError, match="advantage=Own.*credit"):
        Own()(given)
    assert Declared()(given)[0].shape == mask.shape


def test_kl_in_the_reward_is_part_of_the_score() -> None:
    # tokens 0.1 and 1 - 0.2: score 0.9; against 0.5: mean 0.7
    rewards, mask = torch.tensor([[0.0, 0.1, 0.8], [0.0, 0.0, 0.5]]), torch.tensor([[False, True, True]] * 2)
    advantages, _ = GroupRelative("none")(AdvantageInput(rewards, mask, torch.tensor([0, 0])))
    assert advantages[:, 1].tolist() == approx([0.2, -0.2])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (GAE(0.9), GAE(1.0)),
        (GAE(lam=0.5), GAE(lam=0.95)),
        (Reinforce(0.9), Reinforce(1.0)),
        (GroupRelative("group"), GroupRelative("none")),
        (GroupRelative("group"), GroupRelative("batch")),
        (GroupRelative(eps=1e-4), GroupRelative(eps=1.0)),
        (RLOO(), RLOO(normalize=True)),
        (PassAtK(1), PassAtK(3)),
        (PassAtK(2, threshold=0.5), PassAtK(2, threshold=-1.0)),
        (GDPO(), GDPO(eps=1.0)),
        (ReinforcePlusPlus(0.9), ReinforcePlusPlus(1.0)),
    ],
)
def test_every_argument_has_an_effect(one: AdvantageEstimator, other: AdvantageEstimator) -> None:
    assert not torch.allclose(run(one, batch()), run(other, batch()), atol=1e-3)

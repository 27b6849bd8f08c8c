"""Cutting trajectories into rows changes no gradient, statistic or metric."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from lightrl.algorithms import CriticSpec, PPOLightningModule
from lightrl.algorithms.experience import TrajectoryLayout, cut_minibatches, estimate_advantages, shape_rewards
from lightrl.algorithms.module import ExtraLosses, Updates
from lightrl.callbacks import RewardNormalization
from lightrl.distributed.strategies import MetricSums
from lightrl.objectives import GDPO, RLOO, KLInLoss, PPOClip, Reinforce, SequenceMean, TokenMean
from lightrl.objectives.estimators import AdvantageEstimator
from lightrl.records import ModelOutputs, Rollouts
from tests.algorithms.test_product import AGGREGATIONS, ESTIMATORS, LOSSES
from tests.rows import as_experience
from tests.toys import quickstart_model, quiet_trainer, sums_data

PROMPT, TURN, ANSWER, TURNS = 3, 2, 2, 3  # tokens of the prompt, of a sampled turn, of the environment's answer; turns
LENGTH = PROMPT + TURNS * (TURN + ANSWER)


def rollouts(cuts: list[list[int]]) -> Rollouts:
    """Two groups of four attempts of three turns; attempt i is cut into rows as `cuts[i % len(cuts)]` has it.

    A row holds all that came before its last turn, so that tokens have the same log-probs however it is cut.
    """
    tokens = torch.randint(3, 12, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    totals = torch.tensor([1.0, float("nan"), 0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    rows: dict[str, list[Any]] = {name: [] for name in ("tokens", "real", "sampled", "group", "trajectory", "total")}
    for i in range(8):
        first = 0
        for turns in cuts[i % len(cuts)]:
            real, sampled = torch.zeros(LENGTH).bool(), torch.zeros(LENGTH).bool()
            for turn in range(first, first + turns):
                start = PROMPT + turn * (TURN + ANSWER)
                sampled[start : start + TURN] = True
            first += turns
            real[: PROMPT + first * (TURN + ANSWER) - ANSWER] = True
            values = (tokens[i] * real, real, sampled, i // 4, i, totals[i])
            for column, value in zip(rows.values(), values, strict=True):
                column.append(value)
    sampled = torch.stack(rows["sampled"])
    turn_ids = torch.where(sampled, (torch.arange(LENGTH) - PROMPT) // (TURN + ANSWER), -1)
    states = [["start", "middle", "middle" if i % 2 else f"end {i}"] for i in rows["trajectory"]]
    total = torch.stack(rows["total"])
    ends = sampled & ~sampled.roll(-1, 1)
    return Rollouts(
        token_ids=torch.stack(rows["tokens"]),
        attention_mask=torch.stack(rows["real"]),
        response_mask=sampled,
        engine_logprobs=noise(torch.tensor(rows["trajectory"])) * sampled - 2.0 * sampled,
        group_ids=torch.tensor(rows["group"]),
        rewards=total,
        reward_parts={"right": total},
        reward_weights={"right": 1.0},
        truncated=torch.zeros(len(total)).bool(),
        policy_version=0,
        trajectory_ids=torch.tensor(rows["trajectory"]),
        turn_rewards={"tool": 0.125 * ends * (1 + torch.tensor(rows["trajectory"])[:, None] % 3)},
        turn_ids=turn_ids,
        states=states,
    )


def noise(trajectories: Tensor) -> Tensor:
    """(B, T) numbers that depend on the trajectory and the place in it."""
    return 0.3 * torch.sin(7.0 * torch.arange(LENGTH)[None] + 3.0 * trajectories[:, None])


CUTS = [[[1, 1, 1]], [[2, 1], [3], [1, 2], [1, 1, 1]]]
FEW: list[tuple[Any, Any, Any]] = [
    *((make, PPOClip, TokenMean) for make in ESTIMATORS),
    *((RLOO, make, SequenceMean) for make in LOSSES),
    *((RLOO, PPOClip, make) for make in AGGREGATIONS),
]


class Compare(PPOLightningModule):
    """Computes the gradient of every combination for whole and for cut trajectories."""

    combinations: list[tuple[Any, Any, Any]]
    found: list[tuple[str, list[Tensor], list[dict[str, float]]]]

    def training_step(self, batch: Rollouts, batch_idx: int) -> dict[str, float]:
        self.found = []
        for make_advantage, make_loss, make_aggregation in self.combinations:
            self.advantage, self.loss, self.aggregation = make_advantage(), make_loss(), make_aggregation()
            results = [self._gradient(rollouts(cuts)) for cuts in ([[3]], *CUTS)]
            name = " ".join(type(part).__name__ for part in (self.advantage, self.loss, self.aggregation))
            self.found.append((name, [gradient for gradient, _ in results], [metrics for _, metrics in results]))
        return {}

    def _gradient(self, cut: Rollouts) -> tuple[Tensor, dict[str, float]]:
        experience = self.make_experience(cut)
        assert experience.old_logprobs is not None
        experience.old_logprobs = experience.old_logprobs + noise(cut.trajectory_ids) * cut.response_mask
        sums = MetricSums()
        for micro in self.micro_batches(experience):
            losses, values = self.compute_loss(micro.rows)  # type: ignore[arg-type]
            self.manual_backward(micro.total(losses))
            sums.add(values, micro.rows.response_mask)
        trained = [p for group in self.optimizers().param_groups for p in group["params"]]  # type: ignore[union-attr]
        gradient = torch.cat([p.grad.flatten() for p in trained if p.grad is not None])
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        return gradient, {**experience.metrics, **self.means(sums)}


def compared(folder: Any, combinations: list[tuple[Any, Any, Any]]) -> Iterator[str]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = quickstart_model(folder, num_hidden_layers=1, **sizes)
    seed_everything(0, verbose=False)
    module = Compare(
        path,
        CriticSpec(shared=True),
        kl=KLInLoss("k3"),
        extra_losses=ExtraLosses(entropy_coef=0.01),
        whiten_advantages=False,
        updates=Updates(micro_batch_tokens=60),
    )
    module.combinations = combinations
    quiet_trainer().fit(module, sums_data(rollouts_per_epoch=1, prompts_per_rollout=1))
    for name, (whole, *cut), (metrics, *others) in module.found:
        assert float(whole.norm()) > 0
        for gradient, values in zip(cut, others, strict=True):
            assert float((gradient - whole).norm()) <= 1e-5 * float(whole.norm()), name
            assert values.keys() == metrics.keys()
            for key, value in metrics.items():
                assert values[key] == pytest.approx(value, rel=1e-5, abs=1e-6), f"{name}: {key}"
        yield name


def test_each_estimator_loss_and_aggregation_ignores_cuts(tmp_path: Any) -> None:
    assert len(list(compared(tmp_path, FEW))) == len(FEW)


def test_turn_rewards_stand_on_their_turns() -> None:
    """Total 1, turns 0.125 each: the outcome's share, 1 - 3 / 8, comes on top at the last sampled token."""
    for cuts in ([[3]], [[1, 2]]):
        cut = rollouts(cuts)
        layout = TrajectoryLayout(cut.trajectory_ids, cut.response_mask)
        shaped = shape_rewards(cut, cut.rewards.nan_to_num(0.0), cut.rewards.isfinite(), layout)
        assert float(shaped[cut.trajectory_ids == 0].sum()) == 1.0
        ends = [PROMPT + turn * (TURN + ANSWER) + TURN - 1 for turn in range(TURNS)]
        of_first = shaped[cut.trajectory_ids == 0].sum(0)
        assert [float(of_first[end]) for end in ends] == [0.125, 0.125, 0.75]
        assert not bool(shaped[cut.trajectory_ids == 1].any()), "nothing scored it"


def test_a_smaller_total_shrinks_all_turns() -> None:
    """Clipping or normalizing the total scales the rewards of its turns (here 0.125, 0.125, and 0.75) as well."""
    for cuts in ([[3]], [[1, 2]]):
        whole, halves = rollouts(cuts), rollouts(cuts)
        rollout = (ModelOutputs(), Reinforce())
        advantages = estimate_advantages(whole, *rollout, None, None, lambda x: x).advantages
        clipped = estimate_advantages(whole, *rollout, None, 0.5, lambda x: x).advantages
        normalization = RewardNormalization(center=False)
        normalization.count, normalization.sum_squares = 1e12, 4e12  # a std of 2
        normalization.on_rollout_scored(None, SimpleNamespace(all_sum=lambda x: x), halves)  # type: ignore[arg-type]
        normalized = estimate_advantages(halves, *rollout, None, None, lambda x: x).advantages
        of_first = (whole.trajectory_ids == 0)[:, None] & whole.response_mask
        assert advantages[of_first].tolist() == [1.0, 1.0, 0.875, 0.875, 0.75, 0.75]
        torch.testing.assert_close(clipped[of_first], advantages[of_first] / 2)
        torch.testing.assert_close(normalized, advantages / 2)


def first_advantages(scored: Rollouts, estimator: AdvantageEstimator) -> list[float]:
    """Advantages of each trajectory's first sampled token."""
    found = estimate_advantages(scored, ModelOutputs(), estimator, None, None, lambda x: x)
    return found.advantages[:, PROMPT].tolist()


def test_a_trajectory_without_trained_tokens_is_not_in_the_baseline() -> None:
    """Rewards 1, 1, 0, 1 of the second group; the first of them sampled nothing that is trained."""
    scored = rollouts([[3]])
    scored.response_mask[4] = False
    assert first_advantages(scored, RLOO())[4:] == pytest.approx([0.0, 0.5, -1.0, 0.5])


def test_gdpo_reads_the_rewards_of_turns() -> None:
    """Turn rewards 3/8, 9/8, 3/8 and 6/8, 9/8, 3/8, 6/8, normalized per group (std 0.433 and 0.306), then together."""
    scored = rollouts([[3]])
    totals = scored.turn_rewards["tool"].sum(1)
    scored.rewards = torch.where(scored.rewards.isnan(), torch.nan, totals)
    scored.reward_parts["right"] = torch.zeros(8)
    expected = [-0.6325, 0.0, 1.2649, -0.6325, 0.0, 1.3416, -1.3416, 0.0]
    assert first_advantages(scored, GDPO(eps=1e-9)) == pytest.approx(expected, abs=1e-4)
    scored.turn_rewards["tool"][5] = 0.0  # of turns whose tokens are not trained
    assert first_advantages(scored, GDPO(eps=1e-9)) == pytest.approx(expected, abs=1e-4)


def test_gdpo_rejects_a_sum_that_is_not_that_of_its_parts() -> None:
    scored = rollouts([[3]])
    scored.turn_rewards = {}
    first_advantages(scored, GDPO())
    scored.rewards = scored.rewards + torch.arange(8)  # by any hook, also after `on_rollout_scored`
    with pytest.raises(ValueError, match="advantage=GDPO"):
        first_advantages(scored, GDPO())
    scored.reward_weights = {}
    with pytest.raises(ValueError, match="rewards_by_label.*right"):
        first_advantages(scored, GDPO())


def test_minibatches_count_trajectories() -> None:
    made = rollouts(CUTS[1])
    experience = as_experience(made, trajectory_ids=made.trajectory_ids)
    parts = cut_minibatches(experience, 2, seed=0)
    held = [set(part.trajectory_ids.tolist()) for part in parts]
    assert sorted(map(sorted, held)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sum(len(part) for part in parts) == len(experience)
    quarters = cut_minibatches(experience, 4, seed=0)
    assert all(len(part.trajectory_ids.unique()) == 2 for part in quarters)

"""Which tokens are trained: truncated responses, the entropy filter, completions without a reward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightrl.algorithms import PPOLightningModule
from lightrl.algorithms.module import ExtraLosses, Shaping
from lightrl.callbacks import AdaptiveEntropy, AdaptiveKL
from lightrl.objectives import GroupRelative, KLInLoss
from lightrl.records import SamplingParams
from tests.algorithms.toys import fit, grpo, ppo, weights


def test_truncated_responses_are_left_out_of_loss_and_normaliser(model_path: str) -> None:
    sampling = SamplingParams(max_new_tokens=6)
    keep = fit(ppo(model_path, shaping=Shaping(mask_truncated=True), ppo_epochs=1), sampling=sampling)
    all_rows = fit(ppo(model_path, ppo_epochs=1), sampling=sampling)
    rollouts, masked, whole = keep.rollouts[0], keep.experiences[0], all_rows.experiences[0]
    cut = rollouts.truncated
    assert 0 < int(cut.sum()) < len(cut), "the toy must have responses of both kinds"
    assert not bool(masked.response_mask[cut].any()) and bool(masked.response_mask[~cut].any(1).all())
    assert torch.equal(masked.response_mask[~cut], rollouts.response_mask[~cut])
    assert bool((masked.advantages[cut] == 0).all()) and bool((whole.advantages[cut] != 0).any())
    assert keep.metrics[0]["completions/length"] == all_rows.metrics[0]["completions/length"]


def test_truncated_rows_stay_in_the_baseline_of_their_group(model_path: str) -> None:
    sampling = SamplingParams(max_new_tokens=6)
    masked = fit(grpo(model_path, shaping=Shaping(mask_truncated=True)), sampling=sampling)
    whole = fit(grpo(model_path), sampling=sampling).experiences[0]
    e, kept = masked.experiences[0], ~masked.rollouts[0].truncated
    torch.testing.assert_close(e.advantages[kept], whole.advantages[kept])


def test_the_top_entropy_filter_keeps_the_uncertain_tokens(model_path: str) -> None:
    keep = fit(grpo(model_path, shaping=Shaping(top_entropy_fraction=0.25)))
    e = keep.experiences[0]
    assert e.entropy is not None
    tokens = e.entropy[e.response_mask]
    count = math.ceil(0.25 * len(tokens))
    threshold = tokens.sort(descending=True).values[count - 1]
    assert e.in_policy_loss is not None
    assert torch.equal(e.in_policy_loss, e.response_mask & (e.entropy >= threshold))
    assert keep.metrics[0]["policy/top_entropy"] == pytest.approx(float(tokens[tokens >= threshold].mean()), rel=1e-5)
    assert int(e.response_mask.sum()) == len(tokens), "the normaliser counts every token"


# ---- completions without a reward ------------------------------------------------------------------------------------


def half(completions: list[str], **_: Any) -> list[float | None]:
    """Rewards 1, none, 0, 0 in a group of four."""
    return [1.0, None, 0.0, 0.0] * (len(completions) // 4)


def nothing(completions: list[str], **_: Any) -> list[float | None]:
    return [None] * len(completions)


def test_completions_without_a_reward_are_in_no_loss_normaliser_or_baseline(model_path: str) -> None:
    module = grpo(
        model_path, advantage=GroupRelative("none"), kl=KLInLoss(coef=0.1), extra_losses=ExtraLosses(entropy_coef=0.01)
    )
    keep = fit(module, rewards=[half])
    e, rollouts = keep.experiences[0], keep.rollouts[0]
    scored = rollouts.rewards.isfinite()
    assert scored.tolist() == [True, False, True, True] * 8
    assert torch.equal(e.response_mask, rollouts.response_mask & scored[:, None])
    first = e.advantages.gather(1, rollouts.response_mask.int().argmax(1, keepdim=True)).squeeze(1)
    torch.testing.assert_close(first, torch.tensor([2 / 3, 0.0, -1 / 3, -1 / 3] * 8))
    # of 32 completions 24 are in the mean over sequences
    for micro in module.micro_batches(e):
        assert micro.policy_weights is not None
        each = micro.policy_weights.sum(1)
        torch.testing.assert_close(each[each > 0], torch.full((int((each > 0).sum()),), 1 / 24))
    metrics = keep.metrics[0]
    assert metrics["reward/scored_fraction"] == 0.75 and metrics["reward/mean"] == pytest.approx(1 / 3)


def test_groups_of_which_the_scored_have_one_reward_teach_nothing(model_path: str) -> None:
    """1, none, 1, 1: no spread, though none would differ from 1 if it were counted as 0."""

    def equal(completions: list[str], **_: Any) -> list[float | None]:
        return [1.0, None, 1.0, 1.0] * (len(completions) // 4)

    assert fit(grpo(model_path), rewards=[equal]).metrics[0]["reward/zero_std_fraction"] == 1.0
    assert fit(grpo(model_path), rewards=[half]).metrics[0]["reward/zero_std_fraction"] == 0.0
    assert fit(grpo(model_path), rewards=[nothing]).metrics[0]["reward/zero_std_fraction"] == 1.0


@pytest.mark.parametrize("masked", ["no reward", "truncated"])
def test_a_rollout_of_which_nothing_is_trained_changes_nothing(masked: str, model_path: str) -> None:
    callbacks = [AdaptiveKL(target=0.01, horizon=100), AdaptiveEntropy(target=10.0, start=0.3)]
    module = grpo(model_path, kl=KLInLoss(coef=0.1), shaping=Shaping(mask_truncated=True))
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=masked == "truncated")
    rewards: list[Any] = [nothing] if masked == "no reward" else [half]
    before = weights(fitted(model_path))
    keep = fit(module, rollouts=2, callbacks=callbacks, rewards=rewards, sampling=sampling, seed=3)
    if masked == "truncated":
        assert all(bool(r.truncated.all()) for r in keep.rollouts), "nothing may end by itself"
    assert all("policy/entropy" not in metrics for metrics in keep.metrics)
    assert module.kl is not None and module.kl.coef == callbacks[0].coef == 0.1 and callbacks[1].coef == 0.3
    assert torch.equal(weights(module), before)


def fitted(path: str) -> PPOLightningModule:
    """A module whose weights are those it began with."""
    module = grpo(path)
    fit(module, rewards=[nothing])
    return module

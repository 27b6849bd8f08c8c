"""Groups without reward spread are replaced, and the batch keeps its size."""

from __future__ import annotations

import pytest

from lightrl.algorithms import PPOLightningModule
from lightrl.callbacks import WeightSync
from tests.algorithms.toys import FirstSums, fit, grpo
from tests.toys import Keep, quiet_trainer, sums_data


def test_flat_groups_are_refilled_and_the_batch_keeps_its_size(model_path: str) -> None:
    plain = fit(grpo(model_path), rewards=[FirstSums()])
    keep = fit(grpo(model_path), rewards=[FirstSums()], dynamic_sampling_rounds=20)
    flat = sum(int(p[1]) % 2 for p in plain.rollouts[0].prompts[::4])
    assert 0 < flat < 8, "the toy must have groups of both kinds"
    rollouts, metrics = keep.rollouts[0], keep.metrics[0]
    assert len(rollouts) == 32 and all(int(p[1]) % 2 == 0 for p in rollouts.prompts)
    assert len(set(rollouts.prompts)) == 8, "further prompts, not the same ones again"
    assert metrics["rollout/flat_groups"] == 0 and metrics["reward/zero_std_fraction"] == 0
    assert metrics["rollout/dropped_groups"] >= flat and metrics["rollout/refills"] >= 1
    assert metrics["reward/mean"] == pytest.approx(1.5)  # (0 + 1 + 2 + 3) / 4
    # dropped groups have 1.0 each: (8 * 1.5 + d * 1) / (8 + d)
    dropped = metrics["rollout/dropped_groups"]
    assert metrics["reward/sampled_mean"] == pytest.approx((8 * 1.5 + dropped) / (8 + dropped))


def test_the_bound_on_refills_completes_the_batch_with_dropped_groups(model_path: str) -> None:
    keep = fit(grpo(model_path), rewards=[FirstSums()], dynamic_sampling_rounds=1)
    endless = fit(
        grpo(model_path), rewards=[lambda completions, **_: [1.0] * len(completions)], dynamic_sampling_rounds=3
    )
    assert keep.metrics[0]["rollout/refills"] == 1 and len(keep.rollouts[0]) == 32
    m = endless.metrics[0]  # nothing has spread: 3 refills of 8 groups, all thrown away
    assert (m["rollout/refills"], m["rollout/dropped_groups"], m["rollout/flat_groups"]) == (3, 24, 8)
    assert len(endless.rollouts[0]) == 32


def test_the_prompt_cursor_counts_what_was_drawn(model_path: str) -> None:
    data = sums_data(rewards=[FirstSums()], dynamic_sampling_rounds=20, rollouts_per_epoch=2)
    keep = Keep()
    quiet_trainer(callbacks=[WeightSync(), keep]).fit(grpo(model_path), data)
    drawn = sum(8 + m["rollout/dropped_groups"] for m in keep.metrics)
    assert data.prompt_cursor == drawn == data.state_dict()["prompt_cursor"]
    prompts = {p for r in keep.rollouts for p in r.prompts}
    assert len(prompts) == 16, "no prompt comes twice within a pass"


def test_refills_that_cannot_work_are_refused(model_path: str) -> None:
    with pytest.raises(ValueError, match="group_size=1"):
        fit(PPOLightningModule(model_path, kl=None), group_size=1, dynamic_sampling_rounds=2)
    with pytest.raises(ValueError, match="dynamic_sampling_rounds=2"):
        fit(grpo(model_path), dynamic_sampling_rounds=2, rewards=[])

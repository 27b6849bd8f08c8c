"""How rewards of functions and models reach the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.algorithms import GRPOLightningModule
from lightrl.algorithms.module import Shaping
from lightrl.callbacks import RewardNormalization
from lightrl.data.prompts import PromptSource
from lightrl.models.reward import RewardModelSpec
from lightrl.models.spec import ModelSpec
from lightrl.objectives import GDPO, GroupRelative, MaxRL
from lightrl.rewards.rules import SoftOverlong
from lightrl.rollout import Evaluation
from lightrl.rollout.learner import RLCallback
from tests.algorithms.toys import fit, grpo
from tests.toys import Keep, digits_reward, quiet_trainer, sums_data


def test_the_overlong_penalty_reaches_the_rewards_with_token_counts(model_path: str) -> None:
    keep = fit(grpo(model_path), rewards=[digits_reward, SoftOverlong(max_tokens=6, buffer_tokens=4)])
    r = keep.rollouts[0]
    lengths = r.response_mask.sum(1).float()
    # free up to 2 tokens, then a quarter per token: 3 -> -0.25, 4 -> -0.5, 5 -> -0.75, 6 -> -1
    expected = -((lengths - 2) / 4).clamp(0, 1)
    torch.testing.assert_close(r.reward_parts["SoftOverlong"], expected)
    torch.testing.assert_close(r.rewards, r.reward_parts["digits_reward"] + expected)
    assert bool((expected < 0).any())


def test_shaping_of_the_sum_is_refused_where_the_sum_is_not_read(model_path: str) -> None:
    with pytest.raises(ValueError, match="reward_clip=1.0 with advantage=GDPO"):
        grpo(model_path, advantage=GDPO(), shaping=Shaping(reward_clip=1.0))
    for estimator, name in ((GDPO(), "GDPO"), (MaxRL(), "MaxRL")):
        with pytest.raises(ValueError, match=f"callback RewardNormalization with advantage={name}"):
            fit(grpo(model_path, advantage=estimator), callbacks=[RewardNormalization()])


def test_bfloat16_weights_round_nothing_else(model_path: str) -> None:
    """In bfloat16, 1000 to 1003 would be 1000, 1000, 1000, and 1004."""
    keep = Keep()
    module = grpo(ModelSpec(model_path, dtype="bfloat16"), advantage=GroupRelative("none"))
    data = sums_data(rewards=[lambda completions, **_: [1000.0 + i for i in range(len(completions))]])
    quiet_trainer(callbacks=[keep], precision="bf16-true", max_steps=1).fit(module, data)
    rollouts, experience = keep.rollouts[0], keep.experiences[0]
    expected = torch.tensor([-1.5, -0.5, 0.5, 1.5]).repeat(8)[:, None] * experience.response_mask
    torch.testing.assert_close(experience.advantages, expected)
    assert not torch.equal(rollouts.engine_logprobs, rollouts.engine_logprobs.bfloat16().float())
    assert module.actor.lm.get_output_embeddings().weight.dtype == torch.bfloat16
    rotary = next(part for part in module.actor.modules() if hasattr(part, "inv_freq"))
    size, base = len(rotary.inv_freq), rotary.config.rope_parameters["rope_theta"]
    torch.testing.assert_close(rotary.inv_freq, base ** -(torch.arange(size) / size), rtol=1e-5, atol=0.0)


class FakeModel(torch.nn.Module):
    """Scores a completion by its length."""

    def score(self, rollouts: Any, budget: int) -> Tensor:
        return rollouts.response_mask.sum(1).float()


def with_reward_model(module: GRPOLightningModule, path: str, weight: float) -> GRPOLightningModule:
    module.reward_model_specs = [RewardModelSpec("length", path, weight=weight)]
    build = module.configure_model

    def with_fake() -> None:
        specs, module.reward_model_specs = module.reward_model_specs, []
        build()
        module.reward_model_specs = specs
        module.reward_models["length"] = FakeModel()

    module.configure_model = with_fake  # type: ignore[method-assign]
    return module


def test_gdpo_sees_reward_models_with_their_weights(model_path: str) -> None:
    r = fit(with_reward_model(grpo(model_path, advantage=GDPO()), model_path, 3.0)).rollouts[0]
    assert r.reward_weights == {"digits_reward": 1.0, "length": 3.0} and set(r.reward_parts) == set(r.reward_weights)
    torch.testing.assert_close(r.rewards, r.reward_parts["digits_reward"] + 3 * r.reward_parts["length"])


def test_a_reward_model_scores_what_no_function_did_but_nothing_that_failed(model_path: str) -> None:
    """Functions give 1, none, 0, 0; the model 2 per token to each; the third attempt of each group failed."""

    class Fails(RLCallback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            batch.stop_reasons = ["stop", "stop", "failure", "stop"] * 8
            batch.rewards[2::4] = float("nan")

    module = with_reward_model(grpo(model_path), model_path, 2.0)
    keep = fit(module, rewards=[lambda completions, **_: [1.0, None, 0.0, 0.0]], callbacks=[Fails()])
    r, lengths = keep.rollouts[0], keep.rollouts[0].response_mask.sum(1).float()
    torch.testing.assert_close(r.rewards[0::4], 1 + 2 * lengths[0::4])
    torch.testing.assert_close(r.rewards[1::4], 2 * lengths[1::4])
    assert bool(r.rewards[2::4].isnan().all()) and not bool(keep.experiences[0].response_mask[2::4].any())


def test_a_reward_model_of_weight_zero_is_only_logged(model_path: str) -> None:
    module = with_reward_model(grpo(model_path), model_path, 0.0)
    r = fit(module, rewards=[lambda completions, **_: [1.0, None, 0.0, 0.0]]).rollouts[0]
    assert bool(r.rewards[1::4].isnan().all()) and bool(r.reward_parts["length"].isfinite().all())


def test_a_reward_model_scores_the_rows_of_its_labels(model_path: str) -> None:
    rows = [{"prompt": f"{i:02d}+01=", "label": "sum" if i % 2 else "other"} for i in range(8)]
    module = with_reward_model(grpo(model_path), model_path, 2.0)
    module.reward_model_specs[0].labels = ["sum"]
    r = fit(module, prompts=PromptSource(rows=rows)).rollouts[0]
    its = torch.tensor([label == "sum" for label in r.columns["label"]])
    lengths, own = r.response_mask.sum(1).float(), r.reward_parts["digits_reward"]
    assert torch.equal(r.reward_parts["length"].isnan(), ~its) and 0 < int(its.sum()) < len(its)
    torch.testing.assert_close(r.rewards, torch.where(its, own + 2 * lengths, own))


def test_success_reward_decides_what_pass_at_k_counts(model_path: str) -> None:
    prompts = PromptSource(rows=[{"prompt": "01+01="}])
    for success, expected in ((0.5, 1.0), (0.75, 0.0)):
        half: list[Any] = [lambda completions, **_: [0.5] * len(completions)]
        trainer = quiet_trainer()
        evaluation = Evaluation(prompts, group_size=2, success_reward=success)
        trainer.validate(grpo(model_path), sums_data(rewards=half, evaluation=evaluation), verbose=False)
        assert float(trainer.callback_metrics["eval/pass@2"]) == expected


def test_what_nothing_scored_is_no_failure_in_pass_at_k(model_path: str) -> None:
    prompts = PromptSource(rows=[{"prompt": "01+01="}, {"prompt": "02+01="}])

    def one(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        return [1.0, None] if "01+01" in prompts[0] else [None, None]

    trainer = quiet_trainer()
    data = sums_data(rewards=[one], evaluation=Evaluation(prompts, group_size=2))
    trainer.validate(grpo(model_path), data, verbose=False)
    for name in ("reward", "pass@1", "pass@2", "maj@2"):
        assert float(trainer.callback_metrics[f"eval/{name}"]) == 1.0


def test_what_a_reward_function_logs_is_logged_in_evaluation(model_path: str) -> None:
    def half(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("share", 0.25)
        return [0.5] * len(completions)

    trainer = quiet_trainer()
    evaluation = Evaluation(PromptSource(rows=[{"prompt": "01+01="}, {"prompt": "02+02="}]))
    trainer.validate(grpo(model_path), sums_data(rewards=[half], evaluation=evaluation), verbose=False)
    assert float(trainer.callback_metrics["eval/reward/half"]) == 0.5
    assert float(trainer.callback_metrics["eval/reward/half/share"]) == 0.25

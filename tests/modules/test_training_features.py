"""What decides which tokens are trained and on what: each feature shows in a number worked out by hand."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.callbacks import AdaptiveEntropy, RewardNormalization, WeightSync
from lightrl.data.prompts import PromptSource
from lightrl.data.sft import SFTSource
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.modules import GRPOLightningModule, PPOLightningModule
from lightrl.modules.advantages import GDPO, MaxRL
from lightrl.modules.experience import cut_minibatches
from lightrl.rewards.rules import SoftOverlong
from lightrl.types import Experience, SamplingParams, SupervisedBatch
from tests.modules.test_ppo import Keep, adam, fit, ppo, sgd, weights
from tests.toys import digits_reward, quickstart_model, quiet_trainer, sums_data

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return quickstart_model(tmp_path_factory.mktemp("model"), **SMALL)


def grpo(path: str | ModelSpec, **kwargs: Any) -> GRPOLightningModule:
    return GRPOLightningModule(path, optimizer=kwargs.pop("optimizer", sgd), kl=kwargs.pop("kl", None), **kwargs)


# ---- dynamic sampling ----------------------------------------------------------------------------------------------


class FirstSums:
    """Only prompts that begin with an even digit get rewards that differ within a group."""

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [float(i) if int(p[1]) % 2 == 0 else 1.0 for i, p in enumerate(prompts)]


def test_flat_groups_are_refilled_and_the_batch_keeps_its_size(model_path: str) -> None:
    plain = fit(grpo(model_path), rewards=[FirstSums()])
    keep = fit(grpo(model_path), rewards=[FirstSums()], max_refills=20)
    flat = sum(int(p[1]) % 2 for p in plain.rollouts[0].prompts[::4])
    assert 0 < flat < 8, "the toy must have groups of both kinds"
    rollouts, metrics = keep.rollouts[0], keep.metrics[0]
    assert len(rollouts) == 32 and all(int(p[1]) % 2 == 0 for p in rollouts.prompts)
    assert len(set(rollouts.prompts)) == 8, "further prompts, not the same ones again"
    assert metrics["rollout/flat_groups"] == 0 and metrics["reward/zero_advantage_fraction"] == 0
    assert metrics["rollout/dropped_groups"] >= flat and metrics["rollout/refills"] >= 1
    assert metrics["reward/mean"] == pytest.approx(1.5)  # (0 + 1 + 2 + 3) / 4
    # dropped groups have 1.0 each: (8 * 1.5 + d * 1) / (8 + d)
    dropped = metrics["rollout/dropped_groups"]
    assert metrics["reward/sampled_mean"] == pytest.approx((8 * 1.5 + dropped) / (8 + dropped))


def test_the_bound_on_refills_completes_the_batch_with_dropped_groups(model_path: str) -> None:
    keep = fit(grpo(model_path), rewards=[FirstSums()], max_refills=1)
    endless = fit(grpo(model_path), rewards=[lambda completions, **_: [1.0] * len(completions)], max_refills=3)
    assert keep.metrics[0]["rollout/refills"] == 1 and len(keep.rollouts[0]) == 32
    m = endless.metrics[0]  # nothing has spread: 3 refills of 8 groups, all thrown away
    assert (m["rollout/refills"], m["rollout/dropped_groups"], m["rollout/flat_groups"]) == (3, 24, 8)
    assert len(endless.rollouts[0]) == 32


def test_the_prompt_cursor_counts_what_was_drawn(model_path: str) -> None:
    data = sums_data(rewards=[FirstSums()], max_refills=20, rollouts_per_epoch=2)
    keep = Keep()
    quiet_trainer(callbacks=[WeightSync(), keep]).fit(grpo(model_path), data)
    drawn = sum(8 + m["rollout/dropped_groups"] for m in keep.metrics)
    assert data.prompt_cursor == drawn == data.state_dict()["prompt_cursor"]
    prompts = {p for r in keep.rollouts for p in r.prompts}
    assert len(prompts) == 16, "no prompt comes twice within a pass"


def test_refills_that_cannot_work_are_refused(model_path: str) -> None:
    with pytest.raises(ValueError, match="max_refills=2 .* group_size of at least 2"):
        sums_data(max_refills=2, group_size=1)
    with pytest.raises(ValueError, match="max_refills=2 .* reward functions"):
        sums_data(max_refills=2, rewards=[])


# ---- which tokens are trained --------------------------------------------------------------------------------------


def test_truncated_responses_are_left_out_of_loss_and_normaliser(model_path: str) -> None:
    sampling = SamplingParams(max_new_tokens=6)
    keep = fit(ppo(model_path, mask_truncated=True, ppo_epochs=1), sampling=sampling)
    all_rows = fit(ppo(model_path, ppo_epochs=1), sampling=sampling)
    rollouts, masked, whole = keep.rollouts[0], keep.experiences[0], all_rows.experiences[0]
    cut = rollouts.truncated
    assert 0 < int(cut.sum()) < len(cut), "the toy must have responses of both kinds"
    assert not bool(masked.response_mask[cut].any()) and bool(masked.response_mask[~cut].any(1).all())
    assert torch.equal(masked.response_mask[~cut], rollouts.response_mask[~cut])
    assert bool((masked.advantages[cut] == 0).all()) and bool((whole.advantages[cut] != 0).any())
    assert keep.metrics[0]["rollout/response_length"] == all_rows.metrics[0]["rollout/response_length"]


def test_truncated_rows_stay_in_the_baseline_of_their_group(model_path: str) -> None:
    sampling = SamplingParams(max_new_tokens=6)
    masked = fit(grpo(model_path, mask_truncated=True), sampling=sampling)
    whole = fit(grpo(model_path), sampling=sampling).experiences[0]
    e, kept = masked.experiences[0], ~masked.rollouts[0].truncated
    torch.testing.assert_close(e.advantages[kept], whole.advantages[kept])


def test_the_top_entropy_filter_keeps_the_uncertain_tokens(model_path: str) -> None:
    keep = fit(grpo(model_path, top_entropy_fraction=0.25))
    e = keep.experiences[0]
    assert e.entropy is not None
    tokens = e.entropy[e.response_mask]
    count = math.ceil(0.25 * len(tokens))
    threshold = tokens.sort(descending=True).values[count - 1]
    trained = e.advantages != 0
    assert bool((e.entropy[trained] >= threshold).all())
    has_advantage = (fit(grpo(model_path)).experiences[0].advantages != 0) & (e.entropy >= threshold)
    assert torch.equal(trained, has_advantage)
    assert keep.metrics[0]["policy/top_entropy"] == pytest.approx(float(tokens[tokens >= threshold].mean()), rel=1e-5)
    assert int(e.response_mask.sum()) == len(tokens), "the normaliser counts every token"


def test_a_fraction_of_one_is_off_and_others_are_checked(model_path: str) -> None:
    assert fit(grpo(model_path)).experiences[0].entropy is None
    with pytest.raises(ValueError, match="top_entropy_fraction=0"):
        grpo(model_path, top_entropy_fraction=0.0)


def test_adaptive_entropy_by_hand() -> None:
    class Module:
        entropy_coef = 0.5

    control, module, seen = AdaptiveEntropy(target=1.0, step=0.1, start=0.2, maximum=0.35), Module(), []
    control.on_train_start(None, module)  # type: ignore[arg-type]
    assert module.entropy_coef == 0.0
    for entropy in (0.9, 0.8, 1.0, 1.1, 0.5):
        control.on_train_batch_end(None, module, {"policy/entropy": entropy}, None, 0)  # type: ignore[arg-type]
        seen.append((round(control.coef, 6), round(module.entropy_coef, 6)))
    # at or below the target: +0.1 up to 0.35, in use; above: -0.1, not in use
    assert seen == [(0.3, 0.3), (0.35, 0.35), (0.35, 0.35), (0.25, 0.0), (0.35, 0.35)]
    again = AdaptiveEntropy(target=1.0)
    again.load_state_dict(control.state_dict())
    again.on_train_start(None, module)  # type: ignore[arg-type]
    assert module.entropy_coef == pytest.approx(0.35)


def test_the_adaptive_coefficient_stays_above_its_minimum() -> None:
    class Module:
        entropy_coef = 0.0

    control = AdaptiveEntropy(target=1.0, step=0.1, start=0.2, minimum=0.15)
    control.on_train_batch_end(None, Module(), {"policy/entropy": 2.0}, None, 0)  # type: ignore[arg-type]
    assert control.coef == pytest.approx(0.15), "0.1 without a minimum"


def test_adaptive_entropy_changes_the_training(model_path: str) -> None:
    plain, steered = grpo(model_path), grpo(model_path)
    fit(plain, rollouts=2)
    keep = fit(steered, rollouts=2, callbacks=[AdaptiveEntropy(target=10.0, step=0.5)])
    assert "policy/entropy_coef" not in keep.metrics[0] and keep.metrics[1]["policy/entropy_coef"] == 0.5
    assert not torch.equal(weights(plain), weights(steered))


def test_rows_without_advantage_are_run_where_the_entropy_is_read(model_path: str) -> None:
    """Without a reader they are left out, and `policy/entropy` is that of the others; with one it is that of all."""

    def metrics(reward: Any, *callbacks: Any) -> dict[str, float]:
        module = grpo(model_path)
        sampling = SamplingParams(max_new_tokens=6)
        return fit(module, rewards=[reward], callbacks=list(callbacks), sampling=sampling).metrics[0]

    every = metrics(lambda prompts, **_: [float(i % 2) for i in range(len(prompts))])
    some = metrics(FirstSums())
    exact = metrics(FirstSums(), AdaptiveEntropy(target=1e-6))
    flat = some["reward/zero_advantage_fraction"]
    assert 0 < flat < 1 and every["advantage/nonzero_fraction"] == 1
    # of FirstSums' 0, 1, 2, 3 all differ from their mean 1.5
    assert some["advantage/nonzero_fraction"] == exact["advantage/nonzero_fraction"] == pytest.approx(1 - flat)
    assert abs(some["policy/entropy"] - every["policy/entropy"]) > 1e-5
    assert exact["policy/entropy"] == pytest.approx(every["policy/entropy"], rel=1e-6)


# ---- rewards -------------------------------------------------------------------------------------------------------


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
        grpo(model_path, advantage=GDPO(), reward_clip=1.0)
    for estimator, name in ((GDPO(), "GDPO"), (MaxRL(), "MaxRL")):
        with pytest.raises(ValueError, match=f"callback RewardNormalization with advantage={name}"):
            fit(grpo(model_path, advantage=estimator), callbacks=[RewardNormalization()])


def test_gdpo_sees_reward_models_with_their_weights(model_path: str) -> None:
    from lightrl.models.reward import RewardModelSpec

    class FakeModel(torch.nn.Module):
        def score(self, rollouts: Any, budget: int) -> Tensor:
            return rollouts.response_mask.sum(1).float()

    module = grpo(model_path, advantage=GDPO())
    module.reward_model_specs = [RewardModelSpec("length", model_path, weight=3.0)]
    build = module.configure_model

    def with_fake() -> None:
        specs, module.reward_model_specs = module.reward_model_specs, []
        build()
        module.reward_model_specs = specs
        module.reward_models["length"] = FakeModel()

    module.configure_model = with_fake  # type: ignore[method-assign]
    r = fit(module).rollouts[0]
    assert r.reward_weights == {"digits_reward": 1.0, "length": 3.0} and set(r.reward_parts) == set(r.reward_weights)
    torch.testing.assert_close(r.rewards, r.reward_parts["digits_reward"] + 3 * r.reward_parts["length"])


# ---- ptx -----------------------------------------------------------------------------------------------------------

ANSWERS = SFTSource(rows=[{"prompt": f"{a:02d}+01=", "completion": str(a + 1)} for a in range(20)])


def test_ptx_gradient_is_that_of_the_supervised_loss(model_path: str) -> None:
    """With rewards that are all equal GRPO has no gradient, so that one SGD step is the supervised one."""
    equal: list[Any] = [lambda completions, **_: [1.0] * len(completions)]
    module = grpo(model_path, ptx_coef=0.5, max_grad_norm=None)
    keep = fit(module, rewards=equal, ptx=ANSWERS, ptx_batch_size=8)
    rows = keep.rollouts[0].supervised
    assert rows is not None and len(rows) == 8
    start = grpo(model_path)
    fit(start, rewards=equal)
    out = start.actor(rows.token_ids, rows.attention_mask, rows.response_mask).logprobs
    loss = -out.sum() / rows.response_mask.sum()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(start.actor.parameters()))])
    torch.testing.assert_close(weights(module), weights(start) - 0.1 * 0.5 * gradient, atol=1e-6, rtol=1e-5)
    assert keep.metrics[0]["loss/ptx"] == pytest.approx(loss.item(), rel=1e-5)


def test_ptx_micro_batches_do_not_change_the_update(model_path: str) -> None:
    results = []
    for tokens in (100_000, 40):
        module = ppo(model_path, ptx_coef=1.0, optimizer=sgd, micro_batch_tokens=tokens, minibatch_size=16)
        fit(module, ptx=ANSWERS, ptx_batch_size=8)
        results.append(weights(module))
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=1e-5)


def test_supervised_rows_are_dealt_out_over_minibatches() -> None:
    def rows(n: int) -> dict[str, Tensor]:
        ones = torch.ones(n, 2, dtype=torch.bool)
        return {"token_ids": torch.arange(2 * n).view(n, 2), "attention_mask": ones, "response_mask": ones}

    zero = torch.zeros(4, 2)
    experience = Experience(
        **rows(4), group_ids=torch.tensor([0, 0, 1, 1]), engine_logprobs=zero, advantages=zero, rewards=zero[:, 0],
        valid=torch.ones(4, dtype=torch.bool), supervised=SupervisedBatch(**rows(3), group_ids=torch.arange(3)),
    )  # fmt: skip
    parts = cut_minibatches(experience, 2, seed=0)
    assert [p.supervised.token_ids.tolist() for p in parts if p.supervised] == [[[0, 1], [2, 3]], [[4, 5]]]
    with pytest.raises(ValueError, match="ptx_batch_size=3 .* less than the 4 mini-batches"):
        cut_minibatches(experience, 4, seed=0)


def test_ptx_needs_rows_and_a_coefficient(model_path: str) -> None:
    with pytest.raises(ValueError, match=r"ptx=None \(data\) with ptx_coef=1.0 \(module\)"):
        fit(grpo(model_path, ptx_coef=1.0))
    with pytest.raises(ValueError, match=r"with ptx_coef=0.0 \(module\)"):
        fit(grpo(model_path), ptx=ANSWERS)


# ---- LoRA, freezing, experts ---------------------------------------------------------------------------------------


def test_lora_base_is_the_reference_and_only_adapters_are_saved(model_path: str) -> None:
    pytest.importorskip("peft")
    module = PPOLightningModule(ModelSpec(model_path, lora=LoraSpec(r=2)), optimizer=adam, kl_coef=0.1)
    keep = fit(module, rollouts=3)
    base = ppo(model_path)
    fit(base, rollouts=1)
    fresh = torch.nn.ModuleDict({"m": base.reference})["m"]  # never trained: the base model
    e = keep.experiences[2]
    expected = fresh(e.token_ids, e.attention_mask, e.response_mask).logprobs
    torch.testing.assert_close(e.ref_logprobs, expected, atol=1e-5, rtol=0)
    assert e.old_logprobs is not None and not torch.allclose(e.old_logprobs, expected, atol=1e-4)
    names = set(module.state_dict())
    assert names and all(".lora_" in name or "value_head" in name for name in names), names
    assert keep.metrics[2]["kl/engine_gap_max"] < 5e-5, "the engine samples from the merged weights"


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitsandbytes' 4-bit weights are there with CUDA")
def test_a_quantised_base_is_refused_without_cuda(model_path: str) -> None:
    spec = ModelSpec(model_path, lora=LoraSpec(r=2, quantize_4bit=True))
    with pytest.raises(ValueError, match="quantize_4bit=True needs a CUDA device: set it to false"):
        fit(PPOLightningModule(spec, optimizer=adam))


def test_frozen_parameters_stay_and_are_not_saved(model_path: str) -> None:
    module = grpo(ModelSpec(model_path, freeze=["*embed_tokens*"]))
    fit(module, rollouts=2)
    start = grpo(model_path)
    fit(start, rewards=[lambda completions, **_: [1.0] * len(completions)])
    pairs = dict(start.actor.named_parameters())
    changed = {name for name, p in module.actor.named_parameters() if not torch.equal(p, pairs[name])}
    assert changed and not any("embed_tokens" in name for name in changed)
    assert not any("embed_tokens" in name for name in module.state_dict())


def test_critic_warmup_keeps_the_actor_while_the_schedule_runs(model_path: str) -> None:
    def decay(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    actors: list[Tensor] = []

    class Watch(Keep):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            actors.append(weights(module).clone())

    module = ppo(model_path, critic_warmup_rollouts=2, ppo_epochs=1, lr_scheduler=decay)
    keep = Keep()
    watch = Watch()
    quiet_trainer(callbacks=[WeightSync(), keep, watch]).fit(module, sums_data(rollouts_per_epoch=3))
    assert torch.equal(actors[0], actors[1]) and torch.equal(actors[1], actors[2])
    assert not torch.equal(actors[2], weights(module)), "the third rollout trains the actor"
    # the schedule counts updates of the critic too: 1e-3, 5e-4, 2.5e-4
    assert [m["optim/lr_policy"] for m in keep.metrics] == pytest.approx([1e-3, 5e-4, 2.5e-4])


def test_the_aux_loss_reaches_the_router(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Qwen2MoeConfig, Qwen2MoeForCausalLM

    from tests.toys import QUICKSTART_MODEL

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART_MODEL)
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_experts=4,
        shared_expert_intermediate_size=8, num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, output_router_logits=True, initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path)
    equal: list[Any] = [lambda completions, **_: [1.0] * len(completions)]
    results = []
    for coefficient in (0.0, 0.5):
        module = grpo(str(tmp_path), aux_loss_coef=coefficient, max_grad_norm=None)
        keep = fit(module, rewards=equal, prompts_per_rollout=2)
        results.append((dict(module.actor.lm.named_parameters()), keep.metrics[0]))
    (plain, _), (balanced, metrics) = results
    moved = {name for name in plain if not torch.equal(plain[name], balanced[name])}
    assert any("gate.weight" in name for name in moved), moved
    assert metrics["loss/aux"] > 0


# ---- names, concurrency, success -----------------------------------------------------------------------------------


def test_reward_names_are_those_of_the_metrics(model_path: str) -> None:
    metrics = fit(grpo(model_path), rewards=[digits_reward], reward_names=["even"]).metrics[0]
    assert "reward/even" in metrics and "reward/digits_reward" not in metrics


@pytest.mark.parametrize("limit", [1, 3])
def test_reward_concurrency_bounds_the_calls_of_a_function(limit: int, model_path: str) -> None:
    active, seen, lock = 0, 0, threading.Lock()

    def slow(completions: list[str], **_: Any) -> list[float]:
        nonlocal active, seen
        with lock:
            active += 1
            seen = max(seen, active)
        time.sleep(0.05)
        with lock:
            active -= 1
        return [0.0] * len(completions)

    fit(grpo(model_path), rewards=[slow], reward_concurrency=limit)  # 8 groups
    assert seen == limit


def test_success_reward_decides_what_pass_at_k_counts(model_path: str) -> None:
    prompts = PromptSource(rows=[{"prompt": "01+01="}])
    for success, expected in ((0.5, 1.0), (0.75, 0.0)):
        module = grpo(model_path, success_reward=success)
        half: list[Any] = [lambda completions, **_: [0.5] * len(completions)]
        trainer = quiet_trainer()
        trainer.validate(module, sums_data(rewards=half, eval_prompts=prompts, eval_group_size=2), verbose=False)
        assert float(trainer.callback_metrics["eval/pass@2"]) == expected

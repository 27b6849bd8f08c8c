"""Which parameters are trained and saved: adapters, frozen ones, the critic alone, routers of experts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightrl.algorithms import PPOLightningModule
from lightrl.algorithms.module import ExtraLosses, Updates, make_optimizer
from lightrl.algorithms.ppo import CriticSpec
from lightrl.callbacks import WeightSync
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.objectives import KLInReward
from tests.algorithms.toys import fit, grpo, ppo, weights
from tests.rows import as_rows
from tests.toys import SMALL, Keep, adam, quickstart_model, quiet_trainer, sums_data


def test_lora_base_is_the_reference_and_only_adapters_are_saved(model_path: str) -> None:
    pytest.importorskip("peft")
    module = PPOLightningModule(ModelSpec(model_path, lora=LoraSpec(r=2)), optimizer=adam, kl=KLInReward(coef=0.1))
    keep = fit(module, rollouts=3)
    base = ppo(model_path)
    fit(base, rollouts=1)
    fresh = torch.nn.ModuleDict({"m": base.reference})["m"]  # never trained: the base model
    e = keep.experiences[2]
    expected = fresh(as_rows(e.token_ids, e.attention_mask, e.response_mask)).logprobs
    torch.testing.assert_close(e.ref_logprobs, expected, atol=1e-5, rtol=0)
    assert e.old_logprobs is not None and not torch.allclose(e.old_logprobs, expected, atol=1e-4)
    names = set(module.state_dict())
    assert names and all(".lora_" in name or "value_head" in name for name in names), names
    assert keep.metrics[2]["kl/engine_gap_max"] < 5e-5, "the engine samples from the merged weights"


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

    module = ppo(model_path, critic=CriticSpec(warmup_rollouts=2), ppo_epochs=1, lr_scheduler=decay)
    keep = Keep()
    watch = Watch()
    quiet_trainer(callbacks=[WeightSync(), keep, watch]).fit(module, sums_data(rollouts_per_epoch=3))
    assert torch.equal(actors[0], actors[1]) and torch.equal(actors[1], actors[2])
    assert not torch.equal(actors[2], weights(module)), "the third rollout trains the actor"
    # the schedule counts updates of the critic too: 1e-3, 5e-4, 2.5e-4
    assert [m["optim/lr_policy"] for m in keep.metrics] == pytest.approx([1e-3, 5e-4, 2.5e-4])


def test_critic_warmup_keeps_the_actor_whatever_its_groups_are_called(model_path: str) -> None:
    class TwoGroups(PPOLightningModule):
        def parameter_groups(self) -> list[dict[str, Any]]:
            policy, critic = super().parameter_groups()
            first, *others = policy["params"]
            return [critic, {"params": [first], "name": "first"}, {"params": others}]

    module = TwoGroups(model_path, CriticSpec(warmup_rollouts=9), optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
    fit(module)
    start = AutoModelForCausalLM.from_pretrained(model_path)
    assert all(torch.equal(p, q) for p, q in zip(module.actor.lm.parameters(), start.parameters(), strict=True))


def test_the_aux_loss_reaches_the_router(tmp_path: Path) -> None:
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "shared_expert_intermediate_size": 8}
    path = quickstart_model(
        tmp_path, family="Qwen2Moe", output_router_logits=True, num_experts_per_tok=2, **SMALL, **experts
    )
    equal: list[Any] = [lambda completions, **_: [1.0] * len(completions)]
    results = []
    for coefficient in (0.0, 0.5):
        module = grpo(path, extra_losses=ExtraLosses(aux_loss_coef=coefficient), updates=Updates(max_grad_norm=None))
        keep = fit(module, rewards=equal, prompts_per_rollout=2)
        results.append((dict(module.actor.lm.named_parameters()), keep.metrics[0]))
    (plain, _), (balanced, metrics) = results
    moved = {name for name in plain if not torch.equal(plain[name], balanced[name])}
    assert any("gate.weight" in name for name in moved), moved
    assert metrics["loss/aux"] > 0


def test_rates_below_what_bfloat16_weights_can_take_are_warned_of() -> None:
    """Below 2^-9 of the weights' size a step of Adam leaves nearly all as they are, which float32 weights take."""
    torch.manual_seed(0)
    start = 0.02 * (torch.rand(64, 64) + 0.5)  # within one power of two and the next
    strategy = SingleDeviceStrategy()

    def moved(rate: float, dtype: torch.dtype) -> tuple[float, list[str]]:
        weight = torch.nn.Parameter(start.to(dtype, copy=True))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = make_optimizer(lambda x: torch.optim.AdamW(x, lr=rate, weight_decay=0.0), [weight], strategy)
        weight.grad = torch.randn_like(weight)
        made.step()
        return float((weight != start.to(dtype)).float().mean()), [str(w.message) for w in caught]

    lost, texts = moved(1e-5, torch.bfloat16)
    assert lost < 0.01 and len(texts) == 1 and "lr=1e-05" in texts[0] and "bf16-mixed" in texts[0]
    assert moved(1e-5, torch.float32) == (1.0, [])
    kept, texts = moved(3e-4, torch.bfloat16)
    assert kept > 0.99 and texts == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = [torch.nn.Parameter(start.bfloat16())]
        make_optimizer(lambda x: torch.optim.SGD(x, lr=1e-5), weight, strategy)
        zero = DeepSpeedStrategy.__new__(DeepSpeedStrategy)  # it cannot be made without CUDA
        make_optimizer(lambda x: torch.optim.Adam(x, lr=1e-5), weight, zero)

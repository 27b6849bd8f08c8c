"""LoRA: merged weights equal peft's own merge, the base serves as reference, names are Hugging Face's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.models.lora import add_lora
from lightrl.models.policy import PolicyModel, named_hf_weights
from lightrl.models.spec import LoraSpec
from tests.models.test_routing import moe
from tests.toys import build

pytest.importorskip("peft")


def adapted(tied: bool = True, **changes: Any) -> PolicyModel:
    lm = build("qwen2", tie_word_embeddings=tied)
    add_lora(lm, LoraSpec(r=3, alpha=7.0, **changes))
    torch.manual_seed(1)
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:  # peft starts at 0, where nothing would show
            torch.nn.init.normal_(parameter, std=0.3)
    return PolicyModel(lm)


def test_of_a_mixture_of_experts_all_linear_leaves_experts_and_routers_out() -> None:
    for kind in ("Qwen3Moe", "GraniteMoe"):
        lm = moe(kind, **({"num_local_experts": 4} if kind == "GraniteMoe" else {}))
        names = {name for name, _ in lm.named_parameters()}
        add_lora(lm, LoraSpec(r=3))
        trained = {name.split(".lora_")[0].rpartition(".")[2] for name, p in lm.named_parameters() if p.requires_grad}
        assert trained >= {"q_proj", "v_proj"} and not trained & {"experts", "gate", "layer", "base_layer", "lm_head"}
        assert {name for name, _ in named_hf_weights(PolicyModel(lm))} == names
    with pytest.raises(ValueError, match=r"lora.target_modules=.*experts is not a linear layer"):
        add_lora(moe("Qwen3Moe"), LoraSpec(target_modules=["gate_proj", "up_proj", "down_proj"]))


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_equal_pefts(tied: bool) -> None:
    policy = adapted(tied)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    got = {name: tensor.clone() for name, tensor in named_hf_weights(policy)}
    assert all(p.equal(before[name]) for name, p in policy.named_parameters())  # the module is not changed
    merged = copy.deepcopy(policy.lm)
    for module in merged.modules():
        if hasattr(module, "base_layer"):
            module.merge()
    expected = {name.replace(".base_layer", ""): p for name, p in merged.named_parameters() if ".lora_" not in name}
    assert (
        list(got) == list(expected) == [name for name, _ in build("qwen2", tie_word_embeddings=tied).named_parameters()]
    )
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bfloat16_base_rounds_off_small_updates_when_merged(dtype: torch.dtype) -> None:
    policy = adapted().to(dtype)
    layer = policy.lm.model.layers[0].self_attn.q_proj
    layer.base_layer.weight.data.fill_(1.0)
    layer.lora_A["default"].weight.data.fill_(1.0)
    layer.lora_B["default"].weight.data.fill_(0.0019 / 7.0)  # sum of B A: 3 B, alpha / r: 7 / 3
    merged = dict(named_hf_weights(policy))["model.layers.0.self_attn.q_proj.weight"]
    assert merged.float().mean().item() == pytest.approx(1.0 if dtype == torch.bfloat16 else 1.0019, abs=1e-6)


def test_gathering_goes_through_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters may be shards: only gathered tensors are read, in the same order everywhere."""
    policy, seen = adapted(), []
    names = {id(p): name for name, p in policy.lm.named_parameters()}
    open_now = []

    @contextmanager
    def gather(parameter: Tensor) -> Iterator[Tensor]:
        seen.append(names[id(parameter)])
        open_now.append(parameter)
        yield parameter.detach() * 2.0
        open_now.pop()

    monkeypatch.setattr("lightrl.models.policy.gathered", gather)
    monkeypatch.setattr("lightrl.models.lora.gathered", gather)
    for _, tensor in named_hf_weights(policy):
        assert 1 <= len(open_now) <= 3  # one layer at a time
        assert not tensor.requires_grad
    assert sorted(seen) == sorted(names.values()) and not open_now

"""Fused norm, SwiGLU and rotary embedding equal transformers' own, in values and gradients, and only where known."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from lightrl.kernels import fusing
from lightrl.kernels.cpu import fused
from lightrl.kernels.cpu.fused import rms_norm, rotate, swiglu
from lightrl.kernels.cuda import liger
from lightrl.kernels.fusing import Kernels, fuse
from lightrl.models.packing import attention
from lightrl.models.policy import PolicyModel

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
# model: (norms, MLPs, attentions) that are known in its two layers
FAMILIES = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), (5, 2, 2)),
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)), (5, 2, 2)),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)), (9, 2, 2)),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**SIZES)), (5, 2, 2)),
    "mixtral": (lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)), (5, 0, 2)),
    "gemma2, whose norm adds 1 and whose MLP has GELU": (
        lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8)),
        (0, 0, 2),
    ),
    "llama with another activation": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")), (5, 0, 2)),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)), (0, 0, 0)),
}  # fmt: skip


@pytest.fixture(params=[1 << 17, 100], ids=["one block", "many blocks"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "BLOCK", request.param)


def random(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


@pytest.mark.usefixtures("block")
def test_rms_norm() -> None:
    x, weight = random(3, 7, 8), random(8)
    norm = LlamaRMSNorm(8, eps=1e-5).double()
    norm.weight = nn.Parameter(weight.detach())
    # transformers rounds to float32 within
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), norm(x), rtol=1e-6, atol=1e-6)
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), exact, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight))


@pytest.mark.usefixtures("block")
def test_swiglu() -> None:
    gate, up = random(2, 5, 12), random(2, 5, 12)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(swiglu, (gate, up))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("rows", [1, 2], ids=["shared positions", "a row each"])
def test_rotate(rows: int) -> None:
    q, k = random(2, 3, 5, 8), random(2, 1, 5, 8)
    cos, sin = random(rows, 5, 8, grad=False), random(rows, 5, 8, grad=False)
    own = apply_rotary_pos_emb(q, k, cos, sin)
    for ours, theirs in zip((rotate(q, cos, sin), rotate(k, cos, sin)), own, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (q,))


def listed(name: str) -> Any:
    folder, kind = name.split(".")
    return getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), kind)


@pytest.mark.parametrize("name", fusing.NORMS)
def test_each_listed_norm_is_that_of_llama(name: str) -> None:
    norm = listed(name)(8, eps=1e-3)
    norm.weight.data.normal_()
    x = torch.randn(3, 5, 8)
    expected = norm(x)
    fuse(norm)
    assert "forward" in vars(norm)
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", fusing.MLPS)
def test_each_listed_mlp_is_that_of_llama(name: str) -> None:
    kind = listed(name)
    mlp = kind.__new__(kind)  # constructors differ: each reads a configuration of its own
    nn.Module.__init__(mlp)
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
    mlp.act_fn = nn.SiLU()
    x = torch.randn(3, 5, 8)
    expected = mlp(x)
    fuse(mlp)
    assert "forward" in vars(mlp)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", fusing.ATTENTIONS)
def test_each_listed_attention_rotates_as_llama_does(name: str) -> None:
    kind = listed(name)
    own = kind.forward.__globals__["apply_rotary_pos_emb"]
    assert "apply_rotary_pos_emb" in kind.forward.__code__.co_names  # the name that is given another meaning
    q, k = random(2, 4, 5, 8, grad=False), random(2, 2, 5, 8, grad=False)
    cos, sin = random(2, 5, 8, grad=False), random(2, 5, 8, grad=False)
    for ours, theirs in zip((rotate(q, cos, sin), rotate(k, cos, sin)), own(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_an_attention_that_rotates_the_other_way_is_not_listed() -> None:
    """Nanochat's function reads like Llama's, but its `rotate_half` is (x2, -x1)."""
    kind = listed("nanochat.NanoChatAttention")
    q = random(2, 4, 5, 8, grad=False)
    cos, sin = random(2, 5, 8, grad=False), random(2, 5, 8, grad=False)
    theirs, _ = kind.forward.__globals__["apply_rotary_pos_emb"](q, q, cos, sin)
    assert not torch.allclose(rotate(q, cos, sin), theirs)
    assert "nanochat.NanoChatAttention" not in fusing.ATTENTIONS


def replaced(model: nn.Module) -> tuple[int, ...]:
    names = [type(m).__name__ for m in model.modules() if "forward" in vars(m)]
    return tuple(sum(name.endswith(end) for name in names) for end in ("RMSNorm", "MLP", "Attention"))


def loss_and_gradients(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same(family: str) -> None:
    make, known = FAMILIES[family]
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():  # norms start at 1, where a lost weight would not show
        parameter.data += 0.05 * torch.randn_like(parameter)
    ids = torch.randint(50, (3, 20))
    logits, gradients = loss_and_gradients(model, ids)
    fuse(model)
    assert replaced(model) == known
    ours, ours_gradients = loss_and_gradients(model, ids)
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    assert ours_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (ours_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.mark.parametrize("where", ["bfloat16", "autocast"])
def test_elsewhere_the_model_runs_its_own_code(where: str) -> None:
    model = tiny().to(torch.bfloat16 if where == "bfloat16" else torch.float32)
    ids = torch.randint(50, (2, 9))
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "autocast"):
        before = model(input_ids=ids).logits
        fuse(model)
        assert torch.equal(model(input_ids=ids).logits, before)


def test_what_somebody_else_replaced_stays() -> None:
    model = tiny()
    own = model.model.norm.forward = lambda x: x
    fuse(model)
    assert model.model.norm.forward is own


def test_a_forward_that_is_replaced_in_the_class_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do libraries of kernels such as Liger."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: 0 * x)
    model = tiny()
    fuse(model)
    assert replaced(model) == (0, 2, 2)


def test_a_class_of_the_same_name_elsewhere_is_not_known() -> None:
    model = tiny()
    model.model.norm = type("LlamaRMSNorm", (LlamaRMSNorm,), {"forward": lambda self, x: 0 * x})(32)
    fuse(model)
    assert "forward" not in vars(model.model.norm)


def test_one_switch_turns_all_off(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(50, (2, 9))
    rows = ids, torch.ones_like(ids).bool(), torch.arange(9).expand(2, 9) > 3
    models = [tiny() for _ in range(3)]
    on = PolicyModel(models[0], cpu_kernels=True)
    off = PolicyModel(models[1], cpu_kernels=False)
    monkeypatch.setenv("LIGHTRL_CPU_KERNELS", "0")
    by_variable = PolicyModel(models[2])
    assert [replaced(model) for model in models] == [(5, 2, 2), (0, 0, 0), (0, 0, 0)]
    expected = on(*rows).logprobs
    monkeypatch.setattr(attention, "cpu_attention", None)  # not even called
    for policy in (off, by_variable):
        torch.testing.assert_close(policy(*rows).logprobs, expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setenv("LIGHTRL_CPU_KERNELS", "no")
    with pytest.raises(ValueError, match=r"LIGHTRL_CPU_KERNELS='no': must be 0"):
        PolicyModel(tiny())


def test_a_copy_uses_its_own_weights() -> None:
    model, ids = tiny(), torch.randint(50, (2, 9))
    fuse(model)
    before = model(input_ids=ids).logits
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert torch.equal(model(input_ids=ids).logits, before)
    assert other(input_ids=ids).logits.abs().max() == 0


def test_checkpointing_gives_the_same_gradients() -> None:
    model, ids = tiny().train(), torch.randint(50, (2, 9))
    fuse(model)
    _, plain = loss_and_gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, checkpointed = loss_and_gradients(model, ids)
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in plain.items())


def test_kernels_are_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of the registry runs on its device alone, where it says that it fits."""
    called: list[str] = []

    def note(name: str, result: Any) -> Any:
        called.append(name)
        return result

    plain = Kernels(
        lambda *tensors: tensors[0].dtype == torch.float64,
        lambda x, weight, eps: note("norm", x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight),
        lambda gate, up: note("swiglu", F.silu(gate) * up),
        lambda q, k, cos, sin: note("rotate", apply_rotary_pos_emb(q, k, cos, sin)),
    )
    assert set(fusing.KERNELS) == {"cpu", *(["cuda"] if liger.installed() else [])}
    ids, model = torch.randint(50, (2, 9)), tiny().double()
    expected, gradients = loss_and_gradients(model, ids)
    monkeypatch.setitem(fusing.KERNELS, "meta", plain)
    fuse(model, cpu=False)
    assert replaced(model) == (5, 2, 2)
    assert torch.equal(loss_and_gradients(model, ids)[0], expected) and not called  # a CPU's are switched off
    elsewhere = copy.deepcopy(model).to("meta")
    x = torch.ones(2, 9, 32, dtype=torch.float64, device="meta")
    elsewhere.model.layers[0].mlp(elsewhere.model.norm(x))
    assert called == ["norm", "swiglu"]
    elsewhere.float().model.norm(x.float())
    assert called == ["norm", "swiglu"], "it does not fit float32"
    called.clear()
    monkeypatch.setitem(fusing.KERNELS, "cpu", plain)
    again = tiny().double()
    fuse(again)
    ours, ours_gradients = loss_and_gradients(again, ids)
    assert {*called} == {"norm", "swiglu", "rotate"}
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)  # transformers' norm rounds to float32 within
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_ligers_kernels_fit_one_dtype_on_cuda_alone() -> None:
    assert not liger.fits(torch.ones(2)) and not liger.fits(torch.ones(2, device="meta"))

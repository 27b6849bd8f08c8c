"""Fused norm, SwiGLU and rotary embedding equal transformers' own, in values and gradients, and only where known."""

from __future__ import annotations

import copy

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

from lightrl.models import fused
from lightrl.models.fused import fuse, rms_norm, rotate, swiglu

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

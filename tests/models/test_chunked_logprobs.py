"""Chunked log-probs and entropies against the plain formula, finite differences, and memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightrl.models import logprobs
from lightrl.models.logprobs import Distribution, LogitMap, TokenHead, chunked_logprobs, install_head
from lightrl.models.policy import PolicyModel
from tests.models.conftest import Batch
from tests.rows import as_rows
from tests.toys import build


def inputs(m: int = 7, d: int = 5, v: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=generator, dtype=dtype) for s in ((m, d), (v, d), (v,)))
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        bias.requires_grad_(),
        torch.randint(v, (m,), generator=generator),
    )


def test_by_hand() -> None:
    # logits (0, log 3), temperature 1: p = (1/4, 3/4); temperature 2: p = (1, sqrt 3) / (1 + sqrt 3)
    hidden, weight, target = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]]), torch.tensor([1])
    logprob, entropy = chunked_logprobs(hidden, weight, None, target, entropy=True)
    assert logprob.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert entropy is not None and entropy.item() == pytest.approx(
        0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-6
    )
    logprob, none = chunked_logprobs(hidden, weight, None, target, Distribution(2.0))
    assert none is None
    assert logprob.item() == pytest.approx(math.log(math.sqrt(3) / (1 + math.sqrt(3))), abs=1e-6)


@pytest.mark.parametrize("entropy", [True, False])  # without, probabilities are scaled on the narrow side of products
@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(1.5, 2.0)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_by_finite_differences(logit_map: LogitMap, with_bias: bool, entropy: bool) -> None:
    hidden, weight, bias, targets = inputs()

    def found(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        given = (hidden, weight, bias if with_bias else None, targets, Distribution(0.6, logit_map))
        both = chunked_logprobs(*given, entropy=entropy, chunk_elements=22)
        return tuple(both) if entropy else both[0]

    assert torch.autograd.gradcheck(found, (hidden, weight, bias if with_bias else bias.detach()))


def test_only_what_is_trained_gets_gradients() -> None:
    hidden, weight, bias, targets = inputs()
    chunked_logprobs(hidden, weight.detach(), None, targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None and bias.grad is None
    chunked_logprobs(hidden.detach(), weight, None, targets)[0].sum().backward()
    assert weight.grad is not None


def test_bfloat16_sums_in_float32() -> None:
    """A sum over 50,000 equal probabilities would be lost in bfloat16's 8 bits."""
    hidden, weight = torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(50_000, 4, dtype=torch.bfloat16)
    logprobs, entropy = chunked_logprobs(hidden, weight, None, torch.tensor([0, 1, 2]), entropy=True)
    assert entropy is not None and logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.full((3,), -math.log(50_000)))
    torch.testing.assert_close(entropy, torch.full((3,), math.log(50_000)))


def test_bfloat16_weight_gradient_is_accumulated_in_float32() -> None:
    """Many chunks of equal contributions: adding in bfloat16 would stall at 256 times the first."""
    hidden = torch.ones(1000, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    chunked_logprobs(hidden, weight, None, torch.zeros(1000, dtype=torch.long), chunk_elements=2)[0].sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.float(), torch.tensor([[500.0], [-500.0]]), atol=2, rtol=0)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize("entropy", [True, False])
def test_no_matrix_of_tokens_by_vocabulary(entropy: bool) -> None:
    hidden, weight, bias, targets = inputs(m=200, d=4, v=300, dtype=torch.float32)
    with Largest() as seen:
        picked, entropies = chunked_logprobs(hidden, weight, bias, targets, entropy=entropy, chunk_elements=10 * 300)
        (picked.sum() if entropies is None else picked.sum() + entropies.sum()).backward()
    assert seen.elements <= (5 if entropy else 10) * 300  # against 200 * 300 of the plain way


@pytest.mark.parametrize("entropy", [True, False])
def test_chunks_do_not_matter(entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk and several; none, some, and all of them kept."""

    def run() -> tuple[Tensor, ...]:
        hidden, weight, bias, targets = inputs(m=9, d=5, v=23)
        picked, entropies = chunked_logprobs(hidden, weight, bias, targets, Distribution(0.7), entropy=entropy)
        weights = torch.arange(9.0, dtype=torch.float64)
        loss = (picked * weights).sum() + (0.0 if entropies is None else (entropies * weights.flip(0)).sum())
        loss.backward()
        return picked.detach(), *(x.grad for x in (hidden, weight, bias) if x.grad is not None)

    expected = run()
    for elements, kept in ((1000, 0), (4 * 23, 0), (4 * 23, 100), (4 * 23, 1000)):
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(logprobs, "KEPT_ELEMENTS", kept)
        for got, value in zip(run(), expected, strict=True):
            torch.testing.assert_close(got, value)


def test_head_keeps_its_parameter_and_its_tie() -> None:
    lm = build("qwen2", tie_word_embeddings=True)
    before = lm.lm_head.weight
    install_head(lm)
    assert isinstance(lm.lm_head, TokenHead) and lm.lm_head.weight is before is lm.model.embed_tokens.weight
    assert "lm_head.weight" in lm.state_dict()
    hidden = torch.randn(2, 32)
    torch.testing.assert_close(lm.lm_head(hidden), hidden @ before.T)


def test_other_heads_are_refused() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    lm = build("qwen2", tie_word_embeddings=False)
    lm.lm_head = Odd(32, 97)
    with pytest.raises(ValueError, match="Odd"):
        PolicyModel(lm)


def test_changed_logits_are_found_out(batch: Batch) -> None:
    """A model that does something to its logits behind the head."""
    lm = build("qwen2")
    original = lm.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        out.logits = out.logits * 2.0
        return out

    lm.forward = scaled
    with pytest.raises(ValueError, match="own forward pass"):
        PolicyModel(lm)(as_rows(*batch[:3]))


def test_products_that_come_out_in_float32_are_as_exact_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of CUDA, with the two operations that only CUDA has written out: bfloat16 factors, float32 results."""
    calls = []

    def wide(name: str, own: Any) -> Any:
        def product(*args: Any, out_dtype: Any = None, out: Any = None) -> Any:
            if out_dtype is None:
                return own(*args, out=out)
            calls.append(name)
            if out is None:
                return args[0].float() @ args[1].float()
            before = args[0].clone() if name == "addmm" else 0.0
            return out.copy_(before + args[-2].float() @ args[-1].float())

        return product

    monkeypatch.setattr(logprobs, "_wide_products", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "mm", wide("mm", torch.mm))
    monkeypatch.setattr(torch, "addmm", wide("addmm", torch.addmm))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(11, 8, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(11, (20,), generator=generator)
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    picked, entropy = chunked_logprobs(hidden, weight, None, targets, entropy=True, chunk_elements=88)
    assert picked.dtype == torch.float32
    torch.testing.assert_close(picked.double(), exact.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(1), atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad(
        exact.gather(1, targets[:, None]).sum() - (exact.exp() * exact).sum(), (hidden, weight)
    )
    got = torch.autograd.grad(picked.sum() + entropy.sum(), (hidden, weight))
    for ours, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-2, rtol=1e-2)  # bfloat16 logit gradients
    assert {"mm", "addmm"} == set(calls)

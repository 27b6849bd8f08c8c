"""Sampling support replay: log-probs over what top-p, top-k and min-p left, as the engine recorded it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.engines.base import EngineContext
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.environments.bridges import Tokens
from lightrl.environments.ledger import Ledger
from lightrl.models.loading import load_causal_lm
from lightrl.models.logprobs import Distribution, LogitMap, chunked_logprobs
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.records import Completion, GenerationRequest, SamplingParams, Support
from tests.models.conftest import Batch
from tests.rows import as_rows
from tests.toys import build, quickstart_model

LAYOUTS = ("padded", "packed", "shared_prefix")


def test_by_hand() -> None:
    # logits (0, log 2, log 3, log 6): over the words 0 and 2 p = (1/4, 3/4), over all of them (1, 2, 3, 6) / 12
    weight = torch.tensor([1.0, 2.0, 3.0, 6.0]).log()[:, None]
    support = Support.of([[0, 2], []])
    logprobs, entropy = chunked_logprobs(
        torch.ones(2, 1), weight, None, torch.tensor([2, 2]), Distribution(support=support), entropy=True
    )
    assert logprobs.tolist() == pytest.approx([math.log(3 / 4), math.log(3 / 12)], abs=1e-6)
    assert entropy is not None
    assert entropy[0].item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3), abs=1e-6)


@pytest.mark.parametrize("logit_map", [LogitMap(), LogitMap(1.5, 2.0)])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("chunk_elements", [22, 1000])
def test_values_and_gradients_equal_a_dense_masked_softmax(
    logit_map: LogitMap, entropy: bool, chunk_elements: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((7, 5), (11, 5), (11,))
    )
    keep = torch.rand(7, 11, generator=generator) < 0.4
    targets = torch.randint(11, (7,), generator=generator)
    keep[torch.arange(7), targets] = True
    keep[3] = True
    kept: list[Any] = [row.nonzero().squeeze(1) for row in keep]
    kept[3] = []  # nothing was cut
    got = chunked_logprobs(
        hidden, weight, bias, targets, Distribution(0.7, logit_map, Support.of(kept)), entropy=entropy,
        chunk_elements=chunk_elements,
    )  # fmt: skip
    z = torch.nn.functional.linear(hidden, weight, bias) * logit_map.scale
    z = logit_map.cap * torch.tanh(z / logit_map.cap) if logit_map.cap else z
    table = (z / 0.7).masked_fill(~keep, -torch.inf).log_softmax(-1)
    entropies = -(table.exp() * table.masked_fill(~keep, 0.0)).sum(-1)
    expected = table.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(got[0], expected)
    weights = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    sums = [(got[0] * weights[0]).sum(), (expected * weights[0]).sum()]
    if entropy:
        assert got[1] is not None
        torch.testing.assert_close(got[1], entropies)
        sums[0] = sums[0] + (got[1] * weights[1]).sum()
        sums[1] = sums[1] + (entropies * weights[1]).sum()
    ours, dense = (torch.autograd.grad(total, (hidden, weight, bias)) for total in sums)
    for a, b in zip(ours, dense, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_the_support_of_each_token(layout: Any, batch: Batch) -> None:
    generator = torch.Generator().manual_seed(1)
    vocabulary = 97
    keep = torch.rand(*batch.token_ids.shape, vocabulary, generator=generator) < 0.2
    keep.scatter_(2, batch.token_ids[..., None], True)
    keep[~batch.response_mask] = False
    supports: list[Support | None] = []
    for row, attention in enumerate(batch.attention_mask):
        supports.append(Support.of([keep[row, t].nonzero().squeeze(1) for t in range(int(attention.sum()))]))
    supports[5] = None  # a row without a cut
    policy = PolicyModel(build("qwen2"), layout=layout)
    out = policy(as_rows(*batch[:3], group_ids=batch.group_ids, temperature=0.7, supports=supports), entropy=True)
    expected = torch.zeros_like(out.logprobs)
    for row, ids in enumerate(batch.token_ids):
        logits = policy.lm(input_ids=ids[batch.attention_mask[row]][None]).logits[0] / 0.7
        for t in batch.response_mask[row].nonzero().squeeze(1).tolist():
            z = logits[t - 1] if row == 5 else logits[t - 1].masked_fill(~keep[row, t], -torch.inf)
            expected[row, t] = z.log_softmax(-1)[ids[t]]
    torch.testing.assert_close(out.logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformersEngine, PolicyModel]:
    path = quickstart_model(tmp_path_factory.mktemp("model"))
    engine = TransformersEngine()
    engine.start(EngineContext(model_path=path, dtype="float32", device="cpu", seed=0))
    return engine, PolicyModel(load_causal_lm(ModelSpec(path), trainable=False))


def scored(policy: PolicyModel, ids: list[int], start: int, temperature: float, support: Support | None) -> Tensor:
    tokens = torch.tensor([ids])
    response = torch.arange(len(ids))[None] >= start
    with torch.no_grad():
        out = policy(as_rows(tokens, torch.ones_like(response), response, temperature=temperature, supports=[support]))
    scores: Tensor = out.logprobs[0, start:]
    return scores


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [x for x in itertools.product((0.6, 1.4), (0.8, 1.0), (0, 3), (0.0, 0.1)) if x[1:] != (1.0, 0, 0.0)],
)
def test_the_on_policy_ratio_is_one_and_without_replay_the_kept_mass(
    sampler: tuple[TransformersEngine, PolicyModel], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    engine, policy = sampler
    sampling = SamplingParams(
        max_new_tokens=8, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, ignore_eos=True
    )
    prompt = [5, 6, 7]
    (group,) = engine.generate_all([GenerationRequest(prompt, sampling, seed=3, num_completions=3)])
    smallest = 1.0
    for completion in group.completions:
        support = Support.joined((3, None), (8, completion.support))
        ids, sampled = prompt + completion.token_ids, torch.tensor(completion.logprobs)
        replayed = scored(policy, ids, 3, temperature, support)
        torch.testing.assert_close((replayed - sampled).exp(), torch.ones(8), atol=2e-5, rtol=0)
        logits = policy.lm(torch.tensor([ids])).logits[0, 2:-1] / temperature
        assert completion.support is not None
        kept = completion.support.ids.long().split(completion.support.counts.tolist())
        mass = torch.stack([row.softmax(-1)[one].sum() for row, one in zip(logits, kept, strict=True)])
        full = scored(policy, ids, 3, temperature, None)
        torch.testing.assert_close((full - sampled).exp(), mass.detach(), atol=2e-5, rtol=0)
        smallest = min(smallest, float(mass.min()))
        assert all(token in one for token, one in zip(completion.token_ids, kept, strict=True))
    assert smallest < 0.99, "something must have been cut"


class NewRow:
    """A template that extends the first turn and rewrites the history at the second."""

    def __init__(self) -> None:
        self.answers: list[Tokens | None] = [Tokens([7]), None]

    def opened(self, messages: Any) -> list[Any]:
        return list(messages)

    def render(self, messages: Any, tools: Any) -> Tokens:
        return Tokens([1, 2])

    def extend(self, *_: Any) -> Tokens | None:
        return self.answers.pop(0)


def test_the_ledger_keeps_the_support_over_turns_and_forks() -> None:
    ledger = Ledger(NewRow())  # type: ignore[arg-type]
    ledger.begin([{"role": "user", "content": "x"}])
    reply = {"role": "assistant", "content": "y"}
    ledger.sampled(Completion([5], [-1.0], "", "stop", Support.of([[5, 6]])), 0, reply)
    ledger.answer([{"role": "user", "content": "x"}])
    ledger.sampled(Completion([8, 9], [-1.0, -1.0], "", "stop", Support.of([[8, 3], [9]])), 0, reply)
    ledger.answer([{"role": "user", "content": "x"}])
    ledger.sampled(Completion([4], [-1.0], "", "stop"), 0, reply)
    first, second = ledger.rows
    assert first.support is not None and second.support is None
    assert first.support.counts.tolist() == [0, 0, 2, 0, 2, 1] and first.support.ids.tolist() == [5, 6, 8, 3, 9]

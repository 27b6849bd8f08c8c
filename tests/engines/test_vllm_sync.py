"""Weight sync into the engine in this process: the gap before and after, and what a bad sync is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightrl.compat.vllm_process import _Bucket
from lightrl.records import Prompts, SamplingParams
from tests.engines.conftest import ask, change, load, reference_logprobs

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm")

PROMPTS = Prompts(token_ids=[[2, 5 + i, 17, 20 + i] for i in range(4)], texts=[""] * 4)
SEQUENCES = [[2, *range(5, 25)], [2, 40, 30, 20, 10, 9, 8]]


def canary_gap(engine, model) -> float:
    """Largest |engine - trainer| over the tokens of two fixed sequences, temperature 1."""
    pairs = zip(engine.logprobs(SEQUENCES), SEQUENCES, strict=True)
    return max(float((torch.tensor(got) - reference_logprobs(model, ids)).abs().max()) for got, ids in pairs)


def sampled_gap(engine, model, temperature: float) -> float:
    """The same over sampled tokens, against the trainer's log-probs of logits / temperature."""
    sampling = SamplingParams(max_new_tokens=24, temperature=temperature)
    worst = 0.0
    for i, group in ask(engine, PROMPTS, sampling, num_completions=3, seeds=[1, 2, 3, 4]):
        prompt = PROMPTS.token_ids[i]
        for completion in group.completions:
            expected = reference_logprobs(model, prompt + completion.token_ids, temperature)[len(prompt) - 1 :]
            worst = max(worst, float((expected - torch.tensor(completion.logprobs)).abs().max()))
    return worst


def test_gap_is_large_before_and_nil_after_a_sync(engine, tied_folder: Path) -> None:
    model = load(tied_folder)
    engine.load_weights(model.named_parameters(), policy_version=1)
    change(model)
    assert canary_gap(engine, model) > 0.5
    engine.load_weights(model.named_parameters(), policy_version=2)
    assert engine.policy_version == 2
    assert canary_gap(engine, model) <= 5e-5
    for temperature in (1.0, 0.7):
        assert sampled_gap(engine, model, temperature) <= 5e-5


def test_prefix_cache_of_old_weights_is_dropped(engine, tied_folder: Path) -> None:
    """A prompt longer than a cache block (32 tokens in this engine), generated from under both weights."""
    prompt = [2, *(5 + i % 40 for i in range(63))]
    prompts, sampling = Prompts([prompt], [""]), SamplingParams(max_new_tokens=8)
    model = load(tied_folder)
    for seed in (1, 2):
        engine.load_weights(change(model, seed).named_parameters(), policy_version=seed)
        ((_, group),) = ask(engine, prompts, sampling, num_completions=1, seeds=[7])
        ids = prompt + group.completions[0].token_ids
        gap = reference_logprobs(model, ids)[len(prompt) - 1 :] - torch.tensor(group.completions[0].logprobs)
        assert float(gap.abs().max()) <= 5e-5
        assert group.policy_version == seed


def test_bfloat16_weights_into_a_float32_engine(engine, tied_folder: Path) -> None:
    model = change(load(tied_folder))
    rounded = [(name, tensor.detach().bfloat16()) for name, tensor in model.named_parameters()]
    engine.load_weights(rounded, policy_version=1)
    model.load_state_dict({name: tensor.float() for name, tensor in rounded}, strict=False)
    assert canary_gap(engine, model) <= 5e-5


def test_streamed_tensors_may_be_overwritten(engine, tied_folder: Path) -> None:
    """Every tensor is spoilt as soon as the next one is asked for, as a reused gather buffer would be."""
    model = change(load(tied_folder))

    def stream():
        for name, parameter in model.named_parameters():
            buffer = parameter.detach().clone()
            yield name, buffer
            buffer.fill_(9.0)

    engine.load_weights(stream(), policy_version=1)
    assert canary_gap(engine, model) <= 5e-5


@pytest.mark.parametrize(
    ("left_out", "named"),
    [("0.self_attn.k_proj.weight", r"0\.self_attn\.qkv_proj"), ("embed_tokens.weight", r"embed_tokens\.weight")],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_parameter_left_out_is_named(engine, tied_folder: Path, left_out: str, named: str, first: bool) -> None:
    """k_proj is a part of a fused engine parameter, so vLLM itself does not miss it."""
    model = load(tied_folder)
    engine.load_weights(model.named_parameters(), policy_version=1)
    if first:
        engine._pushed = None
    kept = [(name, tensor) for name, tensor in model.named_parameters() if left_out not in name]
    with pytest.raises(ValueError, match=named if first else left_out.replace(".", r"\.")):
        engine.load_weights(kept, policy_version=2)
    assert engine.policy_version == -1
    engine.load_weights(model.named_parameters(), policy_version=3)
    assert canary_gap(engine, model) <= 5e-5


def test_nan_in_the_policy_is_told(engine, tied_folder: Path) -> None:
    model = load(tied_folder)
    engine.load_weights(model.named_parameters(), policy_version=1)
    engine._pushed = None
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        engine.load_weights(model.named_parameters(), policy_version=2)


def test_sleep_level_2_asks_for_a_push(engine, tied_folder: Path) -> None:
    model = load(tied_folder)
    engine.load_weights(model.named_parameters(), policy_version=5)
    engine.sleep()  # level 0: nothing
    assert engine.policy_version == 5
    engine.sleep_level = 2
    try:
        engine.sleep()
        assert engine.policy_version == -1
        engine.wake()
        engine.load_weights(model.named_parameters(), policy_version=6)
        assert canary_gap(engine, model) <= 5e-5
    finally:
        engine.sleep_level = 0


def test_workers_are_told_of_a_bucket_when_its_copies_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that know their device but hold nothing."""
    order: list[str] = []
    adapter: Any = SimpleNamespace(submit=lambda name, *_: order.append(name) or list)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: order.append(str(device)))
    )
    with FakeTensorMode():
        bucket = _Bucket(adapter, 0)
        bucket.memory = torch.empty(4096, dtype=torch.uint8)
        for name, device in (("a", "cuda:0"), ("b", "cuda:0"), ("c", "cpu")):
            bucket.put(name, torch.empty(4, 4, device=device), torch.bfloat16, 32)
        bucket.send()
    assert order == ["cuda:0", "lightrl_load_bucket"]

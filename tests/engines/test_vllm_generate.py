"""What the engine in this process samples: seeds, streaming, stops, limits, FIRE, structured outputs."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightrl.engines.vllm.conversion import HARMLESS_EXTRA
from lightrl.engines.vllm.engine import completion_seed
from lightrl.records import CompletionGroup, GenerationRequest, Prompts, SamplingParams
from tests.engines.conftest import EOS, ask, load

pytestmark = pytest.mark.vllm

pytest.importorskip("vllm")

PROMPTS = Prompts(token_ids=[[2, 5 + i, 17, 20 + i] for i in range(6)], texts=[""] * 6, indices=list(range(100, 106)))
SHORT = SamplingParams(max_new_tokens=4)
SEEDS = [11, 12, 13, 14, 15, 16]


@pytest.fixture(autouse=True)
def weights(engine, tied_folder: Path) -> torch.nn.Module:
    model = load(tied_folder)
    engine.load_weights(model.named_parameters(), policy_version=1)
    return model


def run(engine, prompts, sampling, num_completions=2, seeds=None) -> dict[int, CompletionGroup]:
    seeds = SEEDS[: len(prompts)] if seeds is None else seeds
    return dict(ask(engine, prompts, sampling, num_completions=num_completions, seeds=seeds))


def tokens(group: CompletionGroup) -> list[list[int]]:
    return [completion.token_ids for completion in group.completions]


def test_seeds_repeat_and_depend_neither_on_order_nor_on_number(engine) -> None:
    sampling = SamplingParams(max_new_tokens=12)
    whole = run(engine, PROMPTS, sampling)
    again = run(engine, PROMPTS, sampling)
    order = [4, 1, 5, 0, 3, 2]
    shuffled = run(engine, PROMPTS[order], sampling, seeds=[SEEDS[i] for i in order])
    for position, i in enumerate(order):
        alone = run(engine, PROMPTS[[i]], sampling, seeds=[SEEDS[i]])
        larger = run(engine, PROMPTS[[i]], sampling, num_completions=4, seeds=[SEEDS[i]])
        assert tokens(whole[i]) == tokens(again[i]) == tokens(shuffled[position]) == tokens(alone[0])
        assert tokens(larger[0])[:2] == tokens(whole[i])
    assert tokens(run(engine, PROMPTS, sampling, seeds=[s + 1 for s in SEEDS])[0]) != tokens(whole[0])
    assert len({tuple(t) for group in whole.values() for t in tokens(group)}) == 12


def test_a_prompt_is_prefilled_once_for_its_completions(engine, monkeypatch) -> None:
    scheduler = engine._adapter.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, steps = scheduler.schedule, []

    def recorded(*args, **kwargs):
        scheduled = schedule(*args, **kwargs)
        steps.append(scheduled.total_num_scheduled_tokens)
        return scheduled

    monkeypatch.setattr(scheduler, "schedule", recorded)
    prompt = Prompts(token_ids=[[2, *range(3, 42)]], texts=[""], indices=[0])
    run(engine, prompt, SHORT, num_completions=8, seeds=[1])
    assert steps[0] == 40 + 7 * 8, "all of the prompt once, and for the other seven what is beyond a block of 32 tokens"


def test_completion_seeds_do_not_collide_for_neighbouring_prompts() -> None:
    assert len({completion_seed(s, g) for s in range(50) for g in range(50)}) == 2500
    assert all(0 <= completion_seed(s, 0) < 2**63 for s in (0, -1, 2**64))


def test_random_states_of_the_trainer_are_left_alone(engine) -> None:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    run(engine, PROMPTS, SamplingParams(max_new_tokens=4))
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_eos_is_kept_and_nothing_is_added(engine) -> None:
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=60), num_completions=4)
    completions = [c for group in groups.values() for c in group.completions]
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    for c in completions:
        assert len(c.logprobs) == len(c.token_ids) and all(x <= 0 for x in c.logprobs)
        assert (c.token_ids[-1] == EOS) == (c.finish_reason == "stop")
        assert EOS not in c.token_ids[:-1]
        assert "<eos>" not in c.text
        assert c.finish_reason == "stop" or len(c.token_ids) == 60


def test_ignore_eos_and_min_new_tokens(engine) -> None:
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=40, ignore_eos=True), num_completions=4)
    assert {len(t) for group in groups.values() for t in tokens(group)} == {40}
    sampling = SamplingParams(max_new_tokens=40, min_new_tokens=30, stop_token_ids=[5, 6, 7])
    groups = run(engine, PROMPTS, sampling, num_completions=4)
    assert min(len(t) for group in groups.values() for t in tokens(group)) >= 30


def test_stop_strings_and_stop_tokens_are_kept(engine) -> None:
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=60, stop=["a", "7"]), num_completions=4)
    ended = [c for g in groups.values() for c in g.completions if c.token_ids[-1] != EOS and c.finish_reason == "stop"]
    assert ended and all(c.text[-1] in "a7" and not re.search("[a7]", c.text[:-1]) for c in ended)
    assert all(len(c.text) <= len(c.token_ids) == len(c.logprobs) for c in ended)
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=60, stop_token_ids=[9, 10]), num_completions=4)
    ended = [t for g in groups.values() for t in tokens(g) if t[-1] != EOS and len(t) < 60]
    assert ended and all(t[-1] in (9, 10) and not {9, 10} & set(t[:-1]) for t in ended)


def test_regex_json_and_extra(engine) -> None:
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=10, regex=r"[0-9]{3}\+[0-9]"))
    assert all(re.fullmatch(r"\d{3}\+\d", c.text) for g in groups.values() for c in g.completions)
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=10, json_schema={"type": "integer"}))
    assert all(re.match(r"-?\d", c.text) for g in groups.values() for c in g.completions)
    groups = run(engine, PROMPTS, SamplingParams(max_new_tokens=10, extra={"allowed_token_ids": [8, 9], "logprobs": 3}))
    assert {t for g in groups.values() for ids in tokens(g) for t in ids} <= {8, 9}


def test_harmless_extra_settings_change_no_token(engine) -> None:
    values = {"flat_logprobs": False, "logprobs": 3, "skip_reading_prefix_cache": True, "stream_interval": 4}
    settings = [{name: values.get(name, False)} for name in sorted(HARMLESS_EXTRA)]
    plain = run(engine, PROMPTS, SamplingParams(max_new_tokens=8, stop=["a"]))
    for extra in settings:
        other = run(engine, PROMPTS, SamplingParams(max_new_tokens=8, stop=["a"], extra=extra))
        for i, group in plain.items():
            assert tokens(other[i]) == tokens(group), extra
            for ours, theirs in zip(group.completions, other[i].completions, strict=True):
                assert theirs.logprobs == pytest.approx(ours.logprobs, abs=5e-5)


def test_top_k_top_p_min_p_and_greedy_log_probs_are_those_of_the_distribution(engine, weights) -> None:
    """top_k=2 leaves two tokens whose probabilities, renormalised, are what the engine reports."""
    prompt = PROMPTS.token_ids[0]
    with torch.no_grad():
        logits = weights(torch.tensor([prompt])).logits[0, -1]
    best, expected = logits.topk(2).indices.tolist(), logits.topk(2).values.log_softmax(-1).tolist()
    groups = run(engine, PROMPTS[[0]], SamplingParams(max_new_tokens=1, top_k=2), num_completions=20)
    got = {c.token_ids[0]: c.logprobs[0] for c in groups[0].completions}
    assert got == pytest.approx(dict(zip(best, expected, strict=True)), abs=5e-5)
    for one in (SamplingParams(max_new_tokens=1, temperature=0.0), SamplingParams(max_new_tokens=1, top_p=1e-6)):
        assert tokens(run(engine, PROMPTS[[0]], one, num_completions=1)[0]) == [[best[0]]]
    narrow = run(engine, PROMPTS[[0]], SamplingParams(max_new_tokens=1, min_p=0.99), num_completions=5)
    assert {t[0] for t in tokens(narrow[0])} == {best[0]}


def test_fire_heats_the_first_token_alone(engine, weights) -> None:
    """Log-probs are those of softmax(logits / 5) at token 1 and softmax(logits / 0.7) at token 2, top-k 8 in both."""
    prompt = PROMPTS.token_ids[0]
    sampling = SamplingParams(max_new_tokens=2, temperature=0.7, fire_temperature=5.0, top_k=8, ignore_eos=True)
    groups = run(engine, PROMPTS[[0]], sampling, num_completions=400)
    still = SamplingParams(max_new_tokens=1, temperature=0.0, fire_temperature=5.0)
    greedy = run(engine, PROMPTS[[0]], still, num_completions=1)
    with torch.no_grad():
        first = weights(torch.tensor([prompt])).logits[0, -1].topk(8)
    expected = (first.values / 5.0).log_softmax(-1)
    table = dict(zip(first.indices.tolist(), expected.tolist(), strict=True))
    counts = dict.fromkeys(table, 0)
    for completion in groups[0].completions:
        a, b = completion.token_ids
        counts[a] += 1
        assert completion.logprobs[0] == pytest.approx(table[a], abs=5e-5)
        with torch.no_grad():
            second = weights(torch.tensor([[*prompt, a]])).logits[0, -1].topk(8)
        at = second.indices.tolist().index(b)
        assert completion.logprobs[1] == pytest.approx((second.values / 0.7).log_softmax(-1)[at].item(), abs=5e-5)
    distance = 0.5 * sum(abs(counts[t] / 400 - np.exp(p)) for t, p in table.items())
    cold = dict(zip(first.indices.tolist(), (first.values / 0.7).softmax(-1).tolist(), strict=True))
    assert distance < 0.1 < 0.5 * sum(abs(counts[t] / 400 - p) for t, p in cold.items())
    assert tokens(greedy[0]) == [[first.indices[0].item()]]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(max_new_tokens=125), r"max_new_tokens=125.*dataset row 10\d.*max_model_len=128"),
        (SamplingParams(temperature=0.001), "=0.001"),
    ],
)
def test_bad_requests_are_refused_at_the_call(engine, sampling: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(engine, PROMPTS, sampling)
    assert not engine._adapter.busy


def test_exactly_full_sequence_is_served(engine) -> None:
    prompts = Prompts([[2] + [7] * 63], [""])
    groups = run(engine, prompts, SamplingParams(max_new_tokens=64, ignore_eos=True), num_completions=1, seeds=[3])
    assert len(tokens(groups[0])[0]) == 64


def test_what_a_constrained_reply_was_drawn_from_is_recorded_exactly(engine, weights) -> None:
    for constraint in (
        {"regex": "[0-9]{3}(a|b)*"},
        {"choice": ["yes", "no", "yesterday"]},
        {"grammar": 'root ::= "1" | "22"'},
    ):
        sampling = SamplingParams(max_new_tokens=8, extra={"structured_outputs": constraint})
        for seed in range(3):
            request = GenerationRequest([2, 5, 17], sampling, seed, num_completions=2, trained=False)
            (group,) = engine.generate_all([request])
            for said in group.completions:
                support = said.support
                assert support is not None and len(support) == len(said.token_ids)
                logits = weights(torch.tensor([request.token_ids + said.token_ids])).logits[0, 2:-1].float()
                at = 0
                for place, (token, count) in enumerate(zip(said.token_ids, support.counts.tolist(), strict=True)):
                    ids = support.ids[at : at + count].long()
                    at += count
                    assert token in ids and count < 50
                    exact = logits[place, token] - logits[place, ids].logsumexp(0)
                    assert abs(float(exact) - said.logprobs[place]) < 5e-4
    plain = GenerationRequest([2, 5, 17], SamplingParams(max_new_tokens=2), 0)
    assert engine.generate_all([plain])[0].completions[0].support is None


@pytest.mark.parametrize(
    "constraint", [{"regex": "["}, {"regex": 3}, {"json": {"type": 5}}, {"grammar": "x"}, {"choice": []}, {}, {"x": 1}]
)
def test_constraints_without_a_grammar_are_rejected_before_the_engine_has_them(engine, constraint) -> None:
    sampling = SamplingParams(max_new_tokens=2, extra={"structured_outputs": constraint})
    with pytest.raises(ValueError, match="vLLM rejects the request"):
        engine.check_request(GenerationRequest([2, 5], sampling, 0, trained=False))
    engine.check_request(GenerationRequest([2, 5], SamplingParams(max_new_tokens=2, extra={"logprobs": 3}), 0))


def test_likeliest_tokens_come_with_log_probs(engine) -> None:
    request = GenerationRequest([2, 5, 17], SamplingParams(max_new_tokens=3, extra={"logprobs": 3}), 0)
    (said,) = engine.generate_all([request])[0].completions
    assert [entry[token] for token, entry in zip(said.token_ids, said.top, strict=True)] == said.logprobs
    assert all(3 <= len(entry) <= 4 for entry in said.top)

"""Completions that go on over a change of weights, in each engine that can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.engines import EngineContext, TransformersEngine
from lightrl.records import Completion, CompletionGroup, GenerationRequest, SamplingParams
from tests.engines.conftest import change, load, reference_logprobs

LONG = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPTS = ([7, 3, 9], [4, 4, 8, 12, 5])


def own(folder: Path, **arguments: Any) -> TransformersEngine:
    engine = TransformersEngine(**arguments)
    engine.start(EngineContext(str(folder)))
    return engine


@pytest.fixture(params=["kernels", "plain", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
def any_engine(request: pytest.FixtureRequest, tied_folder: Path) -> Iterator[Any]:
    if request.param == "vllm":
        yield request.getfixturevalue("engine")
    else:
        yield own(tied_folder, cpu_kernels=request.param == "kernels")


def push(engine: Any, model: torch.nn.Module, version: int) -> None:
    engine.load_weights(model.named_parameters(), policy_version=version)


def sampled(engine: Any, requests: list[GenerationRequest]) -> list[CompletionGroup]:
    groups = {group.request: group for group in engine.generate_all(requests)}
    return [groups[request] for request in requests]


def gaps(model: torch.nn.Module, prompt: list[int], completion: Completion, version: int) -> torch.Tensor:
    """Per token of a version, between the log-prob that was recorded and one computed by a whole forward."""
    theirs = torch.tensor(completion.logprobs)
    ours = reference_logprobs(model, prompt + completion.token_ids)[len(prompt) - 1 :]
    return (theirs - ours).abs()[torch.tensor(completion.policy_versions) == version]


def interrupted(engine: Any, requests: list[GenerationRequest], after: int = 5) -> list[CompletionGroup]:
    """What has come of requests after so many steps, in which none ends; they stay under way."""
    engine.add(requests)
    for _ in range(after):
        assert not engine.step()
    groups = {group.request: group for group in engine.partials()}
    return [groups[request] for request in requests]


def ended(engine: Any, requests: list[GenerationRequest]) -> list[CompletionGroup]:
    groups: dict[GenerationRequest, CompletionGroup] = {}
    while len(groups) < len(requests):
        groups |= {group.request: group for group in engine.step()}
    return [groups[request] for request in requests]


@pytest.mark.parametrize("again", [False, True])
def test_each_tokens_log_prob_is_that_of_the_version_that_sampled_it(
    any_engine: Any, again: bool, tied_folder: Path
) -> None:
    """Of completions that are under way, or that are asked for again with what had come of them."""
    old, new = load(tied_folder), change(load(tied_folder))
    push(any_engine, old, 0)
    asked = [GenerationRequest(p, LONG, seed, 3) for seed, p in enumerate(PROMPTS)]
    whole, paused = sampled(any_engine, asked), interrupted(any_engine, asked)
    assert all(0 < len(c.token_ids) < 24 and c.finish_reason == "suspended" for g in paused for c in g.completions)
    if again:
        any_engine.abort(asked)
        for group, other in zip(paused, whole, strict=True):
            group.completions[2] = other.completions[2]
    push(any_engine, new, 1)
    if again:
        asked = [replace(request, begun=group.completions) for request, group in zip(asked, paused, strict=True)]
    for before, group in zip(paused, (sampled if again else ended)(any_engine, asked), strict=True):
        prompt = list(group.request.token_ids)
        assert not again or group.completions[2] == before.completions[2]  # it was over
        for place in (0, 1):
            whole_one, count = group.completions[place], len(before.completions[place].token_ids)
            assert whole_one.token_ids[:count] == before.completions[place].token_ids
            assert whole_one.finish_reason == "length"
            assert group.versions(place) == [0] * count + [1] * (24 - count)
            # Keys and values of all tokens are the new weights': what a fresh prefill gives.
            assert gaps(old, prompt, whole_one, 0).max() < 1e-4 and gaps(new, prompt, whole_one, 1).max() < 1e-4
            assert gaps(old, prompt, whole_one, 1).mean() > 0.05


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    "sampling", [replace(LONG, top_p=0.8), SamplingParams(max_new_tokens=24, min_new_tokens=8, stop=["1", "c"])]
)
def test_what_was_interrupted_under_the_same_weights_ends_as_if_it_had_not_been(
    kernels: bool, sampling: SamplingParams, tied_folder: Path
) -> None:
    engine = own(tied_folder, cpu_kernels=kernels)
    requests = [GenerationRequest(p, sampling, seed, 3) for seed, p in enumerate(PROMPTS)]
    whole = sampled(engine, requests)
    parts = interrupted(engine, requests)
    assert all(part.finish_reason == "suspended" for group in parts for part in group.completions)
    assert {len(c.token_ids) for group in parts for c in group.completions} == {5}
    engine.abort(requests)
    again = [replace(request, begun=group.completions) for request, group in zip(requests, parts, strict=True)]
    for expected, group in zip(whole, sampled(engine, again), strict=True):
        for one, other in zip(expected.completions, group.completions, strict=True):
            assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            if one.support is not None:
                assert other.support is not None and torch.equal(one.support.ids, other.support.ids)

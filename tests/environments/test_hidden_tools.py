"""Chat templates that hide tools, calls, or results from the model are rejected before anything is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from lightrl.environments import AgentProgram, Environment, EnvironmentEpisode, Reply, Step, ToolEnvironment
from lightrl.environments.bridges import TemplateBridge
from lightrl.records import SamplingParams
from tests.environments import programs
from tests.environments.families import CHATML, FAMILIES, Family, make_tokenizer
from tests.environments.scripted import ADD, ScriptedAttempts, ScriptedEngine, Turn, alone, call, closing, spell
from tests.environments.test_endpoint import CALL, Engine, group

# SmolLM2-Instruct's, whose model has no tools.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FIRST_TOOL = CHATML.replace("for tool in tools", "for tool in tools[:1]")
NO_CALLS = CHATML.replace("for c in m.tool_calls or []", "for c in []")
NO_ARGUMENTS = CHATML.replace("{{- c.function.arguments | tojson }}", "{{- '' }}")
NO_RESULTS = CHATML.replace("{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}", "")
ONLY_WITH_SYSTEM = CHATML.replace("if tools %}", "if tools and messages[0].role == 'system' %}")
MUL = {**ADD, "function": {**ADD["function"], "name": "mul"}}


def tokenizer(template: str) -> Any:
    family = FAMILIES["qwen2.5"]
    return make_tokenizer(Family(template, family.special, family.end, family.added, eos=family.eos))


@pytest.mark.parametrize(
    ("template", "hidden"),
    [
        (SMOLLM2, "its tools"),
        (FIRST_TOOL, "its tools"),
        (NO_CALLS, "its calls of tools in later turns"),
        (NO_ARGUMENTS, "its calls of tools in later turns"),
        (NO_RESULTS, None),
        (ONLY_WITH_SYSTEM, None),
        (CHATML, None),
        (FAMILIES["qwen3"].template, None),
        (FAMILIES["gemma"].template, "its tools"),
        (FAMILIES["phi"].template, "its tools"),
    ],
)
def test_a_template_is_asked_for_what_it_hides(template: str, hidden: str | None) -> None:
    assert TemplateBridge(tokenizer(template)).hidden([ADD, MUL]) == hidden


def make() -> ToolEnvironment:
    class Tools:
        def reset(self, **row: Any) -> None: ...

        def look(self) -> str:
            """Looks."""
            return "nothing"

    return ToolEnvironment(Tools)


@pytest.mark.parametrize("template", [SMOLLM2, NO_CALLS])
def test_a_named_parser_with_a_template_that_hides_tools_is_rejected_before_training(template: str) -> None:
    pytest.importorskip("vllm")
    program = AgentProgram(lambda row, base_url, api_key: 0.0, tool_parser="hermes")
    for episode in (EnvironmentEpisode(make, tool_parser="hermes"), program):
        with pytest.raises(ValueError, match=r"tool_parser='hermes'.*actor\.chat_template"):
            episode.setup(tokenizer(template))
    EnvironmentEpisode(make, tool_parser="hermes").setup(tokenizer(CHATML))


def test_tools_without_a_named_parser_are_rejected_at_the_first_attempt() -> None:
    async def never(request: Any) -> Any:
        raise AssertionError

    episode = EnvironmentEpisode(make)
    episode.setup(tokenizer(SMOLLM2))
    with pytest.raises(ValueError, match=r"actor\.chat_template"):
        asyncio.run(alone(episode, never, {}, SamplingParams(max_new_tokens=20)))


@pytest.mark.parametrize(("template", "hidden", "turns"), [(SMOLLM2, "its tools", 0), (NO_RESULTS, "role 'tool'", 1)])
def test_a_program_whose_tools_or_results_the_template_hides_stops_the_run(
    template: str, hidden: str, turns: int
) -> None:
    engine, program = Engine(CALL, "3"), AgentProgram(programs.chat)
    program.setup(tokenizer(template))
    with pytest.raises(ValueError, match=rf"actor\.chat_template.*{hidden}|{hidden}.*actor\.chat_template"):
        asyncio.run(closing(program, group(program, engine, {})))
    assert len(engine.asked) == turns


def test_messages_that_the_template_drops_stop_the_run() -> None:
    class Answers(Environment):
        tools = (ADD,)

        async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[dict[str, Any]]:
            return [{"role": "user", "content": "Go."}]

        async def step(self, reply: Reply) -> Step:
            result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"}
            return Step([result]) if reply.tool_calls else Step(done=True)

    own = tokenizer(NO_RESULTS)
    turns = [
        Turn(Reply("", None, [call(0, a=1, b=2)]), spell(own, "call<|im_end|>")),
        Turn(Reply("done"), spell(own, "done<|im_end|>")),
    ]
    episode = ScriptedAttempts(Answers, turns=turns, tokenizer=own)
    run = alone(episode, ScriptedEngine(turns), {}, SamplingParams(max_new_tokens=20))
    with pytest.raises(ValueError, match="role 'tool'"):
        asyncio.run(run)

"""Agents of many SDKs, each with its real package over loopback. The policy's words are scripted."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightrl.records import Completion, CompletionGroup, GenerationRequest, Support
from tests.environments import sdk_programs
from tests.environments.scripted import spell
from tests.environments.test_endpoint import END, TOKENIZER, Engine, play, sound


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ADD, MULTIPLY = _call("add", '{"a": 1, "b": 2}'), _call("multiply", '{"a": 3, "b": 4}')
TOOLS = (ADD, MULTIPLY, "12")
JSON = '{"value": 12}'
CODE = (
    "Thought: first the sum.\n<code>\ns = add(1, 2)\nprint(s)\n</code> and more",
    "Thought: now the product.\n<code>\np = multiply(s, 4)\nprint(p)\n</code>",
    "<code>\nfinal_answer(p)\n</code>",
)


@dataclass(frozen=True)
class Case:
    """A program of an SDK.

    Attributes:
        package: Name of the SDK's distribution.
        feature: What the program does.
        run: The program.
        texts: What the policy says.
        rows: Number of training rows; 1 if the SDK sends conversations back as they were.
        constrained: Number of turns that the SDK constrains.
        streams: Whether the SDK is asked to stream also.
        settings: Arguments of `AgentProgram`.
        refused: Number of requests that the SDK sends to find out what is supported.
    """

    package: str
    feature: str
    run: Callable[..., Any]
    texts: tuple[str, ...] = TOOLS
    rows: int = 1
    constrained: int = 0
    streams: bool = True
    settings: tuple[tuple[str, Any], ...] = ()
    refused: int = 0


FINAL = _call("final_result", JSON)
CASES = [
    Case("openai", "chat completions", sdk_programs.openai_chat),
    Case("openai", "responses", sdk_programs.openai_responses),
    Case("openai-agents", "responses", sdk_programs.agents_responses),
    Case("openai-agents", "chat completions", sdk_programs.agents_chat),
    Case("openai-agents", "`output_type`", sdk_programs.agents_output, (ADD, MULTIPLY, JSON), constrained=3),
    Case("langgraph", "`create_react_agent`", sdk_programs.langgraph),
    Case("langchain-openai", "`with_structured_output`", sdk_programs.langchain_schema, (JSON,), 1, 1, False),
    Case(
        *("langchain-openai", "`with_structured_output`, by function", sdk_programs.langchain_function),
        *((_call("Answer", JSON),), 1, 1, False),
    ),
    Case("pydantic-ai-slim", "plain", sdk_programs.pydantic_plain),
    Case("pydantic-ai-slim", "`output_type`", sdk_programs.pydantic_output, (ADD, MULTIPLY, FINAL), constrained=3),
    Case("pydantic-ai-slim", "`NativeOutput`", sdk_programs.pydantic_native, (ADD, MULTIPLY, JSON), constrained=3),
    Case(
        *("smolagents", '`ToolCallingAgent`, `constrained: "free"`', sdk_programs.smolagents_tools),
        *((ADD, MULTIPLY, _call("final_answer", '{"answer": "12"}')), 3, 0, True, (("constrained", "free"),)),
    ),
    Case(
        *("smolagents", "`ToolCallingAgent`", sdk_programs.smolagents_tools),
        *((ADD, MULTIPLY, _call("final_answer", '{"answer": "12"}')), 3, 3),
    ),
    Case("smolagents", "`CodeAgent`", sdk_programs.smolagents_code, CODE),
    Case("anthropic", "`tool_runner`", sdk_programs.anthropic_runner, refused=1),
    Case("anthropic", "a forced tool", sdk_programs.anthropic_forced, (MULTIPLY,), 1, 1, False),
]
RUNS = [
    pytest.param(case, stream, id=f"{case.run.__name__}{'-free' * bool(case.settings)}{'-stream' * stream}")
    for case in CASES
    for stream in ([False, True] if case.streams else [False])
]


@cache
def _grammars() -> Any:
    import xgrammar

    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=len(TOKENIZER)))


def fits(text: str, structured: dict[str, Any]) -> bool:
    """Whether a text matches what vLLM's structured outputs would allow."""
    import json

    import xgrammar

    kind, value = next(iter(structured.items()))
    compiler = _grammars()
    compiled = {
        "structural_tag": compiler.compile_structural_tag,
        "json": lambda schema: compiler.compile_json_schema(json.dumps(schema)),
        "json_object": lambda _: compiler.compile_json_schema('{"type": "object"}'),
        "regex": compiler.compile_regex,
    }[kind](value)
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.is_completed())


class Strict(Engine):
    """Ends replies at stop strings, says nothing that a constraint forbids, and records what a constraint left."""

    async def __call__(self, request: GenerationRequest) -> CompletionGroup:
        self.asked.append(request)
        number, text = request.seed % 100, self.texts[request.seed % 100 % len(self.texts)]
        ends = [text.index(stop) + len(stop) for stop in request.sampling.stop or [] if stop in text]
        text = text[: min(ends, default=len(text))]
        structured = (request.sampling.extra or {}).get("structured_outputs")
        if structured:
            assert fits(text, structured), (text, structured)
        ids = [*spell(TOKENIZER, text), *([] if ends else [END])]
        logprobs = [-(request.seed + 1) - i / 1000 for i in range(len(ids))]
        kept = Support.of([[token] for token in ids]) if structured else None
        return CompletionGroup(request, [Completion(ids, logprobs, "", "stop", kept)], number)


@pytest.mark.parametrize(("case", "stream"), RUNS)
def test_an_sdks_agent_trains_what_it_sampled(case: Case, stream: bool) -> None:
    try:
        importlib.metadata.version(case.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{case.package} is not installed: pip install 'lightrl-llm[agent-sdks]'")
    engine = Strict(*case.texts)
    (trajectory,) = play(case.run, engine, {"stream": stream}, tool_parser="hermes", **dict(case.settings))
    assert trajectory.failure is None
    assert trajectory.turn_rewards[-1] == 1.0
    assert trajectory.metrics["turns"] == len(case.texts)
    assert trajectory.metrics["constrained_turns"] == case.constrained and trajectory.metrics["masked_turns"] == 0
    assert trajectory.metrics["parse_errors"] == 0 and trajectory.metrics["refused_requests"] == case.refused
    trained = [row for row in trajectory.rows if any(turn >= 0 for turn in row.turn_ids)]
    assert len(trained) == case.rows
    engine.texts = tuple(text.partition(" and more")[0] for text in case.texts)
    sound(trajectory, engine)


def table() -> str:
    lines = ["| SDK | program | streaming | sequences per trajectory | constrained turns |", "|---|---|---|---|---|"]
    for case in CASES:
        constrained = f"{case.constrained} of {len(case.texts)}" if case.constrained else "none"
        streams = "yes" if case.streams else "-"
        lines.append(f"| {case.package} | {case.feature} | {streams} | {case.rows} | {constrained} |")
    return "\n".join(lines)


def test_the_docs_have_the_table_of_these_cases() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "programs.md").read_text()

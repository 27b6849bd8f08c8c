"""Replies are read by vLLM's parsers or by `renderers`, and malformed calls are told from none."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest

from lightrl.environments import EnvironmentEpisode, ToolEnvironment
from lightrl.environments.bridges import TemplateBridge
from lightrl.environments.parsing import PlainParser, VLLMParser, choose_parser
from lightrl.records import Completion
from tests.environments.families import FAMILIES, make_tokenizer
from tests.environments.scripted import ADD, Script, spell
from tests.environments.test_sdks import fits

QWEN = make_tokenizer(FAMILIES["qwen2.5"])
GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


LISTS = copy.deepcopy(ADD)
LISTS["function"]["parameters"]["properties"]["a"] = {"type": "array", "description": "some"}  # type: ignore[index]


def chosen(tokenizer: Any = QWEN, **settings: Any) -> Any:
    arguments = {"renderer": None, "tool_parser": None, "reasoning_parser": None, "tools": True}
    return choose_parser(tokenizer, **{**arguments, **settings})


def test_the_parser_that_fits_the_template_reads_parallel_calls() -> None:
    pytest.importorskip("vllm")
    reply = chosen().parse([], spell(QWEN, f"Let me see{GOOD}{GOOD}<|im_end|>"), [ADD])
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("add", {"a": 1})] * 2
    assert len({c.id for c in reply.tool_calls}) == 2
    assert (reply.content, reply.errors) == ("Let me see", [])


def test_the_parser_reads_by_the_tools_of_each_reply() -> None:
    """Qwen 3 Coder's parser converts what was written by the schema: another one under the same name is heeded."""
    pytest.importorskip("vllm")
    parser, tools = chosen(tool_parser="qwen3_coder"), [copy.deepcopy(ADD)]
    text = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>"
    values = []
    for kind in ("integer", "string", "string", "integer"):
        tools[0]["function"]["parameters"]["properties"]["a"] = {"type": kind}
        values += [call.arguments["a"] for call in parser.parse([], spell(QWEN, text), tools).tool_calls]
    assert values == [1, "1", "1", 1]


@pytest.mark.parametrize(
    "bad", ['{"name": "add", "arguments": {', '{"arguments": {}}', '{"name": "add", "arguments": 3}']
)
def test_a_malformed_call_is_an_error_and_no_call(bad: str) -> None:
    pytest.importorskip("vllm")
    reply = chosen().parse([], spell(QWEN, f"<tool_call>\n{bad}\n</tool_call><|im_end|>"), [ADD])
    assert reply.tool_calls == []
    assert len(reply.errors) == 1


def as_read(parser: Any, text: str) -> Any:
    ids = spell(QWEN, text)
    completion = Completion(ids, [0.0] * len(ids), "", "stop")
    return parser.read([], completion, [LISTS], TemplateBridge(QWEN, {}))


@pytest.mark.parametrize(
    "value",
    ["[" * 3000 + "]" * 3000, "9" * 5000, '{"x": "\\udcff"}'],
    ids=["nested", "digits", "surrogate"],
)
def test_arguments_that_no_template_can_write_are_parse_errors(value: str) -> None:
    pytest.importorskip("vllm")
    text = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {value}}}}}\n</tool_call><|im_end|>'
    reply = as_read(chosen(), text)
    assert reply.tool_calls == [] and len(reply.errors) == 1, reply.errors
    reply.errors[0].encode()


def test_without_tools_everything_is_content() -> None:
    parser = chosen(tools=False)
    assert isinstance(parser, PlainParser)
    assert parser.parse([], spell(QWEN, "hello<|im_end|>"), []).content == "hello"


def test_a_renderers_calls_are_forced_in_the_format_of_the_template() -> None:
    pytest.importorskip("renderers")
    pytest.importorskip("vllm")
    from lightrl.environments.renderers import make_renderer

    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    parser = chosen(tokenizer, renderer=make_renderer(tokenizer, "qwen3"))
    grammar = parser.grammar([ADD], (), {})
    said = GOOD.replace("1}", '1, "b": 2}')
    assert fits(said, grammar) and not fits(GOOD, grammar) and not fits("It is 3.", grammar)
    single = parser.grammar([ADD], (), {}, single=True)
    assert fits(said + said, grammar) and fits(said, single) and not fits(said + said, single)
    reply = parser.parse([], spell(tokenizer, f"{said}<|im_end|>"), [ADD])
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("add", {"a": 1, "b": 2})]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_token_that_ends_a_turn_is_in_no_reply_also_if_it_is_not_the_eos(name: str) -> None:
    tokenizer, end = make_tokenizer(FAMILIES[name]), FAMILIES[name].final_end or FAMILIES[name].end
    parser = VLLMParser(tokenizer, "smollm2")
    call = '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>'
    for text, calls in (("It is 3.", 0), (f"So:{call}", 1)):
        reply = parser.parse([], spell(tokenizer, f"{text}{end}"), [ADD])
        assert (reply.content, len(reply.tool_calls)) == (text.removesuffix(call), calls)


def test_a_renderer_reads_calls_thoughts_and_broken_calls() -> None:
    pytest.importorskip("renderers")
    from lightrl.environments.renderers import make_renderer

    tokenizer = make_tokenizer(FAMILIES["qwen3"])
    parser = chosen(tokenizer, renderer=make_renderer(tokenizer, "qwen3"))
    assert type(parser).__name__ == "RendererParser"
    prompt = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    reply = parser.parse(prompt, spell(tokenizer, f"<think>\nhm\n</think>\n\nso\n{GOOD}<|im_end|>"), [ADD])
    assert (reply.reasoning, reply.content.strip()) == ("hm", "so")
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("add", {"a": 1})]
    broken = parser.parse(prompt, spell(tokenizer, "<tool_call>\n{oops\n</tool_call><|im_end|>"), [ADD])
    assert broken.tool_calls == []
    assert "invalid_json" in broken.errors[0]


def test_a_template_whose_calls_no_parser_reads_is_rejected_before_a_model_loads() -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen2.5"])
    tokenizer.chat_template = tokenizer.chat_template.replace("tool_call>", "tool-use>")

    class Calculator:
        def add(self, a: int, b: int) -> int:
            """Adds.

            Args:
                a: Number.
                b: Number.
            """
            return a + b

    with pytest.raises(ValueError, match="^tool_parser=None"):
        EnvironmentEpisode(partial(ToolEnvironment, Calculator)).setup(tokenizer)
    EnvironmentEpisode(lambda: Script([])).setup(tokenizer)

"""Training templates: tools for models without, one row per conversation, and SmolLM2's lists of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrl.cli.doctor import _tools
from lightrl.environments import AgentProgram
from lightrl.environments.bridges import TemplateBridge
from lightrl.environments.ledger import Ledger
from lightrl.environments.parsing import choose_parser
from lightrl.models.chat_templates import training_template
from lightrl.models.spec import ModelSpec
from lightrl.models.turns import end_of_turn
from lightrl.records import Completion
from tests.environments.families import FAMILIES, Family, make_tokenizer
from tests.environments.scripted import ADD, spell
from tests.environments.test_hidden_tools import MUL, SMOLLM2
from tests.environments.test_sdks import fits

# Llama 3's first one.
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Gemma 3's takes a system message, which it writes into the user's.
GEMMA3 = "{% set n = 1 if messages[0].role == 'system' else 0 %}{{ bos_token }}{% for m in messages[n:] %}" + FAMILIES[
    "gemma"
].template.split("%}", 1)[1].replace(
    "+ m.content | trim", "+ (messages[0].content + '\n\n' if n and loop.first else '') + m.content | trim"
)
QWEN3 = FAMILIES["qwen3"].template.replace("ns.last", "ns.last_query_index").replace("(last=", "(last_query_index=")
TEMPLATES = {
    "smollm2": ("qwen2.5", SMOLLM2),
    "qwen2.5": ("qwen2.5", FAMILIES["qwen2.5"].template),
    "qwen3": ("qwen3", QWEN3),
    "llama3": ("llama3", LLAMA3),
    "gemma": ("gemma", FAMILIES["gemma"].template),
    "gemma3": ("gemma", GEMMA3),
    "phi": ("phi", FAMILIES["phi"].template),
}
PARSERS = {"smollm2": "smollm2"}  # others: hermes


def tokenizer(name: str, training: bool = True) -> Any:
    family, template = TEMPLATES[name]
    own = FAMILIES[family]
    template = training_template(template) if training else template
    return make_tokenizer(
        Family(template, own.special, own.end, own.added, bos=own.bos, eos=own.eos, rstrip=own.rstrip)
    )


def call(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": number, "b": 2}}
    return {"type": "function", "id": f"call{number:05d}", "function": function}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05d}", "content": str(number)}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_training_template_shows_tools_and_keeps_a_conversation_in_one_row(name: str) -> None:
    own = tokenizer(name)
    bridge, thought = TemplateBridge(own), "<think>\nhm\n</think>\n\n" if "qwen3" in name else ""
    assert bridge.hidden([ADD, MUL]) is None
    bridge.check_roles([{"role": "tool"}], [ADD])
    ledger = Ledger(bridge, [ADD])
    ids = ledger.begin(
        [{"role": "system", "content": "Be brief."}] * (name != "gemma") + [{"role": "user", "content": "Go"}]
    )
    assert own.decode(ids).count("Be brief.") == (name != "gemma")

    def sampled(text: str, *numbers: int) -> list[int]:
        reply: Any = {"role": "assistant", "content": text}
        reply |= {"tool_calls": [call(number) for number in numbers]} if numbers else {}
        said = [*spell(own, f"anything {text}"), end_of_turn(own)]
        ledger.sampled(Completion(said, [0.0] * len(said), "", "stop"), 0, reply)
        return said

    said = [sampled(thought, 1, 3)]
    ledger.answer([result(1), result(3)])
    said.append(sampled(thought, 2))
    ledger.answer([result(2), {"role": "user", "content": "And now?"}])
    said.append(sampled(f"{thought}Done."))
    ledger.answer([{"role": "user", "content": "Again."}])
    said.append(sampled("Done."))
    (row,) = ledger.rows
    assert [[i for i, t in zip(row.token_ids, row.turn_ids, strict=True) if t == turn] for turn in range(4)] == said


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_tools_a_training_template_writes_what_the_own_one_writes(name: str) -> None:
    said = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "?"},
    ]
    texts = [tokenizer(name, training).apply_chat_template(said, tokenize=False) for training in (True, False)]
    assert texts[0] == texts[1]
    assert training_template(training_template(TEMPLATES[name][1])) == training_template(TEMPLATES[name][1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_writes_is_what_the_chosen_parser_reads(name: str) -> None:
    pytest.importorskip("vllm")
    own = tokenizer(name)
    parser = choose_parser(own, renderer=None, tool_parser=None, reasoning_parser=None, tools=True)
    assert parser.name == PARSERS.get(name, "hermes")
    said: list[Any] = [{"role": "user", "content": "Go"}]
    before = own.apply_chat_template(said, tools=[ADD], tokenize=False, add_generation_prompt=True)

    def written(*calls: Any) -> str:
        reply = {"role": "assistant", "content": "", "tool_calls": list(calls)}
        after = own.apply_chat_template([*said, reply], tools=[ADD], tokenize=False)
        return str(after.removeprefix(before).split(own.convert_ids_to_tokens(end_of_turn(own)))[0])

    one = written(call(1)).rpartition("</think>")[2].strip()
    assert fits(one, parser.grammar([ADD, MUL], ("add",), {}))
    assert not fits(one, parser.grammar([ADD, MUL], ("mul",), {}))
    text = written(call(1), call(2))
    reply = parser.parse([], spell(own, text), [ADD])
    assert [(each.name, each.arguments) for each in reply.tool_calls] == [("add", {"a": n, "b": 2}) for n in (1, 2)]
    assert reply.errors == []


CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"<tool_call>[{CALL}]</tool_call>", 1, ""),
        (f"So:\n<tool_call>[\n{CALL},\n{CALL}\n]</tool_call>", 2, "So:"),
        (f"<tool_call>{CALL}</tool_call><tool_call>{CALL}", 2, ""),
        ("<tool_call>[]</tool_call>", 0, ""),
        ("It is 3.", 0, "It is 3."),
        ('<tool_call>[{"name": "add", "argum', None, ""),
        ("<tool_call>[add(1)]</tool_call>", None, ""),
        ('<tool_call>[{"name": "add"}]</tool_call>', None, ""),
        ("<tool_call>[3]</tool_call>", None, ""),
        (f"<tool_call>[{CALL}]</tool_call><tool_call>", None, ""),
    ],
)
def test_smollm2s_lists_of_calls_are_read(text: str, calls: int | None, content: str) -> None:
    own = tokenizer("smollm2")
    parser = choose_parser(own, renderer=None, tool_parser=None, reasoning_parser=None, tools=True)
    reply = parser.parse([], spell(own, f"{text}<|im_end|>"), [ADD])
    if calls is None:
        assert reply.tool_calls == [] and len(reply.errors) == 1
    else:
        assert (len(reply.tool_calls), reply.content, reply.errors) == (calls, content, [])


def test_smollm2s_lists_of_calls_can_be_forced() -> None:
    pytest.importorskip("vllm")
    parser = choose_parser(tokenizer("smollm2"), renderer=None, tool_parser=None, reasoning_parser=None, tools=True)
    call = CALL.replace("1}", '1, "b": 2}')
    forced, chosen = parser.grammar([ADD], (), {}), parser.grammar([ADD], None, {"json": {"type": "integer"}})
    for text in (f"[{call}]", f"[{call}, {call}]", f"[\n{call},\n{call}\n]"):
        assert fits(f"<tool_call>{text}</tool_call>", forced) and fits(f"<tool_call>{text}</tool_call>", chosen)
    for text in ("[]", f"[{CALL}]", call, f"[{call.replace('add', 'sub')}]"):
        assert not fits(f"<tool_call>{text}</tool_call>", forced)
    assert fits("3", chosen) and not fits("3", forced)
    single = parser.grammar([ADD], (), {}, single=True)
    assert [fits(f"<tool_call>[{', '.join([call] * n)}]</tool_call>", single) for n in (1, 2)] == [True, False]


def test_a_spec_gets_its_training_template_from_its_own_tokenizer(tmp_path: Path) -> None:
    for name in ("smollm2", "qwen2.5"):
        tokenizer(name, training=False).save_pretrained(tmp_path / name)
    template = ModelSpec(str(tmp_path / "smollm2"), chat_template="training").chat_template
    assert template == training_template(SMOLLM2) != SMOLLM2
    assert ModelSpec(str(tmp_path / "qwen2.5"), chat_template="training").chat_template is None  # its own
    plain = tokenizer("qwen2.5")
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="chat_template"):
        ModelSpec(str(tmp_path / "plain"), chat_template="training")


def test_doctor_shows_the_parser_and_the_template() -> None:
    pytest.importorskip("vllm")

    def found(name: str, training: bool = True) -> list[str]:
        episode = AgentProgram(lambda row, base_url, api_key: 0.0)
        episode.setup(own := tokenizer(name, training))
        return [f"{kind} {text}" for kind, text in _tools(episode, own)]

    assert found("smollm2") == ["ok tools: tool_parser 'smollm2' (detected from the chat template)"]
    assert "actor.chat_template: training" in found("smollm2", training=False)[0]
    assert "'hermes'" in found("qwen3")[0] and len(found("qwen3")) == 1
    assert "actor.chat_template: training" in found("qwen3", training=False)[1]

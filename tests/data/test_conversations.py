"""Conversations of rows: tool calls, thoughts, tools, template variables, trained turns, and keys that Arrow adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from lightrl.data.preferences import PreferenceSource
from lightrl.data.prompts import PromptMixture, PromptSource, rendered_like
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.data.sft_loader import Example, SFTLoader
from lightrl.data.templates import as_messages, render_prompt
from lightrl.rollout import Evaluation
from tests.environments.families import FAMILIES, make_tokenizer
from tests.rows import prompt_and_completion
from tests.toys import sums_data

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD = {"name": "add", "parameters": {"type": "object", "properties": NUMBERS}}
SAY = {"name": "say", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": SAY}]


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(*calls: tuple[str, Any], content: Any = None, **more: Any) -> dict[str, Any]:
    """An assistant's turn that calls tools, as OpenAI's clients write it."""
    made = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made, **more}


def result(content: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call0000{number}", "name": "add"}


def chat(name: str) -> Any:
    return make_tokenizer(FAMILIES[name])


def trained(tokenizer: Any, rows: list[Example]) -> list[list[str]]:
    """Texts of each row's trained spans."""
    found = []
    batch = SFTLoader(rows, len(rows), 0, train=False).collate(rows)
    for ids, mask in zip(batch["token_ids"].tolist(), batch["response_mask"].tolist(), strict=True):
        spans: list[list[int]] = []
        for at, (token, is_trained) in enumerate(zip(ids, mask, strict=True)):
            if is_trained and (at == 0 or not mask[at - 1]):
                spans.append([])
            if is_trained:
                spans[-1].append(token)
        found.append([tokenizer.decode(span) for span in spans])
    return found


def target(tokenizer: Any, *messages: dict[str, Any], tools: Any = None, **options: Any) -> list[str]:
    source = SFTSource(rows=[{"messages": list(messages), "tools": tools}], messages_column="messages", **options)
    return trained(tokenizer, source.tokenized(tokenizer))[0]


# ---- what a trained turn holds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "arguments"), [(None, {"a": 1, "b": 2}), ("", '{"a": 1, "b": 2}')])
def test_tool_calls_of_the_trained_turn_are_learned(content: Any, arguments: Any) -> None:
    for name, expected in {
        "qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
        "llama3": '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>',
        "deepseek": 'function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n```'  # noqa: RUF001
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",  # noqa: RUF001
        "gpt-oss": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
    }.items():
        (text,) = target(chat(name), say("user", "1 and 2?"), calls(("add", arguments), content=content))
        assert text.endswith(expected), name


def test_thoughts_of_the_trained_turn_are_learned() -> None:
    question, expected = say("user", "1 and 2?"), "<think>\nadd\n</think>\n\n3<|im_end|>"
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert target(chat("qwen3"), question, say("assistant", "3", **{name: "add"})) == [expected]
    assert target(chat("qwen3"), question, say("assistant", "<think>\nadd\n</think>\n\n3")) == [expected]
    (text,) = target(chat("qwen3"), question, calls(("add", {"a": 1}), reasoning_content="well"), tools=TOOLS)
    assert text.startswith("<think>\nwell\n</think>\n\n<tool_call>") and text.endswith("</tool_call><|im_end|>")


@pytest.mark.parametrize(
    ("family", "turn", "named"),
    [
        ("qwen2.5", say("assistant", "3", reasoning_content="add"), "reasoning_content"),  # a template without thoughts
        ("deepseek", say("assistant", "<think>add</think>3"), "content"),  # one that cuts thoughts off
        ("gemma", calls(("add", {"a": 1})), "tool_calls"),  # one without calls
        ("llama3", calls(("add", {"a": 1}), ("add", {"a": 2})), "single tool-calls"),
    ],
)
def test_a_template_that_leaves_out_what_is_to_be_learned_is_rejected(family: str, turn: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        target(chat(family), say("user", "1 and 2?"), turn)


def test_calls_in_the_history_are_shown_or_rejected() -> None:
    history = [say("user", "1 and 2?"), calls(("add", {"a": 1, "b": 2})), result("3")]
    text, _ = render_prompt(chat("deepseek"), history)
    assert '{"a": 1, "b": 2}' in text and "None" not in text
    with pytest.raises(ValueError, match="tool_calls"):
        render_prompt(chat("phi"), [*history, say("user", "and?")])


def test_a_name_among_the_tools_does_not_count_as_a_call() -> None:
    tokenizer, shown = chat("qwen2.5"), "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}" + shown + "{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    history = [say("user", "?"), calls(("add", {"a": 1}), ("add", {"a": 1})), result("1"), result("1", 1)]
    with pytest.raises(ValueError, match="tool_calls"):
        render_prompt(tokenizer, history, tools=TOOLS)


def test_messages_are_brought_into_one_form() -> None:
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert as_messages([legacy]) == [{"role": "assistant", "content": "", "tool_calls": [call]}]
    plain = {"role": "user", "content": "1", "tool_calls": None, "name": None}
    assert as_messages([plain, {**plain, "tool_calls": []}]) == [say("user", "1")] * 2
    with pytest.raises(ValueError, match="content"):
        as_messages([say("user", None)])


# ---- which turns are trained -------------------------------------------------------------------------------------

TURNS = [
    say("user", "1 and 2?"),
    calls(("add", {"a": 1, "b": 2})),
    result("3"),
    say("assistant", "it is 3"),
    say("user", "and 4?"),
    say("assistant", "it is 7"),
]
CALL = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


def test_the_last_turn_or_all_turns_are_trained() -> None:
    tokenizer = chat("qwen2.5")
    assert target(tokenizer, *TURNS) == ["it is 7<|im_end|>"]
    assert target(tokenizer, *TURNS, train_on="all")[1:] == ["it is 3<|im_end|>", "it is 7<|im_end|>"]
    assert target(tokenizer, say("assistant", "hi"), *TURNS[:1], *TURNS[3:4], train_on="all") == ["it is 3<|im_end|>"]


def test_tokens_of_all_turns_are_those_of_the_rendered_conversation() -> None:
    tokenizer = chat("llama3")
    turns = [say("user", "1?"), say("assistant", "one"), say("user", "2?"), say("assistant", "two"), say("user", "3?")]
    (row,) = SFTSource(rows=[{"m": turns}], messages_column="m", train_on="all").tokenized(tokenizer)
    whole = tokenizer.apply_chat_template(turns[:4], tokenize=False)  # what follows the last trained turn is not needed
    assert tokenizer.decode(row.token_ids) == whole
    assert trained(tokenizer, [row]) == [["one<|eot_id|>", "two<|eot_id|>"]]
    opened = PromptSource(rows=[{"prompt": turns[:1]}]).load(tokenizer)
    assert prompt_and_completion(row)[0] == opened.batch(0, 1).token_ids[0]


@pytest.mark.parametrize(("flag", "yes", "no"), [("train", True, False), ("weight", 1, 0), ("loss_mask", True, False)])
def test_a_messages_own_flag_decides(flag: str, yes: Any, no: Any) -> None:
    tokenizer = chat("qwen2.5")
    chosen = [{**turn, flag: yes} if i == 3 else turn for i, turn in enumerate(TURNS)]
    assert target(tokenizer, *chosen) == ["it is 3<|im_end|>"]
    left_out = [{**turn, flag: no} if i == 3 else turn for i, turn in enumerate(TURNS)]
    assert target(tokenizer, *left_out, train_on="all")[1:] == ["it is 7<|im_end|>"]
    assert target(tokenizer, *left_out) == ["it is 7<|im_end|>"]
    last = TURNS[3]
    for bad in ([{**TURNS[0], flag: yes}, last], [TURNS[0], {**last, flag: 0.5}], [TURNS[0], {**last, flag: no}]):
        with pytest.raises(ValueError, match=f"train|{flag}"):
            target(tokenizer, *bad)


def test_a_completion_of_several_turns_is_trained_without_tool_results() -> None:
    tokenizer = chat("qwen2.5")
    rows = [{"prompt": "1 and 2?", "completion": TURNS[1:4]}]
    ((call, said),) = trained(tokenizer, SFTSource(rows=rows).tokenized(tokenizer))
    assert (call, said) == (CALL.removeprefix("\n"), "it is 3<|im_end|>") or (call, said) == (CALL, "it is 3<|im_end|>")


@pytest.mark.parametrize("thoughts", [{}, {"reasoning_content": "well"}])
def test_a_template_that_rewrites_earlier_turns_is_rejected_for_all_turns(thoughts: dict[str, str]) -> None:
    turns = [say("user", "1?"), say("assistant", "one", **thoughts), say("user", "2?"), say("assistant", "two")]
    assert target(chat("qwen3"), *turns) == ["<think>\n\n</think>\n\ntwo<|im_end|>"]
    with pytest.raises(ValueError, match="train_on"):
        target(chat("qwen3"), *turns, train_on="all")


def test_cut_rows_keep_only_turns_that_are_there() -> None:
    tokenizer = chat("llama3")
    rows = [{"m": [say("user", "1?"), say("assistant", "one"), say("user", "2?"), say("assistant", "two")]}]
    source = {"rows": rows, "messages_column": "m", "train_on": "all", "overlong": "truncate"}
    (whole,) = SFTSource(**source).tokenized(tokenizer)
    (cut,) = SFTSource(**source, max_tokens=len(whole.token_ids) - 3).tokenized(tokenizer)
    assert cut.token_ids == whole.token_ids[:-3] and cut.trained == whole.trained[:-3]


# ---- tools and variables of a row --------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [json.dumps(TOOLS), [ADD, SAY]])
def test_the_tools_of_a_row_are_shown(tools: Any) -> None:
    tokenizer = chat("qwen2.5")
    question = [say("user", "?")]
    expected = tokenizer.apply_chat_template(question, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    row = {"prompt": [say("user", "?")], "tools": tools}
    assert PromptSource(rows=[row]).load(tokenizer).batch(0, 1).texts == [expected]
    supervised = SFTSource(rows=[{**row, "completion": [calls(("add", {"a": 1}))]}]).tokenized(tokenizer)
    assert tokenizer.decode(prompt_and_completion(supervised[0])[0]) == expected
    pair = {**row, "chosen": [calls(("add", {"a": 1}))], "rejected": [calls(("add", {"a": 2}))]}
    ((chosen, rejected, _),) = PreferenceSource(rows=[pair]).tokenized(tokenizer)
    assert tokenizer.decode(chosen).startswith(expected) and '{"a": 1}' in tokenizer.decode(chosen)
    assert '{"a": 2}' in tokenizer.decode(rejected)
    named = PromptSource(rows=[{"prompt": "?", "schemas": tools}], tools_column="schemas").load(tokenizer)
    assert named.batch(0, 1).texts == [expected]


def test_tools_that_cannot_be_shown_are_rejected() -> None:
    for family, tools in (("gemma", TOOLS), ("qwen2.5", ["add"]), ("qwen2.5", "add")):
        with pytest.raises(ValueError, match="list, row 0: "):
            PromptSource(rows=[{"prompt": "?", "tools": tools}]).load(chat(family))
    with pytest.raises(ValueError, match="tools_column"):
        PromptSource(rows=[{"prompt": "?"}], tools_column="schemas").load(chat("qwen2.5"))
    kept = PromptSource(rows=[{"prompt": "?", "tools": ["add"]}], tools_column=None).load(chat("qwen2.5")).batch(0, 1)
    assert kept.columns["tools"] == [["add"]] and "add" not in kept.texts[0]


def test_a_tools_name_in_the_question_does_not_count_as_the_tool() -> None:
    tokenizer = chat("qwen2.5")
    shown = "{% if tools and messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}"
    tokenizer.chat_template = shown + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    question = say("user", "please add 1 and 2, and say it")
    assert '"add"' in render_prompt(tokenizer, [say("system", "x"), question], tools=TOOLS)[0]
    with pytest.raises(ValueError, match="tools"):
        render_prompt(tokenizer, [question], tools=TOOLS)


@pytest.mark.parametrize(("column", "as_text"), [("chat_template_kwargs", False), ("template_kwargs", True)])
def test_a_rows_own_template_variables_have_effect(column: str, as_text: bool) -> None:
    tokenizer = chat("qwen3")
    values = [{"enable_thinking": False}, {"enable_thinking": True}, None]
    rows = [{"prompt": "?", column: json.dumps(value) if as_text and value else value} for value in values]
    closed = "<think>\n\n</think>\n\n"
    texts = PromptSource(rows=rows).load(tokenizer, shuffle=False).batch(0, 3).texts
    assert [text.endswith(closed) for text in texts] == [True, False, False]
    source = PromptSource(rows=rows, template_kwargs={"enable_thinking": False})
    assert [text.endswith(closed) for text in source.load(tokenizer, shuffle=False).batch(0, 3).texts] == [1, 0, 1]
    learned = trained(tokenizer, SFTSource(rows=[{**row, "completion": "3"} for row in rows]).tokenized(tokenizer))
    assert learned == [["3<|im_end|>"], [closed + "3<|im_end|>"], [closed + "3<|im_end|>"]]
    pairs = PreferenceSource(rows=[{**row, "chosen": "3", "rejected": "4"} for row in rows]).tokenized(tokenizer)
    assert {tokenizer.decode(pair.chosen).endswith(closed + "3<|im_end|>") for pair in pairs} == {True}
    with pytest.raises(ValueError, match="list, row 0"):
        PromptSource(rows=[{"prompt": "?", column: "no"}]).load(tokenizer)


def test_evaluation_prompts_are_rendered_as_training_prompts() -> None:
    prompts = PromptSource(rows=[{"prompt": "?"}], template_kwargs={"enable_thinking": False}, system_prompt="short")
    like = rendered_like(PromptSource(rows=[{"prompt": "?"}]), prompts)
    assert (like.template_kwargs, like.system_prompt) == ({"enable_thinking": False}, "short")
    own = PromptSource(rows=[{"prompt": "?"}], template_kwargs={"enable_thinking": True, "x": 1}, system_prompt="long")
    like = rendered_like(own, prompts)
    assert (like.template_kwargs, like.system_prompt) == ({"enable_thinking": True, "x": 1}, "long")
    mixed = PromptMixture([prompts, PromptSource(rows=[{"prompt": "?"}], system_prompt="short")])
    like = rendered_like(PromptMixture([PromptSource(rows=[{"prompt": "?"}])]), mixed)
    assert (like.sources[0].template_kwargs, like.sources[0].system_prompt) == ({}, "short")


def test_a_begun_thought_gets_no_second_block() -> None:
    tokenizer = chat("qwen3")
    begun = [say("user", "?"), say("assistant", "<think>\nwell")]
    expected = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n<think>\nwell"
    for variables in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        assert render_prompt(tokenizer, begun, template_kwargs=variables) == (expected, True)
    start = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n"
    assert start in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(start, start + "<think>\n")
    assert render_prompt(tokenizer, begun[:1])[0].endswith("assistant\n<think>\n")
    assert render_prompt(tokenizer, begun) == (expected, True)


# ---- strings that are rendered already ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2.5", "llama3", "gemma", "mistral", "phi", "deepseek", "gpt-oss"])
def test_a_rendered_string_is_not_rendered_again(family: str) -> None:
    tokenizer = chat(family)
    text, _ = render_prompt(tokenizer, "how are you?")
    with pytest.raises(ValueError, match="chat_template"):
        PromptSource(rows=[{"prompt": text}]).load(tokenizer)
    once = PromptSource(rows=[{"prompt": "how are you?"}]).load(tokenizer).batch(0, 1).token_ids
    assert PromptSource(rows=[{"prompt": text}], chat_template=False).load(tokenizer).batch(0, 1).token_ids == once


def test_plain_turn_markers_are_recognized() -> None:
    tokenizer = chat("qwen2.5")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    with pytest.raises(ValueError, match="chat_template"):
        PromptSource(rows=[{"prompt": "USER: hi\nASSISTANT:"}]).load(tokenizer)
    prompts = PromptSource(rows=[{"prompt": "what does ASSISTANT: mean?"}]).load(tokenizer).batch(0, 1)
    assert prompts.texts[0].startswith("USER: what")


# ---- keys that Arrow adds ----------------------------------------------------------------------------------------

UNEVEN = [
    {
        "messages": [say("user", "1?"), calls(("add", {"a": 1})), result("1")],
        "completion": [say("assistant", "1")],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
        "note": {"answer": "1"},
    },
    {
        "messages": [say("user", "2?")],
        "completion": [calls(("say", {"text": "two"}))],
        "tools": TOOLS[1:],
        "chat_template_kwargs": {"day": "today"},
        "note": {"other": "2"},
    },
]


def uneven(kind: str, folder: Path) -> dict[str, Any]:
    data = Dataset.from_list(UNEVEN)
    if kind == "stream":
        return {"rows": data.to_iterable_dataset()}
    if kind == "list":
        return {"rows": data.to_list()}
    path = folder / f"rows.{kind}"
    data.to_parquet(path) if kind == "parquet" else data.to_json(path)
    return {"path": str(path)}


@pytest.mark.parametrize("kind", ["list", "parquet", "jsonl", "stream"])
def test_keys_of_other_rows_reach_no_template(kind: str, tmp_path: Path) -> None:
    tokenizer = chat("qwen2.5")
    plain = PromptSource(rows=UNEVEN, prompt_column="messages")
    expected = plain.load(tokenizer, shuffle=False).batch(0, 2)
    assert all("null" not in text and "None" not in text for text in expected.texts)
    given = uneven(kind, tmp_path)
    found = PromptSource(**given, prompt_column="messages").load(tokenizer, shuffle=False).batch(0, 2)
    assert found.texts == expected.texts
    assert found.columns["tools"] == [TOOLS, TOOLS[1:]] and "tool_calls" not in found.raw[1][0]
    assert found.columns["note"] == [{"answer": "1", "other": None}, {"answer": None, "other": "2"}]  # the user's
    if kind != "stream":
        learned = trained(tokenizer, SFTSource(**given, prompt_column="messages").tokenized(tokenizer))
        assert learned[1][0].endswith('{"name": "say", "arguments": {"text": "two"}}\n</tool_call><|im_end|>')


# ---- names and settings of the data module -----------------------------------------------------------------------


def test_evaluation_and_prediction_get_the_settings_of_prompts() -> None:
    prompts = PromptSource(rows=[{"prompt": "?"}], template_kwargs={"enable_thinking": False})
    others: dict[str, Any] = {"a": PromptSource(rows=[{"prompt": "?"}]), "b": [{"prompt": "?"}]}
    data = sums_data(prompts=prompts, evaluation=Evaluation(others, predict_prompts=[{"prompt": "?"}]))
    assert len(data.eval_sources) == 3
    for source in data.eval_sources.values():
        assert source.template_kwargs == {"enable_thinking": False}  # type: ignore[union-attr]
    assert others["a"].template_kwargs == {}
    sft = SFTSource(rows=[{"prompt": "?", "completion": "!"}], system_prompt="short")
    assert SFTDataModule(sft, SFTSource(rows=sft.rows)).val.system_prompt == "short"  # type: ignore[union-attr]

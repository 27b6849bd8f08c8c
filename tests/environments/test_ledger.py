"""What is trained is what was sampled, id for id, whatever the chat template does."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from lightrl.environments import Reply
from lightrl.environments.bridges import MARK
from tests.environments.families import FAMILIES, Family, make_tokenizer, write_calls
from tests.environments.scripted import Script, Turn, call, mismatches, play, spell


def write(
    name: str, family: Family, tokenizer: Any, reply: Reply, literal: str, cut: bool, as_template: bool
) -> list[int]:
    """The reply as a model of the family would sample it, but spelled in single characters."""
    text, end = reply.content, family.end
    if reply.tool_calls:
        text = write_calls(name, reply.message()["tool_calls"], reply.content, as_template=as_template)
        if name == "gpt-oss" and reply.content:
            text = f"<|channel|>analysis<|message|>{reply.content}<|end|><|start|>assistant{text}"
    elif name == "mistral":
        text = " " + text
    elif family.final:
        text, end = family.final + text, family.final_end
    if reply.reasoning:
        text = f"<think>\n{reply.reasoning}\n</think>\n\n{text}"
    ids = spell(tokenizer, text, literal)
    return ids if cut else [*ids, tokenizer.convert_tokens_to_ids(end)]


def script(
    name: str, tokenizer: Any, thinking: bool, parallel: bool, cut: bool, literal: bool, as_template: bool = False
) -> list[Turn]:
    """Two rounds of tools (of questions, where there are none), then answers with questions between them."""
    family = FAMILIES[name]
    trap = family.special[0] if literal else ""
    thought = "hm, HAVING " + trap if thinking and family.think else None
    inline = "<think>hm</think>" if thinking and not family.think and name != "gpt-oss" else ""
    user = {"role": "user", "content": ("And False now? " + trap).strip()}
    turns = []
    for number in range(2):
        if not family.tools:
            reply, answer = Reply((inline + "HAVING " + trap).strip()), [user]
        else:
            calls = [call(0, a=1, b=number)]
            if parallel and family.parallel:
                calls.append(call(1, a=7, b=False, c=trap))
            reply = Reply("Let me see" if number and name not in ("llama3", "mistral") else "", thought, calls)
            answer = [
                {"role": "tool", "name": "add", "tool_call_id": c.id, "content": f"3 {trap}<tool_call>"} for c in calls
            ]
        turns.append(Turn(reply, write(name, family, tokenizer, reply, trap, False, as_template), answer))
    for number in range(3):
        reply = Reply(f"{inline}It is {number} {trap} HAVING", thought)
        now = cut and number == 1
        ids = write(name, family, tokenizer, reply, trap, now, as_template)
        turns.append(Turn(reply, ids, [user] if number < 2 else None, "length" if now else "stop"))
    return turns


CASES = [  # half of all combinations, which has each combination of three flags
    (name, *flags)
    for name in FAMILIES
    for flags in itertools.product((False, True), repeat=4)
    if sum(flags) % 2 == 0 and (FAMILIES[name].parallel or not flags[1])
]


# New rows where templates rewrite what was sampled: Qwen 3 drops thoughts at a new question; DeepSeek writes otherwise
# between two rounds of tools, and cuts thoughts out of contents; gpt-oss ends final answers with another token in
# history than the sampled one (one that was cut off is ended with it).
FORKS = {("qwen3", True): 2, ("deepseek", False): 1, ("deepseek", True): 2}


@pytest.mark.parametrize("name,thinking,parallel,cut,literal", CASES)
def test_what_was_asked_and_sampled_is_what_is_trained_id_for_id(
    name: str, thinking: bool, parallel: bool, cut: bool, literal: bool
) -> None:
    tokenizer = make_tokenizer(FAMILIES[name])
    turns = script(name, tokenizer, thinking, parallel, cut, literal)
    engine, trajectory = asyncio.run(play(tokenizer, turns, FAMILIES[name].tools))
    assert trajectory.failure is None
    assert trajectory.stop_reason == "stop"
    assert len(engine.asked) == 5
    assert mismatches(engine, trajectory) == 0
    assert trajectory.sampled_ids == [token for turn in turns for token in turn.ids]
    assert not any(mark in tokenizer.decode(asked) for asked in engine.asked for mark in (MARK, "\\udb"))
    assert trajectory.metrics["forks"] == FORKS.get((name, thinking), 2 - cut if name == "gpt-oss" else 0)


@pytest.mark.parametrize("name,thinking,parallel,cut", sorted({case[:4] for case in CASES}))
def test_what_is_asked_reads_as_the_chat_template_of_the_conversation(
    name: str, thinking: bool, parallel: bool, cut: bool
) -> None:
    tokenizer = make_tokenizer(FAMILIES[name])
    turns = script(name, tokenizer, thinking, parallel, cut, literal=False, as_template=True)
    engine, trajectory = asyncio.run(play(tokenizer, turns, FAMILIES[name].tools))
    messages = list(trajectory.messages)
    if name == "deepseek":  # this template takes arguments as JSON text
        messages = [json.loads(json.dumps(message)) for message in messages]
        for message in messages:
            for each in message.get("tool_calls", []):
                each["function"]["arguments"] = json.dumps(each["function"]["arguments"])
    turn = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = tokenizer.apply_chat_template(
            messages[:number],
            tools=Script(turns, FAMILIES[name].tools).tools or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        rendered = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer.decode(engine.asked[turn]) == rendered, f"turn {turn}"
        turn += 1
    assert turn == 5

"""A row's own variables of the chat template, such as a thinking switch, in environments and programs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from lightrl.environments import AgentProgram
from lightrl.environments.base import Reply
from lightrl.records import SamplingParams
from tests.environments.families import FAMILIES, make_tokenizer
from tests.environments.scripted import Script, ScriptedAttempts, ScriptedEngine, Turn, alone, closing, spell

TOKENIZER = make_tokenizer(FAMILIES["qwen3"])
CLOSED = "<think>\n\n</think>\n\n"
SAMPLING = SamplingParams(max_new_tokens=50)


def turn() -> Turn:
    return Turn(Reply("3"), [*spell(TOKENIZER, "3"), TOKENIZER.convert_tokens_to_ids("<|im_end|>")])


def by_environment(row: dict[str, Any], settings: dict[str, Any]) -> str:
    engine = ScriptedEngine([turn()])
    attempts = ScriptedAttempts(lambda: Script([turn()], tools=False), turns=[turn()], tokenizer=TOKENIZER, **settings)
    asyncio.run(alone(attempts, engine, row, SAMPLING))
    return str(TOKENIZER.decode(engine.asked[0]))


def by_program(row: dict[str, Any], settings: dict[str, Any]) -> str:
    engine = ScriptedEngine([turn()])

    def run(row: Any, base_url: str, api_key: str) -> float:
        chat = openai.OpenAI(base_url=base_url, api_key=api_key).chat.completions
        more = {"chat_template_kwargs": json.loads(row.get("asks", "{}"))}
        chat.create(model="policy", messages=[{"role": "user", "content": "?"}], extra_body=more)
        return 1.0

    program = AgentProgram(run, **settings)
    program.setup(TOKENIZER)
    asyncio.run(closing(program, alone(program, engine, row, SAMPLING)))
    return str(TOKENIZER.decode(engine.asked[0]))


@pytest.mark.parametrize("play", [by_environment, by_program])
def test_a_rows_thinking_switch_has_effect(play: Any) -> None:
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    assert play({"chat_template_kwargs": off}, {}).endswith(CLOSED)
    assert play({"template_kwargs": json.dumps(on)}, {"template_kwargs": off}).endswith("assistant\n")
    assert play({}, {"template_kwargs": off}).endswith(CLOSED)


def test_a_program_may_ask_for_what_its_row_has() -> None:
    row = {"chat_template_kwargs": {"enable_thinking": False}, "asks": '{"enable_thinking": false}'}
    assert by_program(row, {}).endswith(CLOSED)

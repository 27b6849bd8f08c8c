"""The code of docs/environments.md runs and does what the text says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from lightrl.environments import AgentProgram, Reply
from tests.environments.families import FAMILIES, make_tokenizer
from tests.environments.scripted import ScriptedAttempts, ScriptedEngine, Turn, alone, call, spell
from tests.environments.test_attempts import SAMPLING


def blocks(root: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (root / "docs" / "environments.md").read_text(), re.DOTALL)


def test_every_code_block_of_the_guide_runs(root: Path) -> None:
    tokenizer = make_tokenizer(FAMILIES["qwen2.5"])
    own, trl, program = blocks(root)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(own, names)
    exec(trl, names)

    def said(text: str, *calls: Any) -> Turn:
        return Turn(Reply(text, None, list(calls)), spell(tokenizer, (text or "call") + "<|im_end|>"))

    def play(environment: Any, turns: list[Turn], row: dict[str, Any]) -> Any:
        attempts = ScriptedAttempts(environment)
        attempts.turns = turns
        attempts.setup(tokenizer)
        return asyncio.run(alone(attempts, ScriptedEngine(turns), row, SAMPLING))[0]

    guessed = play(names["GuessNumber"], [said("two"), *(said(str(n)) for n in (1, 2, 3))], {"up_to": 3})
    assert guessed.turn_rewards[0] == -0.1
    assert guessed.turn_rewards[-1] == 1.0
    submit = call(0, answer=6)
    submit.name = "submit"
    row = {"prompt": "What is 2 x 3?", "answer": 6}
    handed_in = play(names["episode"].environment, [said("", submit), said("done")], row)
    assert handed_in.turn_rewards == [0.0, 1.0]
    assert handed_in.messages[2]["content"] == "Thank you."

    exec(program, names)
    agent = AgentProgram(names["main"])
    agent.setup(tokenizer)
    (answered,) = asyncio.run(alone(agent, ScriptedEngine([said("6")]), {**row, "answer": "6"}, SAMPLING))
    assert (answered.stop_reason, answered.turn_rewards) == ("stop", [1.0])

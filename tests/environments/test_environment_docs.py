"""The code of docs/agents.md and docs/programs.md runs and does what the text says."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from pathlib import Path
from typing import Any

from lightrl.environments import AgentProgram, EnvironmentEpisode, ToolEnvironment
from tests.environments.scripted import TOKENIZER, ScriptedEngine, alone, call, play_one, said


def blocks(root: Path, language: str = "python") -> list[str]:
    pages = "".join((root / "docs" / name).read_text() for name in ("agents.md", "programs.md"))
    return re.findall(rf"```{language}\n(.*?)```", pages, re.DOTALL)


def test_every_code_block_of_the_guide_runs(root: Path) -> None:
    tools, own, game, *_, program, graph = blocks(root)
    names: dict[str, Any] = {"__name__": "guide"}
    exec(tools, names)
    exec(own, names)

    guessed = play_one(names["GuessNumber"], [said("two"), *(said(str(n)) for n in (1, 2, 3))], {"up_to": 3})
    assert guessed.turn_rewards[0] == -0.1
    assert guessed.turn_rewards[-1] == 1.0
    submit = call(0, answer=6)
    submit.name = "submit"
    row = {"prompt": "What is 2 x 3?", "answer": 6}
    episode = EnvironmentEpisode(lambda: ToolEnvironment(names["Calculator"]))
    handed_in = play_one(episode.environment, [said("", submit), said("done")], row)
    assert handed_in.turn_rewards == [0.0, 1.0]
    assert handed_in.messages[2]["content"] == "Received."

    exec(game, names)
    won = play_one(names["games"].environment, [said("x"), *(said(str(n)) for n in range(10))], {"prompt": ""})
    assert won.messages[0]["content"] == "Guess a digit." and won.turn_rewards[-1] == 1.0

    for code in (program, graph) if importlib.util.find_spec("langgraph") else (program,):
        exec(code, names)
        agent = AgentProgram(names["main"])
        agent.setup(TOKENIZER)
        (answered,) = asyncio.run(alone(agent, ScriptedEngine([said("6")]), {**row, "answer": "6"}))
        asyncio.run(agent.close())
        assert (answered.stop_reason, answered.turn_rewards) == ("stop", [1.0])

"""The examples of agents: their code runs against the endpoint, and their configurations name what exists."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.environments.test_endpoint import Engine, play, sound


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_langgraph_agent_scores_the_number_of_its_second_turn(root: Path) -> None:
    pytest.importorskip("langgraph")
    agent = load(root / "examples" / "langgraph" / "agent.py")
    row = {"prompt": "Calculate 2 + 3.", "answer": "5"}
    for said, reward in ((("4 maybe", "5"), 1.0), (("5", "it is 6"), 0.0)):
        engine = Engine(*said)
        (played,) = play(agent.main, engine, row, max_turns=3)
        assert played.failure is None and sum(played.turn_rewards) == reward
        sound(played, engine)
        assert [message["role"] for message in played.messages] == ["user", "assistant"] * 2

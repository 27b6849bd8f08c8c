"""Task sets of verifiers, with its own harnesses on the subprocess runtime.

Set `LIGHTRL_VERIFIERS_PYTHON` to an interpreter that has verifiers 0.4.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl.environments import Reply, ToolCall, VerifiersProgram, VerifiersRows
from lightrl.records import Trajectory
from tests.environments.scripted import TOKENIZER, ScriptedEngine, Turn, alone, closing, mismatches, said, spell

HERE = Path(__file__).resolve().parent
TASKSET = {"id": "digits-taskset", "first": 4}
needs_verifiers = pytest.mark.skipif(
    not os.environ.get("LIGHTRL_VERIFIERS_PYTHON"), reason="LIGHTRL_VERIFIERS_PYTHON names no interpreter"
)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def play(program: VerifiersProgram, row: dict[str, Any], turns: list[Turn]) -> tuple[ScriptedEngine, Trajectory]:
    engine = ScriptedEngine(turns)
    program.setup(TOKENIZER)
    (trajectory,) = asyncio.run(closing(program, alone(program, engine, row)))
    return engine, trajectory


@needs_verifiers
def test_a_task_set_is_played_by_the_null_harness_and_scored_by_itself() -> None:
    rows = VerifiersRows(TASKSET, select={"limit": 2})()
    assert rows["prompt"] == ["Say 4.", "Say 5."]
    engine, right = play(VerifiersProgram(TASKSET), rows[0], [said("It is 4")])
    assert right.failure is None, right.failure
    assert (right.stop_reason, right.turn_rewards) == ("stop", [2.0])
    assert (right.metrics["right"], right.metrics["words"]) == (1.0, 3.0)
    assert [message["role"] for message in right.messages] == ["system", "user", "assistant"]
    assert mismatches(engine, right) == 0
    _, broken = play(VerifiersProgram(TASKSET), rows[1], [said("It is 5")])
    assert broken.stop_reason == "failure" and "the judge is gone" in str(broken.failure)


@needs_verifiers
@pytest.mark.long
def test_the_bash_harness_runs_the_policys_commands() -> None:
    row = VerifiersRows(TASKSET)()[2]
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((3 + 3))"}}\n</tool_call>'
    turns = [Turn(Reply("", None, [ToolCall("bash", {}, "call00000")]), spell(TOKENIZER, call + "<|im_end|>"))]
    engine, played = play(VerifiersProgram(TASKSET, "bash"), row, [*turns, said("6")])
    assert (played.stop_reason, played.failure, played.turn_rewards) == ("stop", None, [0.0, 2.0])
    assert any("6" in str(message["content"]) for message in played.messages if message["role"] == "tool")
    assert mismatches(engine, played) == 0


def test_yaml_selects_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML reads the quoted name "null" as None for an argument that may be None."""
    from jsonargparse import ArgumentParser

    monkeypatch.setenv("LIGHTRL_VERIFIERS_PYTHON", sys.executable)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(VerifiersProgram, "episode")
    for given, harness in (('"null"', {"id": "null"}), ("bash", {"id": "bash"}), ("taskset", None)):
        text = f"class_path: VerifiersProgram\ninit_args: {{taskset: t, harness: {given}}}"
        program = parser.instantiate_classes(
            parser.parse_string(f"episode:\n  {text.replace(chr(10), chr(10) + '  ')}")
        )
        settings = json.loads(program.episode._make.args[2]["LIGHTRL_VERIFIERS"])
        assert settings["agent"].get("harness") == harness

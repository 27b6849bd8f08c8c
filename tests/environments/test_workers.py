"""Processes of programs: imported once, clean for each attempt, gone when they are to be."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from lightrl.environments import AgentProgram
from lightrl.environments.endpoint.running import CHILD
from tests.environments.scripted import TOKENIZER, closing
from tests.environments.test_endpoint import Engine, group, play
from tests.waiting import gone, until

PROGRAM = f"{Path(__file__).with_name('kept_program.py')}:main"


def noted(notes: Path, kind: str) -> list[int]:
    lines = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
    return [int(pid) for name, pid in lines if name == kind]


def play_all(notes: Path, rows: list[dict[str, Any]], number: int = 1, **settings: Any) -> list[Any]:
    """Trajectories of groups, one group after the other, of one program."""
    program = AgentProgram(PROGRAM, process=True, env={"NOTES": str(notes), **settings.pop("env", {})}, **settings)
    program.setup(TOKENIZER)

    async def run() -> list[Any]:
        return [each for row in rows for each in await group(program, Engine("Hi", "Ho"), row, number)]

    return asyncio.run(closing(program, run()))


def test_processes_import_once_and_every_attempt_finds_them_clean(tmp_path: Path) -> None:
    played = play_all(tmp_path / "notes", [{}, {}, {}], number=2)
    assert [(t.failure, sum(t.turn_rewards), t.metrics["turns"]) for t in played] == [(None, 1.0, 2.0)] * 6
    imports = noted(tmp_path / "notes", "import")
    assert len(set(noted(tmp_path / "notes", "draw"))) == 6  # not what the import's generator would draw in each
    assert len(imports) <= 2 and all(gone(pid) for pid in imports)


def test_a_process_that_dies_or_takes_too_long_is_replaced_and_what_it_started_is_gone(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    played = play_all(
        notes, [{"die": True}, {"sleep": True, "child": True}, {"child": True}], max_seconds=4, max_retries=0
    )
    assert [t.stop_reason for t in played] == ["failure", "time", "stop"]
    assert "its process exited with code -9" in played[0].failure and sum(played[2].turn_rewards) == 1.0
    assert len(noted(notes, "import")) == 3
    assert len(noted(notes, "child")) == 2 and all(gone(pid) for pid in noted(notes, "child"))


def test_a_program_whose_import_starts_threads_gets_a_process_per_attempt(tmp_path: Path) -> None:
    played = play_all(tmp_path / "notes", [{}, {}], env={"THREAD": "1"})
    assert [(t.failure, sum(t.turn_rewards)) for t in played] == [(None, 1.0)] * 2
    assert len(noted(tmp_path / "notes", "import")) == 2


def test_an_import_that_fails_or_takes_too_long_is_a_failure_that_tells_why(tmp_path: Path) -> None:
    for name, code, cause in (("a", "import no_such_package", "no_such_package"), ("b", "while True: 1", "max_secon")):
        (tmp_path / f"{name}.py").write_text(code)
        (trajectory,) = play(f"{tmp_path / name}.py:main", Engine("Hi"), process=True, max_seconds=1)
        assert cause in trajectory.failure


def test_an_example_that_is_not_json_is_rejected() -> None:
    with pytest.raises(ValueError, match="process=True: an example isn't JSON: .*date"):
        play("tests/environments/plain_program.py:once", Engine("Hi"), {"day": date(2026, 1, 1)}, process=True)


def test_numbers_of_numpy_are_rewards_and_metrics_of_processes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import numpy\nfrom tests.environments.plain_program import once\n\ndef main(row, base_url, api_key):\n"
        "    once(row, base_url, api_key)\n"
        "    return {'reward': numpy.float32(0.5), 'metrics': {'right': numpy.bool_(True)}}\n"
    )
    (trajectory,) = play(
        f"{tmp_path}/program.py:main", Engine("Hi"), process=True, env={"PYTHONPATH": str(Path(__file__).parents[2])}
    )
    assert (trajectory.failure, trajectory.turn_rewards, trajectory.metrics["right"]) == (None, [0.5], 1.0)


def test_nothing_of_a_program_outlives_a_killed_run(tmp_path: Path) -> None:
    """The process is started as by a run, which is a small one here."""
    (tmp_path / "program.py").write_text(
        "import os, subprocess, time\n\ndef main(row, base_url, api_key):\n"
        "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    open('pids', 'w').write(f'{os.getppid()} {os.getpid()} {child.pid}.')\n    time.sleep(600)\n"
    )
    (tmp_path / "call.json").write_text('{"row": {}, "base_url": "", "api_key": "", "env": {}}')
    code = (
        "import subprocess, sys, time\n"
        f"worker = subprocess.Popen([sys.executable, {str(CHILD)!r}, 'program.py:main'], stdin=subprocess.PIPE,"
        " stdout=subprocess.PIPE, start_new_session=True)\n"
        "worker.stdin.write(b'.\\n'); worker.stdin.flush(); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    pids = tmp_path / "pids"
    assert until(lambda: pids.exists() and pids.read_text().endswith("."))
    run.kill()
    run.wait()
    assert all(gone(int(pid)) for pid in pids.read_text().rstrip(".").split())


@pytest.fixture(autouse=True)
def _without_a_key_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

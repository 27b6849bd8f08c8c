"""A short seeded sample of the fault campaign; `make faults` runs the long one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign, Verdict, judged, table
from tests.faults.injection import Case

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.long
@pytest.mark.slow
def test_a_sample_of_faults_holds_every_invariant() -> None:
    """In a process of its own, which forks the runs."""
    command = [sys.executable, "-m", "tests.faults.campaign", "--cases", "8", "--seed", "3", "--minutes", "0.4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^([1-9]\d*) of \1 injected faults satisfied every invariant", done.stdout, re.MULTILINE)


def test_a_killed_campaign_leaves_no_process() -> None:
    """Those that left their session and lost their parent too, where namespaces may be made."""
    code = """
import os, time
from tests.faults.containment import contained, die_with_parent
def work(isolated):
    for strays in range(1 + isolated):
        if os.fork() == 0:
            os.setsid()
            die_with_parent() if not strays else os.fork() and os._exit(0)
            time.sleep(600)
    time.sleep(0.2)
    print("ready", flush=True)
    time.sleep(600)
contained(work)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline() == b"ready\n"
        start = time.monotonic()
        run.kill()
        assert run.stdout.read() == b"" and time.monotonic() - start < 60, "someone still holds it open"


def test_a_fault_that_was_not_injected_is_named_and_does_not_count(tmp_path: Path) -> None:
    ended, cut = (Verdict(Case("core", "SIGINT", place, 1, 0.0), "not reached, x") for place in ("sampling", "sync"))
    cut.broken.append("exit")
    held = Verdict(Case("core", "SIGINT", "save", 1, 0.0), "ran to completion")
    assert [judged(each) for each in (ended, cut, held)] == ["not counted", "broken: exit", "ok"]
    assert table([ended, cut, held]).endswith(
        "1 of 2 injected faults satisfied every invariant; 1 more targeted a place that their run did not reach "
        "(core: SIGINT, sampling 1)."
    )
    other = table([Verdict(Case("reward", "SIGKILL", "sync", 1, 0.0), "ended with 2"), replace(held, case=ended.case)])
    both = table([cut, held], before=other)
    assert [line.split(" | ")[0] for line in both.splitlines() if "/1" in line] == ["| core", "| reward"]
    assert "2 of 3 injected faults" in both, "the other victim's row of the page stays"


def test_a_run_that_ends_by_itself_before_its_fault_is_broken(tmp_path: Path) -> None:
    """Such as one whose engine took too long to start: resumed from nothing it would hold everything."""

    class Alone(Campaign):
        def __init__(self) -> None:
            self.model, self.statuses = "", [1, 0]

        def run(self, folder: Path, kept: Path, *args: object, **kwargs: object) -> tuple[int, float]:
            (kept / "output").write_text("error: the engine gave no sign for 30 s\n")
            (kept / "left").write_text("")
            return self.statuses.pop(0), 1.0

    folder, kept = tmp_path / "run", tmp_path / "notes"
    for each in (folder, kept):
        each.mkdir()
    case = Case("core", "SIGINT", "sampling", 3, 0.0)
    verdict = Alone()._judge(case, folder, kept, {}, 1.0)
    assert verdict.outcome == "not reached, ended with 1" and "cause" in verdict.broken

"""A short seeded sample of the fault campaign; `make faults` runs the long one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

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

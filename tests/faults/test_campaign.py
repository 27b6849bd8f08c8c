"""A short seeded sample of the fault campaign; `make faults` runs the long one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_a_sample_of_faults_holds_every_invariant() -> None:
    """In a process of its own, which forks the runs."""
    command = [sys.executable, "-m", "tests.faults.campaign", "--cases", "8", "--seed", "3", "--minutes", "0.4"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^([1-9]\d*) of \1 injected faults held every invariant", done.stdout, re.MULTILINE)

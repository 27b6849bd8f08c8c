"""Calls into C that take longer than their bound end the process; a process that was stopped meanwhile goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAITS = """
import ctypes, sys, time
from lightrl.background import call_bound

with call_bound(60.0, "longer"), call_bound(float(sys.argv[1]), "it hangs."):
    print("begins", flush=True)
    lock = ctypes.create_string_buffer(64)
    if sys.argv[2] == "for ever":
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(lock)
    time.sleep(1)
time.sleep(float(sys.argv[1]) + 3)  # no call any more
"""


def waiting(bound: float, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAITS, str(bound), how]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


def test_a_call_that_takes_longer_ends_the_process_with_its_lines() -> None:
    process = waiting(2.0, "for ever")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("\nerror: it hangs.\n") and 'File "<string>", line 10 in <module>' in said


def test_a_call_that_is_over_in_time_ends_nothing_and_the_time_stopped_does_not_count() -> None:
    process = waiting(4.0, "a second")
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")

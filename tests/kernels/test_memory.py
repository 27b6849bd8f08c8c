"""The process keeps what it frees: with the CPU kernels a step asks for no new pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Blocks of 8 MiB at the heap's end, freed all at once and asked for again, as a step's activations are.
SCRIPT = """
import resource, sys
if "keep" in sys.argv:
    from lightrl.kernels.cpu.memory import keep_freed_memory
    assert keep_freed_memory()
import torch
def step():
    return [torch.ones(2**21) for _ in range(20)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str) -> int:
    # glibc's value at the start of a process; it moves with what is freed, so that a small script may see no fault.
    returns_memory = {**os.environ, "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, env=returns_memory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such threshold")
def test_kept_memory_is_used_again_without_page_faults() -> None:
    pages_of_five_steps = 5 * 20 * 8 * 2**20 // 4096
    assert faults() > pages_of_five_steps / 2
    assert faults("keep") <= pages_of_five_steps / 50  # one of 100 blocks of 8 MiB is often faulted

"""The script for the first GPU runs through on a CPU, reports each step and outlives one that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_step_runs_on_a_cpu_and_a_failure_stops_none(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(root / "scripts" / "gpu_check.sh"), "--device", "cpu", "--tiny", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=840)
    steps = json.loads(out.read_text())["steps"]
    names = ["versions", "attention", "head", "training", "sharded", "resume", "profile", "ipc", "ipc_expandable"]
    assert list(steps) == [*names, "host_memory", "memory", "benchmark"]
    assert steps["resume"]["result"] == {"auto": 0.0} and len(steps["profile"]["result"]) == 10
    assert {name: step["result"] for name, step in steps.items() if not step["ok"]} == {} and done.returncode == 0
    assert all(row.get("ok", True) for row in steps["attention"]["result"])


VLLM = [
    "vllm_in_process",
    "vllm_own_process",
    "vllm_sleep_2",
    "vllm_fire",
    "vllm_lora",
    "vllm_seeds",
]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_every_vllm_step_runs_on_a_cpu(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(root / "scripts" / "gpu_check.sh"), "--device", "cpu", "--tiny", "--out", str(out), "--only", *VLLM]
    subprocess.run(command, env=environment, capture_output=True, text=True, timeout=840)
    steps = json.loads(out.read_text())["steps"]
    assert {name: step["result"] for name, step in steps.items() if not step["ok"]} == {} and list(steps) == VLLM
    assert max(step["result"].get("gap", 0.0) for step in steps.values()) < 5e-5

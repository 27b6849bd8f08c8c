"""The script for the first GPU runs through on a CPU and reports each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]


def steps(root: Path, folder: Path, *options: str) -> dict[str, Any]:
    """What the steps of a tiny check on a CPU reported."""
    out = folder / "report.json"
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(root / "scripts" / "gpu_check.sh"), "--device", "cpu", "--tiny", "--out", str(out), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=840)
    found: dict[str, Any] = json.loads(out.read_text())["steps"]
    assert {name: step["result"] for name, step in found.items() if not step["ok"]} == {} and done.returncode == 0
    return found


def test_every_step_runs_on_a_cpu(root: Path, tmp_path: Path) -> None:
    found = steps(root, tmp_path)
    names = ["versions", "attention", "head", "training", "sharded", "resume", "profile", "ipc", "ipc_expandable"]
    assert list(found) == [*names, "host_memory", "memory", "benchmark"]
    assert found["resume"]["result"] == {"auto": 0.0} and len(found["profile"]["result"]) == 10
    assert all(row.get("ok", True) for row in found["attention"]["result"])


@pytest.mark.vllm
def test_every_vllm_step_runs_on_a_cpu(root: Path, tmp_path: Path) -> None:
    names = [f"vllm_{name}" for name in ("in_process", "own_process", "sleep_2", "fire", "lora", "seeds")]
    assert list(steps(root, tmp_path, "--only", *names)) == names

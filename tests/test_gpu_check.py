"""The script for the first GPU runs through on a CPU, reports each step and outlives one that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def script(root: Path) -> Any:
    """`scripts/gpu_check.py`, which runs nothing when it is imported."""
    spec = spec_from_file_location("gpu_check", root / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--device cuda: no CUDA device found. To test the script, use --device cpu --tiny"),
        (["--device", "cpu"], "--device cpu: the default sizes require a GPU. Add --tiny"),
        (["--device", "cpu", "--tiny", "--out", "."], "--out .: is not writable (Is a directory)"),
    ],
)
def test_what_cannot_run_is_refused_before_a_step(
    script: Any, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err


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
    "vllm_host_memory",
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

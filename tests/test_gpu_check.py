"""The script for the first GPU runs through on a CPU, reports each step and outlives one that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.waiting import gone


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
        ([], "--device cuda: there is no CUDA device; --device cpu --tiny tries"),
        (["--device", "cpu"], "--device cpu: the sizes are those of a GPU; add --tiny"),
        (["--device", "cpu", "--tiny", "--out", "."], "--out .: the report cannot be written there (Is a directory)"),
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


@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.long)])
def test_nothing_of_a_step_outlives_it(script: Any, hangs: bool, tmp_path: Path) -> None:
    """A step that leaves a process with its output open, and one that takes too long, which says how far it came."""
    step, pid = tmp_path / "step.py", tmp_path / "pid"
    step.write_text(
        "import pathlib, subprocess, sys, time\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(left.pid))\n"
        "print('came so far', flush=True)\n" + ("time.sleep(900)" if hangs else "print('RESULT {\"x\": 1}')")
    )
    script.__file__, script.SECONDS = str(step), {"versions": 15 if hangs else 600}
    found = script.outcome("versions", SimpleNamespace(device="cpu", tiny=True))
    assert gone(int(pid.read_text()))
    assert found["ok"] is not hangs
    assert found["result"] == ("came so far\n\ntook more than 15 s" if hangs else {"x": 1})


def test_a_result_that_is_no_number_fails_its_step(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.STEPS, "head", lambda args: {"gap": float("nan")})
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--tiny", "--step", "head"])
    with pytest.raises(ValueError, match="not JSON compliant"):
        script.main()


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

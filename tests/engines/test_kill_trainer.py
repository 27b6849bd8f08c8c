"""A trainer that is killed, SIGKILL included, leaves no engine process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.engines.conftest import SOON

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]

TRAINER = """
import json, sys
from tests.engines.conftest import ask, load
from lightrl.engines import EngineContext, VLLMEngine
from lightrl.records import Prompts, SamplingParams

if __name__ == "__main__":
    backend = {"distributed_executor_backend": "mp"} if sys.argv[2] == "2" else {}
    engine = VLLMEngine(in_process=False, engine_args=backend)
    engine.start(EngineContext(sys.argv[1], max_prompt_tokens=32, max_new_tokens=200))
    engine.load_weights(load(sys.argv[1]).named_parameters(), policy_version=0)
    prompts = Prompts([[2, 5 + i % 40] for i in range(64)], [""] * 64)
    print(json.dumps(engine.process_ids), flush=True)
    while True:
        for group in ask(engine, prompts, SamplingParams(max_new_tokens=200), num_completions=4, seeds=range(64)):
            pass
"""


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_no_engine_outlives_its_trainer(num_processes: int, tied_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tied_folder), str(num_processes)]
    with open(tmp_path / "errors", "w") as errors:
        trainer = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert trainer.stdout is not None
    line = ""
    while "[" not in line or "]" not in line or line.strip("[], \n0123456789"):
        line = trainer.stdout.readline()
        assert line, (tmp_path / "errors").read_text()[-3000:]
    engine = [psutil.Process(int(pid)) for pid in line.strip("[] \n").split(",")]
    family = {*engine, *psutil.Process(trainer.pid).children(recursive=True)}
    assert len(engine) == num_processes
    time.sleep(0.5)  # well into a rollout
    trainer.send_signal(signal.SIGKILL)
    # Not reaped yet: a zombie must count as dead.
    _, alive = psutil.wait_procs(family, timeout=SOON)
    for process in alive:
        process.kill()
    trainer.wait()
    assert not alive

"""A trainer that is killed leaves no engine process behind. Run as a module, the file is the trainer."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightrl.engines import EngineContext, VLLMEngine
from lightrl.records import Prompts, SamplingParams
from tests import forks
from tests.engines.conftest import SOON, ask, load
from tests.engines.test_vllm_own_process import check_gaps
from tests.waiting import until

pytestmark = pytest.mark.vllm


def main(folder: str, num_processes: str) -> None:
    backend = {"distributed_executor_backend": "mp"} if num_processes == "2" else {}
    engine = VLLMEngine(in_process=False, engine_args=backend)
    engine.start(EngineContext(folder, max_prompt_tokens=32, max_new_tokens=200))
    check_gaps(engine, load(Path(folder)))
    prompts = Prompts([[2, 5 + i % 40] for i in range(64)], [""] * 64)
    print("engine", *engine.process_ids, "runs", flush=True)
    while True:
        ask(engine, prompts, SamplingParams(max_new_tokens=200), num_completions=4, seeds=range(64))


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_no_engine_outlives_its_trainer(num_processes: int, tied_folder: Path) -> None:
    pytest.importorskip("vllm")
    trainer = forks.Fork(__name__, str(tied_folder), str(num_processes))
    up = re.compile(r"engine ([\d ]+) runs")
    assert until(lambda: up.search(trainer.printed()) or trainer.poll() is not None, 300)
    found = up.search(trainer.printed())
    assert found, trainer.printed()[-3000:]
    engine = [psutil.Process(int(pid)) for pid in found[1].split()]
    family = {*engine, *psutil.Process(trainer.pid).children(recursive=True)}
    assert len(engine) == num_processes
    time.sleep(0.5)  # well into a rollout
    trainer.kill()
    _, alive = psutil.wait_procs(family, timeout=SOON)
    for process in alive:
        process.kill()
    assert not alive


if __name__ == "__main__":
    main(*sys.argv[1:])

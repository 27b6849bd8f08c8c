"""An engine that hangs (its core stopped by SIGSTOP) does not hold Ctrl-C up."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightrl import rollout
from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.engines import VLLMEngine
from lightrl.records import SamplingParams
from tests import forks
from tests.toys import quickstart_model, quiet_trainer, sums_data
from tests.waiting import gone, until

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def main(folder: str, schedule: str) -> None:
    """A trainer whose engine is stopped by its reward function."""
    engine = VLLMEngine(in_process=False, engine_args={"max_num_seqs": 8})

    def stops(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        for pid in engine.process_ids:
            os.kill(pid, signal.SIGSTOP)
            print("stopped", pid, flush=True)
        return [0.0] * len(prompts)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    data = sums_data(
        engine=engine, rewards=[stops], sampling=SamplingParams(max_new_tokens=100, ignore_eos=True),
        group_size=8, prompts_per_rollout=16, schedule=getattr(rollout, schedule)(),
    )  # fmt: skip
    model = quickstart_model(Path(folder), max_position_embeddings=128)
    try:
        quiet_trainer(callbacks=[WeightSync()]).fit(GRPOLightningModule(model), data)
    finally:
        print("ended", flush=True)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["OnPolicy", "Ahead"])
def test_ctrl_c_ends_a_run_whose_engine_hangs(tmp_path: Path, schedule: str) -> None:
    trainer = forks.Fork(__name__, str(tmp_path), schedule)
    try:
        assert until(lambda: "stopped" in trainer.printed() or trainer.poll() is not None, 300)
        found = re.search(r"stopped (\d+)\n", trainer.printed())
        assert found, trainer.printed()[-3000:]
        time.sleep(1.5)  # the trainer waits for the core by now
        os.kill(trainer.pid, signal.SIGINT)
        # Shutting down is bounded at 10 s; the rest is for a busy machine.
        assert until(lambda: "ended\n" in trainer.printed(), 100), "the run waits for the engine"
        assert gone(int(found[1]))
        assert trainer.poll(100) == 1
    finally:
        trainer.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])

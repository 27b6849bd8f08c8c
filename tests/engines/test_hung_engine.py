"""An engine that hangs (its core stopped by SIGSTOP) is told within a bound, ended, and does not hold Ctrl-C up."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightrl import rollout
from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.engines import EngineContext, EngineDiedError, VLLMEngine
from lightrl.records import CompletionGroup, Prompts, SamplingParams
from tests import forks
from tests.engines.conftest import SOON, load
from tests.toys import quickstart_model, quiet_trainer, sums_data
from tests.waiting import gone, until

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

PROMPTS = Prompts(token_ids=[[2, 5 + i, 17, 20 + i] for i in range(16)], texts=[""] * 16)
LONG = SamplingParams(max_new_tokens=120, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=3, ignore_eos=True)
BOUND = 4.0


@pytest.fixture()
def engine(own: VLLMEngine, tied_folder: Path) -> VLLMEngine:
    own.start(EngineContext(str(tied_folder), max_prompt_tokens=64, max_new_tokens=120))
    own.load_weights(load(tied_folder).named_parameters(), policy_version=1)
    own.generate_all([PROMPTS.request(0, SHORT, 0, 2)])  # the first steps take long
    return own


@pytest.fixture(scope="module")
def own() -> Iterator[VLLMEngine]:
    engine = VLLMEngine(in_process=False, progress_timeout=120.0)
    yield engine
    engine.close()


def test_requests_join_and_leave_while_others_run(engine: VLLMEngine) -> None:
    """A short request that comes after a long one is done before it; a cancelled one leaves nothing behind."""
    long, late, dropped = (PROMPTS.request(i, s, 7 + i, 2) for i, s in enumerate((LONG, SHORT, LONG)))
    alone = {r: [c.token_ids for c in g.completions] for r in (long, late) for g in engine.generate_all([r])}

    async def scenario() -> list[CompletionGroup]:
        first, second = (asyncio.ensure_future(engine.generate(request)) for request in (long, dropped))
        while not engine._groups:
            await asyncio.sleep(0.001)
        second.cancel()
        short = await engine.generate(late)
        assert not first.done()
        return [short, await first]

    for group in asyncio.run(scenario()):
        assert [c.token_ids for c in group.completions] == alone[group.request] and group.policy_version == 1
    assert until(lambda: not engine._adapter.busy) and not engine._finished and not engine._places


@pytest.mark.long
def test_an_end_does_not_wait_for_a_stopped_core(engine: VLLMEngine) -> None:
    (core,) = engine.process_ids
    requests = [PROMPTS.request(i, LONG, i, 20) for i in range(8)]
    with ThreadPoolExecutor(1) as pool:
        groups = pool.submit(engine.generate_all, requests)
        assert until(lambda: bool(engine._groups))
        os.kill(core, signal.SIGSTOP)
        time.sleep(0.3)  # the trainer waits for the core by now
        began = time.monotonic()
        engine.close()
        with pytest.raises(RuntimeError):
            groups.result(SOON)
    assert time.monotonic() - began < SOON and not psutil.pid_exists(core)


@pytest.mark.parametrize(
    "wait", ["generate", *(pytest.param(x, marks=pytest.mark.long) for x in ("load_weights", "logprobs"))]
)
def test_a_stopped_core_is_told_and_ended(engine: VLLMEngine, tied_folder: Path, wait: str) -> None:
    """Also whoever awaits completions is told, whoever noticed."""
    (core,) = engine.process_ids
    weights = load(tied_folder).named_parameters()
    engine._adapter.progress_timeout = BOUND
    requests = [PROMPTS.request(i, LONG, i, 20) for i in range(8)]
    os.kill(core, signal.SIGSTOP)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(engine.generate_all, requests)
        assert until(lambda: bool(engine._groups) or stream.done())
        with pytest.raises(EngineDiedError, match="VLLMEngine.progress_timeout"):
            if wait == "load_weights":
                engine.load_weights(weights, policy_version=2)
            elif wait == "logprobs":
                engine.logprobs([[2, 5, 6]])
            stream.result()
        with pytest.raises(EngineDiedError):
            stream.result()
    assert BOUND <= time.monotonic() - began < BOUND + SOON
    assert not engine.started and engine.policy_version == -1 and not psutil.pid_exists(core)


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

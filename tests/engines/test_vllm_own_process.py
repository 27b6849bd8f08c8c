"""The engine in processes of its own: same numbers, and its death told within 5 seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch

from lightrl.engines import EngineContext, EngineDiedError, VLLMEngine
from lightrl.records import Prompts, SamplingParams
from tests.engines.conftest import SOON, ask, change, load
from tests.engines.test_vllm_sync import canary_gap, sampled_gap
from tests.waiting import until

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

PROMPTS = Prompts(token_ids=[[2, 5 + i, 17, 20 + i] for i in range(16)], texts=[""] * 16)
LONG = SamplingParams(max_new_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def untied(untied_folder: Path) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(in_process=False)
    engine.start(EngineContext(str(untied_folder), max_prompt_tokens=64, max_new_tokens=120))
    yield engine
    engine.close()


def check_gaps(engine: VLLMEngine, model: torch.nn.Module) -> None:
    """The gap is large before a push through shared memory, and nil after it."""
    change(model)
    assert canary_gap(engine, model) > 0.5
    engine.load_weights(model.named_parameters(), policy_version=1)
    assert canary_gap(engine, model) <= 5e-5
    for temperature in (1.0, 0.7):
        assert sampled_gap(engine, model, temperature) <= 5e-5
    # Buckets far smaller than the model: tensors go through both by turns, the largest (64 KiB) through grown ones.
    with patch("lightrl.compat.vllm_process._BUCKET_BYTES", 20_000):
        for bucket in engine._adapter._buckets:
            bucket.memory = torch.empty(0, dtype=torch.uint8)
        for seed in (2, 3):
            engine.load_weights(change(model, seed).named_parameters(), policy_version=seed)
            assert canary_gap(engine, model) <= 5e-5


def test_gap_through_shared_memory(untied: VLLMEngine, untied_folder: Path) -> None:
    """`test_kill_trainer` covers tied weights, and with `-m long` a worker process."""
    check_gaps(untied, load(untied_folder))


def test_a_broken_push_is_told_and_mended(untied: VLLMEngine, untied_folder: Path) -> None:
    model = load(untied_folder)
    weights = list(model.named_parameters())
    untied.load_weights(weights, policy_version=1)
    with pytest.raises(ValueError, match=r"1\.self_attn\.v_proj\.bias"):
        untied.load_weights([w for w in weights if "1.self_attn.v_proj.bias" not in w[0]], policy_version=2)
    with pytest.raises(ValueError, match="surplus"):
        untied.load_weights([*weights, ("surplus.weight", torch.zeros(3))], policy_version=2)

    def breaks_off():
        yield weights[0]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        untied.load_weights(breaks_off(), policy_version=2)
    assert untied.policy_version == -1
    untied.load_weights(weights, policy_version=3)
    assert canary_gap(untied, model) <= 5e-5


def kill_mid_rollout(engine: VLLMEngine, victim: int) -> float:
    """Kills a process while groups are out; seconds until the error.

    960 sequences are more than run at once, so the rollout is far from done then.
    """
    with ThreadPoolExecutor(1) as pool:
        groups = pool.submit(ask, engine, PROMPTS, LONG, num_completions=60, seeds=range(16))
        assert until(lambda: bool(engine._finished or engine._groups))
        time.sleep(0.5)
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDiedError):
            groups.result()
    return time.monotonic() - began


def commands(pids: list[int]) -> dict[str, int]:
    """Which process is the core, and which a worker, by vLLM's process titles."""
    return {"core" if "EngineCore" in " ".join(psutil.Process(p).cmdline()) else "worker": p for p in pids}


def test_killed_core_is_told_in_time(untied: VLLMEngine, untied_folder: Path) -> None:
    """vLLM alone would wait for ever. It ends the module's engine, which the next test starts again."""
    untied.load_weights(load(untied_folder).named_parameters(), policy_version=1)
    pids = untied.process_ids
    assert len(pids) == 1
    sockets = Path(untied._started()._sockets)  # other engines of this process have theirs
    assert any(sockets.iterdir())
    assert kill_mid_rollout(untied, commands(pids)["core"]) < SOON
    assert not sockets.exists()
    assert not untied.started and untied.policy_version == -1
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("victim", ["core", pytest.param("worker", marks=pytest.mark.long)])
def test_a_kill_during_a_push_is_told_in_time(untied: VLLMEngine, untied_folder: Path, victim: str) -> None:
    workers = {"distributed_executor_backend": "mp", "max_num_seqs": 8}
    engine = untied if victim == "core" else VLLMEngine(in_process=False, engine_args=workers)
    engine.start(EngineContext(str(untied_folder), max_prompt_tokens=64, max_new_tokens=120))
    pids = engine.process_ids

    def kills():
        for number, weight in enumerate(load(untied_folder).named_parameters()):
            if number == 3:
                os.kill(commands(pids)[victim], signal.SIGKILL)
            yield weight

    began = time.monotonic()
    with pytest.raises(EngineDiedError):
        engine.load_weights(kills(), policy_version=1)
    assert time.monotonic() - began < SOON
    assert not engine.started and not any(psutil.pid_exists(pid) for pid in pids)

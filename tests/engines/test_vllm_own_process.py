"""The engine in processes of its own: same numbers, and its death told within 5 seconds, with a restart on request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback

from lightrl.algorithms import PPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.engines import EngineContext, EngineDiedError, EngineRestartedError, VLLMEngine
from lightrl.objectives import GroupRelative
from lightrl.records import Prompts, SamplingParams
from lightrl.rollout.collation import collate
from tests.engines.conftest import SOON, ask, change, load
from tests.engines.test_vllm_sync import canary_gap, sampled_gap
from tests.toys import quiet_trainer, sums_data

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

PROMPTS = Prompts(token_ids=[[2, 5 + i, 17, 20 + i] for i in range(16)], texts=[""] * 16)
LONG = SamplingParams(max_new_tokens=120, ignore_eos=True)


def start(folder: Path, **arguments) -> VLLMEngine:
    engine = VLLMEngine(in_process=False, **arguments)
    engine.start(EngineContext(str(folder), max_prompt_tokens=64, max_new_tokens=120))
    return engine


@pytest.fixture(scope="module")
def untied(untied_folder: Path) -> Iterator[VLLMEngine]:
    engine = start(untied_folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tied(tied_folder: Path) -> Iterator[VLLMEngine]:
    """A core and a worker, as on GPUs and with the user's own binding of threads; `untied` is one process."""
    engine = start(
        tied_folder, restart_engine=True, engine_args={"distributed_executor_backend": "mp", "max_num_seqs": 8}
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("which", ["untied", "tied"])
def test_gap_through_shared_memory(which: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = request.getfixturevalue(which), load(request.getfixturevalue(f"{which}_folder"))
    change(model)
    assert canary_gap(engine, model) > 0.5
    engine.load_weights(model.named_parameters(), policy_version=1)
    assert canary_gap(engine, model) <= 5e-5
    for temperature in (1.0, 0.7):
        assert sampled_gap(engine, model, temperature) <= 5e-5
    # Buckets far smaller than the model: tensors go through both by turns, the largest (64 KiB) through grown ones.
    monkeypatch.setattr("lightrl.engines.vllm.weights._BUCKET_BYTES", 20_000)
    engine._sender.buckets[0].memory = engine._sender.buckets[1].memory = torch.empty(0, dtype=torch.uint8)
    for seed in (2, 3):
        engine.load_weights(change(model, seed).named_parameters(), policy_version=seed)
        assert canary_gap(engine, model) <= 5e-5


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
    """Kills a process once the first group is out; seconds until the error. It must be `EngineDiedError`.

    960 sequences are more than run at once, so the rollout is far from done then.
    """
    stream = ask(engine, PROMPTS, LONG, num_completions=60, seeds=range(16))
    next(stream)
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDiedError):
        list(stream)
    return time.monotonic() - began


def commands(pids: list[int]) -> dict[str, int]:
    """Which process is the core, and which a worker, by vLLM's process titles."""
    return {"core" if "EngineCore" in " ".join(psutil.Process(p).cmdline()) else "worker": p for p in pids}


@pytest.mark.long
@pytest.mark.parametrize("victim", ["worker", "core"])
def test_restart_with_weights_pushed_again(tied: VLLMEngine, tied_folder: Path, victim: str) -> None:
    model = change(load(tied_folder))
    tied.load_weights(model.named_parameters(), policy_version=1)
    before = tied.process_ids
    assert len(before) == 2
    if victim == "worker":
        tied.restart_engine = False
        assert kill_mid_rollout(tied, commands(before)["worker"]) < SOON
        assert not any(psutil.pid_exists(pid) for pid in before)
        with pytest.raises(EngineDiedError):
            list(ask(tied, PROMPTS, LONG, num_completions=1, seeds=range(16)))
        tied.restart_engine = True
        tied.start(EngineContext(str(tied_folder), max_prompt_tokens=64, max_new_tokens=120))
    else:
        stream = ask(tied, PROMPTS, LONG, num_completions=60, seeds=range(16))
        next(stream)
        os.kill(commands(before)["core"], signal.SIGKILL)
        with pytest.raises(EngineRestartedError, match="Push them"):
            list(stream)
        assert not any(psutil.pid_exists(pid) for pid in before)
    assert tied.started and tied.policy_version == -1
    tied.load_weights(model.named_parameters(), policy_version=2)
    assert canary_gap(tied, model) <= 5e-5


def test_killed_core_is_told_in_time(untied: VLLMEngine, untied_folder: Path) -> None:
    """Without `restart_engine`; vLLM alone would wait for ever. Last, for it ends the module's engine."""
    untied.load_weights(load(untied_folder).named_parameters(), policy_version=1)
    pids = untied.process_ids
    assert len(pids) == 1
    sockets = Path(untied._started()._sockets)  # other engines of this process have theirs
    assert any(sockets.iterdir())
    assert kill_mid_rollout(untied, commands(pids)["core"]) < SOON
    assert not sockets.exists()
    assert not untied.started and untied.policy_version == -1
    assert not any(psutil.pid_exists(pid) for pid in pids)


class Kills:
    """A reward function that kills the engine's core while most of the rollout is still to be sampled."""

    def __init__(self) -> None:
        self.engine: VLLMEngine | None = None
        self.victims: set[int] = set()
        self.killed_at = 0.0
        self.lock = Lock()

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        with self.lock:
            if self.engine is not None:
                core = commands(self.engine.process_ids)["core"]
                self.engine, self.killed_at = None, time.monotonic()
                self.victims.add(core)
                os.kill(core, signal.SIGKILL)
        return [float(len(text)) for text in completions]


class Checks(Callback):
    """Kills in rollout 1 with `restart_engine`, samples it once more without, then kills in rollout 2 without."""

    def __init__(self, kills: Kills) -> None:
        self.kills = kills
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.kills.engine = trainer.datamodule.engine

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        data = trainer.datamodule
        groups = data.sampler.finish(data.sampler.begin(0, recover=True)).groups
        again = collate(groups, data.tokenizer.pad_token_id, data.sampling.temperature)
        self.pairs = [(getattr(batch, k), getattr(again, k)) for k in ("token_ids", "response_mask", "engine_logprobs")]
        data.engine.restart_engine = False
        self.kills.engine = data.engine


def test_a_rollout_survives_its_engine_and_is_the_same(tied: VLLMEngine, tied_folder: Path) -> None:
    kills = Kills()
    checks = Checks(kills)
    engine, tied.restart_engine = tied, True
    engine.mark_stale()
    data = sums_data(
        engine=engine, rewards=[kills], sampling=SamplingParams(max_new_tokens=100, ignore_eos=True), group_size=8,
        prompts_per_rollout=16,
    )  # fmt: skip
    module = PPOLightningModule(
        str(tied_folder),
        critic=None,
        advantage=GroupRelative(),
        whiten_advantages=False,
    )
    with pytest.raises(EngineDiedError, match="engine process"):
        quiet_trainer(callbacks=[WeightSync(), checks]).fit(module, data)
    assert time.monotonic() - kills.killed_at < SOON
    assert len(kills.victims) == 2
    tokens, mask, logprobs = checks.pairs
    assert torch.equal(*tokens) and torch.equal(*mask)
    torch.testing.assert_close(*logprobs, atol=5e-5, rtol=0)
    assert not engine.started and not any(psutil.pid_exists(pid) for pid in kills.victims)


@pytest.mark.parametrize("victim", ["core", pytest.param("worker", marks=pytest.mark.long)])
def test_a_kill_during_a_push_is_told_in_time(tied: VLLMEngine, tied_folder: Path, victim: str) -> None:
    tied.restart_engine = False
    if not tied.started:
        tied.start(EngineContext(str(tied_folder), max_prompt_tokens=64, max_new_tokens=120))
    pids = tied.process_ids

    def kills():
        for number, weight in enumerate(load(tied_folder).named_parameters()):
            if number == 3:
                os.kill(commands(pids)[victim], signal.SIGKILL)
            yield weight

    began = time.monotonic()
    with pytest.raises(EngineDiedError):
        tied.load_weights(kills(), policy_version=1)
    assert time.monotonic() - began < SOON
    assert not tied.started and not any(psutil.pid_exists(pid) for pid in pids)

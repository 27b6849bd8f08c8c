"""Environments and programs with real vLLM, in several processes, killed and resumed.

Run as a module, the file is what a process that is killed does, or each of two ranks.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import RolloutCheckpoint
from lightrl.objectives import GroupRelative
from lightrl.rollout import Ahead
from tests import forks
from tests.distributed.job import make_strategy
from tests.rollout.tasks import Letters, fit, sgd, talk
from tests.toys import ThreadEngine


def same(module: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


# ---- vLLM ------------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_in_this_process_samples_rows_whose_logprobs_are_those_trained(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And computes the turns before only once: its prefix cache knows them."""
    pytest.importorskip("vllm")
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from lightrl.engines.vllm.engine import VLLMEngine

    lengths, cached, look_up = [], [], KVCacheManager.get_computed_blocks

    def counted(manager: Any, request: Any) -> Any:
        found = look_up(manager, request)
        lengths.append(request.num_tokens)
        cached.append(found[1])
        return found

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", counted)
    engine = VLLMEngine(max_model_len=256, engine_args={"block_size": 32})
    _, keep = fit(path, engine=engine)  # the canary asks vLLM about each row, at 1e-5
    assert max(keep.gaps) < 2e-5 and keep.metrics[1]["rollout/turns"] > 1
    assert max(cached) > max(sorted(lengths)[: len(lengths) // 4])  # more than any first prompt is long


# ---- killed and resumed ----------------------------------------------------------------------------------------------


def resumable(way: str, folder: Path, path: str, kill_at: int = 0, ckpt_path: str | None = None) -> Any:
    """A run whose process is killed after the turn of that number."""
    turns = itertools.count(1)

    def turn_ends() -> None:
        if next(turns) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    class Dies(Letters):
        async def step(self, reply: Any) -> Any:
            turn_ends()
            return await super().step(reply)

    def program(row: Any, base_url: str, api_key: str) -> float:
        return talk(row, base_url, api_key, lambda turn: turn_ends())

    checkpoint = RolloutCheckpoint(1, dirpath=str(folder / "checkpoints"))
    attempts: dict[str, Any] = {"environment": Dies} if way == "environment" else {"program": program}
    trainer = {"enable_checkpointing": True}
    return fit(path, [checkpoint], trainer=trainer, rollouts_per_epoch=3, ckpt_path=ckpt_path, **attempts)[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["environment", "program"])
def test_killed_between_two_turns_and_resumed_is_the_run_that_was_not(way: str, path: str, tmp_path: Path) -> None:
    whole = resumable(way, tmp_path / "whole", path)
    assert forks.run(__name__, "killed", path, str(tmp_path), way) == -signal.SIGKILL
    last = tmp_path / "checkpoints" / "last.ckpt"
    resumed = resumable(way, tmp_path / "again", path, ckpt_path=str(last))
    assert same(resumed, whole) and resumed.policy_version == whole.policy_version == 3


# ---- two ranks -------------------------------------------------------------------------------------------------------


WAYS: dict[str, dict[str, Any]] = {
    "environment": {"environment": Letters},
    "program": {"program": talk},
    "staleness": {"schedule": Ahead()},
}
SHARDED = {"fsdp2": ("program", "staleness"), "zero2": ("environment",), "zero3": ("program",)}
COMPARED = ("rollout/turns", "rollout/stop_stop", "reward/mean")


def ranks_run(path: str, strategy: str, way: str) -> tuple[Any, dict[str, Any]]:
    """A run of two rollouts, and what is to be the same on any number of ranks."""
    module = GRPOLightningModule(path, kl=None, optimizer=sgd, advantage=GroupRelative(scale="none"))
    devices = 1 if strategy == "auto" else 2
    trainer = {"devices": devices, "strategy": make_strategy(strategy), "log_every_n_steps": 1}
    weights, beside = Weights(), way == "staleness"  # needs a concurrent engine
    engine: dict[str, Any] = {"engine": ThreadEngine(), "compare": False} if beside else {}
    _, keep = fit(path, [weights], module, trainer, rollouts_per_epoch=3 if beside else 2, **WAYS[way], **engine)
    return module, {
        "weights": weights.after,
        "prompts": [p for r in keep.rollouts for p in r.prompts],
        "metrics": {name: [m[name] for m in keep.metrics] for name in COMPARED},
        "gap": max(keep.gaps, default=0.0),
        "staleness": [m.get("rollout/staleness", 0) for m in keep.metrics],
    }


class Weights(Callback):
    """Gathers the whole policy at the end of the run."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.after = {name: value.detach().float().clone() for name, value in module.named_policy_weights()}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("ddp", "fsdp2"), pytest.param(("zero2", "zero3"), marks=pytest.mark.long)], ids=["torch", "deepspeed"]
)
def test_two_ranks_play_their_own_environments_and_learn_what_one_learns(
    path: str, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Every strategy, with an environment and with a program, and sampled ahead, in one pair of processes."""
    if "zero2" in names:
        pytest.importorskip("deepspeed")
    alone = {way: ranks_run(path, "auto", way)[1] for way in WAYS}
    assert alone["staleness"]["staleness"] == [0, 1, 1]
    forks.ranks(__name__, "ranks", path, str(tmp_path), *names)
    for strategy, (way, one) in itertools.product(names, alone.items()):
        if way not in SHARDED.get(strategy, WAYS):
            continue
        both = [torch.load(tmp_path / f"{strategy}-{way}-{rank}.pt", weights_only=True) for rank in range(2)]
        where = f"{strategy}, {way}"
        assert all(rank["gap"] < 1e-5 for rank in both), where
        for name, value in one["weights"].items():
            assert all(torch.allclose(rank["weights"][name], value, atol=1e-6) for rank in both), f"{where}: {name}"
        assert sorted(both[0]["prompts"] + both[1]["prompts"]) == sorted(one["prompts"]), where
        assert both[0]["staleness"] == both[1]["staleness"] == one["staleness"], where
        for name, wanted in one["metrics"].items():
            assert both[0]["metrics"][name] == both[1]["metrics"][name] == pytest.approx(wanted, abs=1e-6), where


def main(kind: str, path: str, folder: Path, *words: str) -> None:
    torch.set_num_threads(1)
    if kind == "killed":
        resumable(words[0], folder, path, kill_at=60)
        return
    for strategy in words:
        for way in SHARDED.get(strategy, WAYS):
            _, found = ranks_run(path, strategy, way)
            torch.save(found, folder / f"{strategy}-{way}-{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])

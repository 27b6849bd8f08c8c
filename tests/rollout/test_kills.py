"""What is killed in the middle of attempts: the run goes on, or stops with the cause, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.callbacks import RolloutCheckpoint
from lightrl.data.prompts import PromptSource
from lightrl.engines.base import EngineDiedError
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.environments import AgentProgram, EnvironmentFailedError
from tests.environments.test_endpoint import listening
from tests.rollout.tasks import Letters, fit
from tests.waiting import gone, no_thread_left, until

HERE = Path(__file__).resolve().parent
PHASES = ("start", "asking", "between turns", "end")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = listening()
    with no_thread_left("endpoint", "program's process", "lightrl-sampling", "lightrl-episodes"):
        yield
        gc.collect()  # what a loop held that broke off
    assert until(lambda: listening() <= before), "a socket is left"
    assert Letters.alive == 0


def test_agent_processes_killed_at_each_phase_are_made_again_with_the_same_seeds(path: str, tmp_path: Path) -> None:
    def run(kind: str) -> Any:
        folder = tmp_path / kind
        folder.mkdir()
        if kind == "quiet":
            for phase in PHASES:
                (folder / phase).touch()  # each has happened
        program = AgentProgram(f"{HERE / 'killed_program.py'}:main", process=True, env={"KILLED_FOLDER": str(folder)})
        rows = [{"prompt": f"say {phase}", "word": phase} for phase in PHASES]
        _, keep = fit(
            path, rollouts_per_epoch=1, group_size=2, prompts=PromptSource(rows=rows),
            made=program,
        )  # fmt: skip
        pids = [int(pid) for file in folder.glob("pids-*") for pid in file.read_text().split()]
        assert len(pids) == 2 * (8 + (len(PHASES) if kind == "killed" else 0)) and all(gone(pid) for pid in pids)
        return keep

    quiet, killed = run("quiet"), run("killed")
    assert killed.metrics[0]["rollout/retried"] == len(PHASES) and killed.metrics[0]["rollout/stop_failure"] == 0
    assert quiet.metrics[0]["rollout/retried"] == 0
    assert torch.equal(killed.rollouts[0].token_ids, quiet.rollouts[0].token_ids)


class Sandboxed(Letters):
    """Everything it does goes through a process of its own, which is killed in the third of a run."""

    made = 0
    phase = ""
    pids: list[int] = []  # noqa: RUF012 - of all objects

    def __init__(self) -> None:
        super().__init__()
        Sandboxed.made += 1
        self.doomed = Sandboxed.made == 3
        self.began = False
        self.sandbox = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        Sandboxed.pids.append(self.sandbox.pid)
        self.at("made")

    def at(self, phase: str) -> None:
        if self.doomed and phase == Sandboxed.phase:
            self.sandbox.kill()

    async def ask(self) -> None:
        def asked() -> None:
            assert self.sandbox.stdin is not None and self.sandbox.stdout is not None
            self.sandbox.stdin.write(b"go on\n")
            self.sandbox.stdin.flush()
            if not self.sandbox.stdout.readline():
                raise EnvironmentFailedError("the sandbox is gone")

        await asyncio.to_thread(asked)

    async def reset(self, row: Any, *, seed: int) -> Any:
        self.at("reset")
        await self.ask()
        messages = await super().reset(row, seed=seed)
        self.began = True
        return messages

    async def step(self, reply: Any) -> Any:
        self.at("step")
        await self.ask()
        return await super().step(reply)

    async def finish(self, stop_reason: str) -> float:
        self.at("finish")
        await self.ask()
        return await super().finish(stop_reason)

    async def close(self) -> None:
        self.at("close")
        self.sandbox.kill()
        self.sandbox.communicate()
        if self.began:
            await super().close()


@pytest.fixture(scope="module")
def unharmed(path: str) -> torch.Tensor:
    return fit(path, environment=Letters, rollouts_per_epoch=1)[1].rollouts[0].token_ids


@pytest.mark.parametrize("phase", ["reset", "finish", "close"])
def test_an_environment_whose_process_is_killed_at_any_phase_is_made_again(
    phase: str, path: str, unharmed: torch.Tensor
) -> None:
    Sandboxed.made, Sandboxed.phase, Sandboxed.pids = 0, phase, []
    _, keep = fit(path, environment=Sandboxed, rollouts_per_epoch=1)
    assert keep.metrics[0]["rollout/stop_failure"] == 0
    assert keep.metrics[0]["rollout/retried"] == (phase != "close"), "what it brought is complete before it closes"
    assert torch.equal(keep.rollouts[0].token_ids, unharmed)
    assert len(Sandboxed.pids) == 16 + (phase != "close") and all(gone(pid) for pid in Sandboxed.pids)


class Struck(Letters):
    """Does something once, at a phase of the second rollout: its own, or one of the engine or the reward function."""

    phase = ""
    strike: Any = None

    @classmethod
    def at(cls, phase: str) -> None:
        if phase == cls.phase and cls.strike is not None and len(cls.seen) > 16:
            strike, cls.strike = cls.strike, None
            strike()

    async def reset(self, row: Any, *, seed: int) -> Any:
        messages = await super().reset(row, seed=seed)
        self.at("reset")
        return messages

    async def step(self, reply: Any) -> Any:
        self.at("step")
        return await super().step(reply)


def scored(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    Struck.at("scoring")
    return [len(text) / 100 for text in completions]


class Mortal(TransformersEngine):
    """The own engine, which may be struck between two completions, and dies as one in a process of its own does."""

    error: Exception | None = None

    def step(self) -> Any:
        groups = super().step()
        if groups:
            Struck.at("generation")
        if self.error is not None:
            raise self.error
        return groups


STRUCK = ("step", "generation", "scoring")


def struck(path: str, phase: str, strike: Any, **arguments: Any) -> Any:
    Struck.phase, Struck.strike, Struck.seen, Struck.alive = phase, strike, [], 0
    try:
        return fit(path, environment=Struck, rewards=[scored], **{"engine": Mortal(), **arguments})
    finally:
        assert until(lambda: Struck.alive == 0, 20), "an environment was not closed"
        assert (Struck.strike is None) or not phase, "the phase came"


@pytest.fixture(scope="module")
def whole(path: str) -> Any:
    return struck(path, "", None)


@pytest.mark.parametrize("phase", STRUCK)
def test_ctrl_c_at_any_phase_of_an_environment_leaves_a_checkpoint_that_resumes(
    phase: str, path: str, whole: Any, tmp_path: Path
) -> None:
    saving: dict[str, Any] = {"trainer": {"enable_checkpointing": True}}

    def callbacks() -> list[Any]:
        return [RolloutCheckpoint(100, dirpath=str(tmp_path / "checkpoints"))]

    with pytest.raises(SystemExit):
        struck(path, phase, lambda: os.kill(os.getpid(), signal.SIGINT), callbacks=callbacks(), **saving)
    last = tmp_path / "checkpoints" / "last.ckpt"
    module, keep = struck(path, "", None, callbacks=callbacks(), ckpt_path=str(last), **saving)
    assert torch.equal(keep.rollouts[0].token_ids, whole[1].rollouts[1].token_ids)
    for ours, expected in zip(module.parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("phase", STRUCK[:2])
def test_an_engine_that_dies_at_any_phase_of_an_environment_ends_the_run(phase: str, path: str) -> None:
    dead = Mortal()
    with pytest.raises(EngineDiedError, match="It is gone"):
        struck(path, phase, lambda: setattr(dead, "error", EngineDiedError("It is gone.")), engine=dead)

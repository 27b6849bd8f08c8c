"""What is killed in the middle of attempts: the run goes on, or stops with the cause, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.data.prompts import PromptSource
from lightrl.environments import AgentProgram, EnvironmentFailedError
from tests.environments.test_endpoint import gone, listening
from tests.rollout.tasks import Letters, chat_model, fit

HERE = Path(__file__).resolve().parent
PHASES = ("start", "asking", "between turns", "end")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = listening()
    yield
    assert listening() <= before, "a socket is left"
    left = ("endpoint", "program's process", "lightrl-sampling", "lightrl-episodes")
    assert not [thread for thread in threading.enumerate() if thread.name in left]
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


@pytest.mark.parametrize("phase", ["made", "reset", "step", "finish", "close"])
def test_an_environment_that_breaks_at_any_phase_is_made_again(phase: str, path: str) -> None:
    class Breaks(Letters):
        """The third of a run breaks."""

        made = 0

        def __init__(self) -> None:
            super().__init__()
            Breaks.made += 1
            self.number = Breaks.made
            self.at("made")

        def at(self, where: str) -> None:
            if self.number == 3 and where == phase:
                raise EnvironmentFailedError(f"broken at {where}")

        async def reset(self, row: Any, *, seed: int) -> Any:
            messages = await super().reset(row, seed=seed)
            self.at("reset")
            return messages

        async def step(self, reply: Any) -> Any:
            self.at("step")
            return await super().step(reply)

        async def finish(self, stop_reason: str) -> float:
            self.at("finish")
            return await super().finish(stop_reason)

        async def close(self) -> None:
            await super().close()
            self.at("close")

    _, keep = fit(path, environment=Breaks, rollouts_per_epoch=1)
    assert keep.metrics[0]["rollout/stop_failure"] == 0
    assert keep.metrics[0]["rollout/retried"] == (phase != "close"), "what it brought is complete before it closes"
    _, other = fit(path, environment=Letters, rollouts_per_epoch=1)
    assert torch.equal(keep.rollouts[0].token_ids, other.rollouts[0].token_ids)

"""Ctrl-C and SIGTERM at any time leave a `last.ckpt` between two rollouts that resumes exactly, and no process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from lightrl.callbacks import RolloutCheckpoint
from lightrl.rollout import Evaluation
from lightrl.rollout.learner import RLCallback
from tests import forks
from tests.test_resume import Reward, assert_same, rows, run
from tests.toys import model_fixture, quickstart_model, quiet_trainer, write_run
from tests.waiting import until


def send(signum: int) -> Callable[[], None]:
    def do() -> None:
        os.kill(os.getpid(), signum)

    return do


class During(RLCallback):
    """Does something during the updates of the rollout of that number, or in the first evaluation (start, middle)."""

    def __init__(self, do: Callable[[], None], update: int | None = None, evaluation: str = "") -> None:
        self.do, self.update, self.evaluation = do, update, evaluation

    def on_experience_made(self, trainer: Any, module: Any, experience: Any) -> None:
        if self.update == trainer.fit_loop.total_batch_idx + 1:
            self.do()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if self.evaluation == "start":
            self.evaluation = ""
            self.do()

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.evaluation:
            self.evaluation = ""
            self.do()


EVALUATION = {"evaluation": Evaluation([{"prompt": f"{a}+{a}="} for a in range(8)], batch_size=4)}


model = model_fixture(num_hidden_layers=2, hidden_size=64, intermediate_size=64)


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, model, every_n_rollouts=100, **EVALUATION), folder


SCENES: dict[str, tuple[int | None, Callable[[], dict[str, Any]]]] = {
    # name: (rollouts in last.ckpt, arguments of the run)
    "generating": (2, lambda: {"reward": Reward(3, send(signal.SIGINT))}),
    "generating_sigterm": (2, lambda: {"reward": Reward(3, send(signal.SIGTERM))}),
    "generating_the_first": (None, lambda: {"reward": Reward(1, send(signal.SIGINT))}),
    "updating": (2, lambda: {"callbacks": [During(send(signal.SIGINT), update=2)]}),
    "evaluating_sigterm": (3, lambda: {"callbacks": [During(send(signal.SIGTERM), evaluation="start")]}),
}


@pytest.mark.parametrize("scene", SCENES)
def test_interrupted_and_resumed_is_the_run_that_was_not(
    scene: str, model: str, whole: tuple[Any, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, arguments = SCENES[scene]
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, model, every_n_rollouts=100, **arguments(), **EVALUATION)
    assert exit_.value.code == 1
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert last.exists() == (saved is not None)
    if saved is None:
        assert "Resume with" not in caplog.text
        return
    assert f"Resume with: --ckpt_path {last}" in caplog.text
    assert torch.load(last, weights_only=True)["global_step"] == 4 * saved
    stopping = EarlyStopping("eval/reward", mode="max", patience=9)  # fails at the end of an epoch without evaluation
    again = run(tmp_path, model, resume=str(last), every_n_rollouts=100, callbacks=[stopping], **EVALUATION)
    assert_same(again, whole[0])
    expected = rows(whole[1], "first")
    assert rows(tmp_path, "first") == expected[:saved]
    assert rows(tmp_path, "resumed") == expected[saved:]
    evaluations = rows(whole[1], "first", "eval/reward")
    assert len(evaluations) == 2 and rows(tmp_path, "resumed", "eval/reward") == evaluations


def test_an_evaluation_that_kill_9_cut_is_made_by_the_run_that_goes_on(
    model: str, whole: tuple[Any, Path], tmp_path: Path
) -> None:
    last, kept = tmp_path / "checkpoints" / "last.ckpt", tmp_path / "kept.ckpt"  # kept is what a kill would leave
    during = During(lambda: kept.write_bytes(last.read_bytes()), evaluation="middle")
    undisturbed = run(tmp_path, model, every_n_rollouts=3, callbacks=[during], **EVALUATION)
    assert_same(undisturbed, whole[0])
    stopping = EarlyStopping("eval/reward", mode="max", patience=9)
    again = run(tmp_path, model, resume=str(kept), every_n_rollouts=3, callbacks=[stopping], **EVALUATION)
    assert_same(again, whole[0])
    assert rows(tmp_path, "resumed") == rows(whole[1], "first")[3:]
    assert rows(tmp_path, "resumed", "eval/reward") == rows(whole[1], "first", "eval/reward")


SIGNALS = """
import os, signal
calls = 0

def reward(prompts, completions, **columns):
    global calls
    calls += 1
    if calls == 20:  # in the third rollout of 8 prompts: to the whole foreground group, as a terminal does
        os.killpg(0, signal.SIGINT)
    return [float(len(text) % 2) for text in completions]
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_ctrl_c_on_the_command_with_an_engine_of_its_own(tmp_path: Path) -> None:
    """The engine's processes get the signal too: they must not die of it before the trainer has saved."""
    pytest.importorskip("vllm")
    (tmp_path / "signals.py").write_text(SIGNALS)
    callbacks = [{"class_path": name} for name in ("WeightSync", "RolloutCheckpoint")]
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs", "name": "run"}}
    data = {
        "rewards": ["signals:reward"],
        "engine": {"class_path": "VLLMEngine", "init_args": {"in_process": False}},
        "prompts_per_rollout": 8,
        "rollouts_per_epoch": 4,
    }
    trainer = {"callbacks": callbacks, "logger": logger, "enable_checkpointing": True}
    model = quickstart_model(tmp_path / "model")
    write_run(tmp_path / "run.yaml", model, "PPOLightningModule", trainer=trainer, data=data)
    process = forks.Fork("lightrl", "fit", "--config", "run.yaml", cwd=tmp_path)
    status, said = process.poll(550), process.printed()
    assert status == 1, said[-3000:]
    assert "Traceback" not in said
    last = Path("logs/run/version_0/checkpoints/last.ckpt")
    assert f"Resume with: --ckpt_path {last}" in said
    assert torch.load(tmp_path / last, weights_only=True)["RolloutDataModule"]["prompt_cursor"] == 16
    deadline = time.monotonic() + 60  # Python's resource tracker ends by itself, a moment after its parent
    while left := _alive(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_second_ctrl_c_ends_the_process_wherever_it_hangs(model: str, tmp_path: Path) -> None:
    process = forks.Fork("tests.hanging", model, str(tmp_path))
    try:
        assert until(lambda: "hangs\n" in process.printed() or process.poll() is not None, 300)
        assert "hangs\n" in process.printed(), process.printed()[-3000:]
        time.sleep(1)
        os.kill(process.pid, signal.SIGINT)
        assert process.poll(60) == -signal.SIGINT
    finally:
        process.kill()


@pytest.mark.parametrize("interactive", [False, True])
def test_a_second_ctrl_c_never_ends_a_notebook(interactive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if interactive:
        monkeypatch.setattr("sys.ps1", "In : ", raising=False)
    else:
        monkeypatch.delattr("sys.ps1", raising=False)
    callback, before = RolloutCheckpoint(), signal.getsignal(signal.SIGINT)
    callback._trainer, callback._updating = quiet_trainer(), True
    try:
        callback._on_interrupt(signal.SIGINT, None)
        second = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert second == (signal.default_int_handler if interactive else signal.SIG_DFL)


def _alive(session: int) -> list[psutil.Process]:
    """Processes of a session. A dead one that nobody has reaped yet is dead."""
    members = [p for p in psutil.process_iter(["status", "cmdline"]) if _session(p.pid) == session]
    return [p for p in members if p.info["status"] != psutil.STATUS_ZOMBIE]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None

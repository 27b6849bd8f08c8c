"""SIGTERM ends every run of the command line with 75, and a run that trains goes on exactly, whatever saves it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lightrl.cli import main, run
from tests.toys import SMALL, quickstart_model

BATCHES = 6  # of an epoch


class Strike(Callback):
    """Sends this process a signal in the middle of a batch of that number, counted from 1, or of an evaluation."""

    def __init__(self, batch: int = 0, evaluation: bool = False, signum: int = int(signal.SIGTERM)) -> None:
        self.batch, self.evaluation, self.signum = batch, evaluation, signum
        self.evaluated = 0

    def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
        """Before a batch's gradients, or those of several, are made."""
        self.on_train_batch_start(trainer)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if self.batch == trainer.fit_loop.total_batch_idx + 1:
            self.batch = 0
            os.kill(os.getpid(), self.signum)

    def on_validation_batch_start(self, *args: Any) -> None:
        self.evaluated += 1
        assert self.evaluated == 1 or not self.evaluation, "the evaluation went on"
        if self.evaluation:
            os.kill(os.getpid(), self.signum)


class Leave(Callback):
    """Goes to another folder while a run trains, as code that a reward function runs may."""

    def on_train_start(self, *args: Any) -> None:
        Path("away").mkdir(exist_ok=True)
        os.chdir("away")


@pytest.fixture()
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a supervised run of 2 epochs of 6 batches as YAML."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    model = quickstart_model(tmp_path / "model", **SMALL)

    def write(strike: dict[str, Any] | None = None, callbacks: Any = (), **trainer: Any) -> str:
        rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(2 * BATCHES)]
        strikes = [] if strike is None else [{"class_path": "tests.test_preemption.Strike", "init_args": strike}]
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
        content = {
            "run_dir": "run",
            "trainer": quiet | {"max_epochs": 2, "callbacks": [*callbacks, *strikes]} | trainer,
            "model": {"class_path": "SFTLightningModule", "init_args": {"actor": model}},
            "data": {"class_path": "SFTDataModule", "init_args": {"train": {"rows": rows}, "val": {"rows": rows}}},
        }
        content["data"]["init_args"]["batch_size"] = 2
        path = tmp_path / "sft.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


LIGHTNINGS = [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "kept"}}]
OWN = [{"class_path": "RolloutCheckpoint", "init_args": {"every_n_rollouts": 1}}]


@pytest.mark.parametrize(
    ("given", "batch", "saved"),
    [
        ({}, 8, 8),
        ({"callbacks": LIGHTNINGS}, 3, 3),
        ({"accumulate_grad_batches": 4}, 5, 6),  # the last update of an epoch takes the batches that are left
    ],
    ids=["nothing saves", "lightning", "accumulated"],
)
def test_a_run_ended_by_sigterm_goes_on_exactly(
    config: Callable[..., str], given: dict[str, Any], batch: int, saved: int, tmp_path: Path
) -> None:
    handlers = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]
    assert ended("fit", "--config", config({"batch": batch}, **given)) == 75
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)] == handlers
    (last,) = tmp_path.rglob("last.ckpt")
    assert last.parent.name == ("kept" if given.get("callbacks") == LIGHTNINGS else "checkpoints")
    progress = torch.load(last, weights_only=True)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    assert progress["ready"] == saved
    goes_on = run(["fit", "--config", config(**given), "--ckpt_path", "last"])
    whole = run(["fit", "--config", config(**given), "--run_dir", "whole"])
    ours, expected = goes_on.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def test_a_run_that_saves_nothing_ends_by_sigterm_too(config: Callable[..., str], tmp_path: Path) -> None:
    assert ended("fit", "--config", config({"batch": 2}, enable_checkpointing=False)) == 75
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_an_evaluation_ends_at_once(config: Callable[..., str], signum: int) -> None:
    assert ended("validate", "--config", config({"evaluation": True, "signum": int(signum)})) == 75


def test_a_runs_configuration_is_used_again_without_touching_the_run(
    config: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a run whose process goes elsewhere lose its relative folder."""
    leave = [{"class_path": "tests.test_preemption.Leave"}, *OWN]
    run(["fit", "--config", config(callbacks=leave, max_epochs=1)])
    monkeypatch.chdir(tmp_path)
    assert not list((tmp_path / "away").iterdir()) and (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()

    def state() -> dict[Path, bytes]:
        files = (path for path in (tmp_path / "run").rglob("*") if "validate" not in path.parts and path.is_file())
        return {path: path.read_bytes() for path in files}

    before = state()
    assert {"metrics.csv", "config.yaml"} <= {path.name for path in before}
    run(["validate", "--config", "run/config.yaml"])
    run(["fit", "--config", "run/config.yaml", "--run_dir", "other"])
    monkeypatch.chdir(tmp_path)
    assert state() == before
    assert all((tmp_path / place / "metrics.csv").is_file() for place in ("run/validate", "other"))

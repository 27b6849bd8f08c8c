"""What ThroughputMonitor measures, on a clock that the test moves."""

from __future__ import annotations

import csv
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar

from lightrl.callbacks import throughput
from lightrl.callbacks.throughput import EvaluateFirst, ThroughputMonitor
from lightrl.records import Rollouts
from tests.callbacks.toys import Loader, LoggingModule


class Clock(Callback):
    """A clock that each training batch moves by 2 s and each validation batch by 100 s."""

    now = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self.now += 2.0

    def on_validation_batch_start(self, *args: Any) -> None:
        self.now += 100.0


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["time/step"]]


def fit(make_trainer: Callable[..., Any], rollouts: Rollouts, callback: ThroughputMonitor, **arguments: Any) -> Any:
    clock = Clock()
    trainer = make_trainer(clock, callback, **arguments)
    with mock.patch.object(throughput.time, "perf_counter", lambda: clock.now):
        trainer.fit(LoggingModule(), Loader([rollouts] * 3), Loader([rollouts]))
    return trainer


def test_tokens_and_samples_per_second(rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """Prompts have 4 and 7 tokens; completions 1, 8, 2 and 6: 2 * 4 + 2 * 7 + 17 = 39 tokens, without padding."""
    fit(make_trainer, rollouts, ThroughputMonitor(), val_check_interval=1)
    rows = table(tmp_path)
    assert [float(row["time/step"]) for row in rows] == [2.0, 2.0, 2.0]  # the evaluations' 100 s are taken out
    assert [float(row["throughput/tokens_per_second"]) for row in rows] == [19.5] * 3
    assert [float(row["throughput/samples_per_second"]) for row in rows] == [2.0] * 3
    assert 0.05 < float(rows[0]["throughput/peak_memory_gb"]) < 500  # of a process that has loaded torch


def test_the_bar_shows_what_loggers_get_once(
    rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    rollouts.rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    trainer = fit(make_trainer, rollouts, ThroughputMonitor(), enable_progress_bar=True, max_epochs=2)
    bar = trainer.progress_bar_callback.get_metrics(trainer, trainer.lightning_module)
    assert bar == {"s/rollout": "2", "left": "0:00", "reward": "0.5", "kl": "0.25", "tok/s": "20"}
    rows = table(tmp_path)
    assert len(rows) == 6 and "reward" not in rows[0] and "tok/s" not in rows[0]
    assert [row["step"] for row in rows] == list("012345")
    assert all(float(row["reward/mean"]) == 0.5 for row in rows)


def test_it_takes_supervised_batches(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    class Supervised(LoggingModule):
        """Batches are dictionaries, `outputs` a loss."""

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:  # type: ignore[override]
            self.optimizers().step()
            return self.weight.sum()

    batch = {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)}
    clock = Clock()
    trainer = make_trainer(clock, ThroughputMonitor())
    with mock.patch.object(throughput.time, "perf_counter", lambda: clock.now):
        trainer.fit(Supervised(), Loader([batch]))  # type: ignore[list-item]
    assert float(table(tmp_path)[0]["throughput/tokens_per_second"]) == 2.0  # 4 tokens in 2 s


def test_the_time_left_counts_evaluations_and_not_the_start_of_the_engine(
    rollouts: Rollouts, make_trainer: Callable[..., Any]
) -> None:
    """A rollout takes 2 s, the first 50 s more, an evaluation 100 s: after 3 of 6 rollouts 3 x 2 + 100 s are left."""
    clock_, seen = Clock(), []

    class Starts(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            clock_.now += 50.0 * (trainer.global_step == 0)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append(monitor.pace())

    monitor = ThroughputMonitor()
    trainer = make_trainer(clock_, monitor, Starts(), max_epochs=2)
    with mock.patch.object(throughput.time, "perf_counter", lambda: clock_.now):
        trainer.fit(LoggingModule(), Loader([rollouts] * 3), Loader([rollouts]))
    assert [pace["left"] for pace in seen] == ["4:20", "0:08", "0:06", "1:44", "1:42", "1:40"]
    assert {pace["s/rollout"] for pace in seen[1:]} == {"2"}


def test_a_run_ends_with_its_result(
    rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def result() -> str:
        return capsys.readouterr().out.splitlines()[-1].rpartition(", ")[0]  # without the time

    rollouts.rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    trainer = make_trainer(EvaluateFirst(), ThroughputMonitor())
    trainer.fit(LoggingModule(), Loader([rollouts] * 3), Loader([rollouts]))
    assert result() == "Result: eval accuracy 0.50 -> 0.50 in 3 rollouts"
    assert "eval accuracy 0.50 -> 0.50" in (tmp_path / "hparams.yaml").read_text()
    once = make_trainer(EvaluateFirst(), ThroughputMonitor(), check_val_every_n_epoch=2)
    once.fit(LoggingModule(), Loader([rollouts] * 3), Loader([rollouts]))
    assert result() == "Result: eval accuracy 0.50 before training; 3 rollouts"
    make_trainer(ThroughputMonitor()).fit(LoggingModule(), Loader([rollouts]))
    assert result() == "Result: reward 0.50; 1 rollout"


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_something_moves_during_a_rollout(
    bar: Any, rollouts: Rollouts, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "TICK", 0.01)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown: list[str] = []

    class Waits(LoggingModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for done in range(3):
                self.trainer.datamodule.progress = (done, 8, "")  # type: ignore[attr-defined]
                for _ in range(200):
                    if f"{done}/8" in (text := self.now()):
                        shown.append(text)
                        break
                    threading.Event().wait(0.01)
            return super().training_step(batch, batch_idx)

        def now(self) -> str:
            own: Any = self.trainer.progress_bar_callback
            if bar is TQDMProgressBar:
                return str(own.train_progress_bar.postfix)
            return " ".join(f"{t.description} {int(t.completed)}/{t.total}" for t in own.progress.tasks)

    class Data(LightningDataModule):
        progress = None

        def train_dataloader(self) -> Loader:
            return Loader([rollouts] * 2)

    trainer = make_trainer(ThroughputMonitor(), bar(), enable_progress_bar=True)
    trainer.fit(Waits(), datamodule=Data())
    assert len(shown) == 6 and all("Sampling" in text for text in shown)
    assert "it/s" not in getattr(trainer.progress_bar_callback, "BAR_FORMAT", "")

"""What is read and set of Lightning's own objects; sharded loading itself is tested in tests/distributed."""

from __future__ import annotations

import inspect
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.fabric.strategies.model_parallel import _load_raw_module_state
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch import Tensor, nn

from lightrl.compat import lightning_checkpoints as compat
from lightrl.compat import lightning_cli
from tests import forks


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss: Tensor = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Recorder(Logger):
    """Keeps (step, metrics)."""

    name, version = "recorder", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics:
            self.rows.append((step, metrics["loss"]))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def fit(callback: Callback) -> Recorder:
    recorder = Recorder()
    Trainer(
        max_steps=2, logger=recorder, callbacks=[callback], log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=isinstance(callback, ModelCheckpoint), accelerator="cpu",
    ).fit(Model(), torch.utils.data.DataLoader(torch.ones(2, 1)))  # fmt: skip
    return recorder


def test_a_checkpoint_callback_can_save_and_choose_the_last_one(tmp_path: Path) -> None:
    class Saving(compat.SavingCheckpoint):
        def last_checkpoints(self, trainer: Trainer) -> set[str]:
            return {*super().last_checkpoints(trainer), str(tmp_path / "other.ckpt")}

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            self.write(trainer, str(tmp_path / "last.ckpt"))

    saving = Saving(tmp_path, save_last=True)
    fit(saving)
    trainer = Trainer(logger=False, default_root_dir=tmp_path, accelerator="cpu")
    assert saving.last_checkpoints(trainer) == {str(tmp_path / "last.ckpt"), str(tmp_path / "other.ckpt")}
    assert "_find_last_checkpoints" in inspect.getsource(_CheckpointConnector)


def test_the_step_of_loggers_can_be_set() -> None:
    class Set(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            compat.set_logged_step(trainer, 40 + trainer.fit_loop.total_batch_idx)

    assert [step for step, _ in fit(Set()).rows] == [40, 41]


def test_metrics_can_be_logged_before_the_batch_is_over() -> None:
    seen = []

    class Flush(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            recorder: Any = trainer.logger
            before = len(recorder.rows)
            compat.flush_step_metrics(trainer)
            seen.append(len(recorder.rows) - before)

    fit(Flush())
    assert seen == [1, 1]


def table(folder: Path, checkpoint: str | None) -> Any:
    """A logger that has begun for a run; the trainer is asked for nothing else."""
    logger = CSVLogger(folder, name="", version="")
    trainer: Any = SimpleNamespace(ckpt_path=checkpoint, loggers=[logger], is_global_zero=True)
    lightning_cli.begin_tables(trainer)
    logger.log_hyperparams({"a": 1})
    return logger


@pytest.mark.parametrize(("checkpoint", "left"), [(None, "loss,step\n"), ("last", "a,loss,step\n1,,0\n")])
def test_a_table_stays_until_the_first_row(checkpoint: str | None, left: str, tmp_path: Path) -> None:
    """With Lightning's own writer it is gone when the logger begins; a line that was cut short is not a row."""
    assert "rm_file(self.metrics_file_path)" in inspect.getsource(_ExperimentWriter._check_log_dir_exists)
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"a,step\r\n1,0\r\n2")
    logger = table(tmp_path, checkpoint)
    logger.save()
    logger.finalize("failed")
    assert path.read_bytes() == b"a,step\r\n1,0\r\n2"
    logger.log_metrics({"loss": 2.0}, step=1)
    logger.save()
    rows = path.read_text()
    assert rows.startswith(left) and rows.endswith("2.0,1\n") and rows.count("\n") == left.count("\n") + 1
    assert (tmp_path / "hparams.yaml").is_file()


def test_a_resumed_run_that_can_write_no_more_leaves_the_table_whole(tmp_path: Path) -> None:
    """Where a new column comes, Lightning empties the file and writes it anew."""
    path, before = tmp_path / "metrics.csv", b"a,step\r\n" + b"1.0,0\r\n" * 1000
    path.write_bytes(before)
    process = forks.Fork(__name__, str(tmp_path))
    assert process.poll(300) == 0, process.printed()
    assert not list(tmp_path.glob("*.partial"))
    assert path.read_bytes() == before
    assert "open(self.metrics_file_path" in inspect.getsource(_ExperimentWriter._rewrite_with_new_header)


def main(folder: Path) -> None:
    """Writes a row with a new column where files may have 2 KiB."""
    logger = table(folder, "last")
    logger.log_metrics({"a": 1.0, "new": 2.0}, step=1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
    with pytest.raises(OSError, match="File too large"):
        logger.save()


if __name__ == "__main__":
    main(Path(sys.argv[1]))


def test_the_loading_functions_take_what_they_are_given() -> None:
    names = inspect.signature(_load_raw_module_state).parameters
    assert {"state_dict", "module", "strict"} <= names.keys()
    assert list(inspect.signature(_load_distributed_checkpoint).parameters) == ["checkpoint_folder"]
    source, target = nn.Linear(2, 1), nn.Linear(2, 1)
    compat.load_module_state({"weight": source.weight.detach(), "of another": torch.zeros(1)}, target)
    assert torch.equal(target.weight, source.weight)
    assert not torch.equal(target.bias, source.bias)

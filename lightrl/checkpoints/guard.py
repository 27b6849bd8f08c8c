"""Keeps a run's folders to one run, and its checkpoints whole and apart from those of earlier runs."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from lightrl.checkpoints.files import atomic_write, clean_leftovers
from lightrl.checkpoints.lock import FolderLock
from lightrl.checkpoints.plugin import CheckedCheckpointIO
from lightrl.checkpoints.reading import read_header

RECORD = "lightrl_run"
RUN = ".lightrl.run"
"""File next to checkpoints: the id of the run that last started there without resuming."""


class RunGuard(Callback):
    """Locks the folders that a run writes to, and installs `CheckedCheckpointIO`.

    The command line adds it to every run; `RolloutCheckpoint` adds it otherwise. A run that starts next to checkpoints
    of an earlier run marks the folder, so that `--ckpt_path last` skips those.
    """

    def __init__(self) -> None:
        self._locks: dict[Path, FolderLock] = {}
        self._run = ""

    def hold(self, folder: str | Path) -> None:
        """Locks a folder until the run ends, and removes incomplete files of crashed runs.

        Raises:
            ValueError: Another run holds it; the message names its process.
        """
        path = Path(folder).resolve()  # two names of one folder are one lock
        if path in self._locks:
            return
        lock = self._locks[path] = FolderLock(path)
        cleaned = clean_leftovers(path, other_hosts=lock.sure)
        if cleaned:
            rank_zero_info(f"Removed incomplete files from a crashed run: {', '.join(map(str, cleaned))}")

    def release(self) -> None:
        """Releases all folders."""
        while self._locks:
            self._locks.popitem()[1].release()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Installs the checkpoint plugin and locks the logger's folder."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = CheckedCheckpointIO()
        self._run = trainer.strategy.broadcast(secrets.token_hex(8))
        folder = trainer.log_dir  # every rank asks, because Lightning answers with rank 0's
        if trainer.loggers and folder is not None:
            self._hold_for(trainer, folder)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Locks the checkpoints' folders."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                self._hold_for(trainer, callback.dirpath)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Marks folders that hold checkpoints of other runs."""
        for folder in self._locks:
            resumed_here = trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve().parent == folder
            if (folder / RUN).is_file() or (not resumed_here and any(folder.glob("*.ckpt"))):
                with atomic_write(folder / RUN, "w") as file:
                    file.write(self._run)

    def _hold_for(self, trainer: Trainer, folder: str | Path) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run and "://" not in str(folder):  # type: ignore[attr-defined]
            self.hold(folder)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the run's id."""
        checkpoint[RECORD] = {"run": self._run}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A resumed run keeps the id of its checkpoint."""
        self._run = _run_of(checkpoint) or self._run

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Releases the folders if nothing saves later, and ends launched ranks at exit. Lightning would leave them."""
        if not trainer.checkpoint_callbacks:
            self.release()
        launcher = trainer.strategy.launcher
        if trainer.world_size > 1 and launcher is not None and isinstance(exception, Exception):
            atexit.register(launcher.kill, signal.SIGKILL)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Releases the folders."""
        self.release()


def is_of_another_run(path: Path) -> bool:
    """Whether a checkpoint was written by a run before the one that last started in its folder."""
    mark = path.parent / RUN
    if not mark.is_file():
        return False
    with contextlib.suppress(Exception):  # unpickling raises nearly anything
        return _run_of(read_header(path)) != mark.read_text()
    return True


def _run_of(checkpoint: Mapping[str, Any]) -> str:
    record = checkpoint.get(RECORD)
    return str(record.get("run", "")) if isinstance(record, Mapping) else ""

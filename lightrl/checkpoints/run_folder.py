"""Directories of a run: locks, separation from earlier runs, and selection of the newest checkpoint."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import pickle
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightrl.checkpoints.checkpoint_io import CheckedCheckpointIO, checkpoint_kind, read_header
from lightrl.checkpoints.files import atomic_write, clean_leftovers, has_checksums, restore_replaced, verify, writing

LOCK = ".lightrl.lock"
"""File in a directory that names the run holding it."""
RUN = ".lightrl.run"
"""File next to checkpoints with the ID of the run that last started there without resuming."""
RECORD = "lightrl_run"
LAST = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}"


class FolderLock:
    """Locks a directory, created if missing, for one run. The system releases the lock when the process ends.

    Raises a ValueError if another run holds the directory, and a StorageError if it is read-only.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / LOCK
        self.sure = True  # whether the file system supports locks, so that no other run uses the directory
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise ValueError(
                f"{str(path.parent)!r} is in use by {holder}: two runs in one directory would mix metrics and "
                "checkpoints. Wait for that run, stop it, or use another directory (--run_dir, dirpath, logger name)."
            ) from None
        except OSError as error:
            self.sure = False
            print(f"Cannot lock {folder} ({error}). Make sure that no other run writes there.", file=sys.stderr)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Releases the lock. Leaves the empty file in place, since another process may be about to lock it."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()


class RunGuard(Callback):
    """Locks the directories that a run writes to, and installs `CheckedCheckpointIO`.

    Added to every run by the command line, otherwise by `RolloutCheckpoint`. A run that starts next to checkpoints of
    an earlier run marks the directory, so that `--ckpt_path last` skips them.
    """

    def __init__(self) -> None:
        self._locks: dict[Path, FolderLock] = {}
        self._run = ""

    def hold(self, folder: str | Path) -> None:
        """Locks a directory until the run ends, and removes incomplete files of crashed runs.

        Raises a ValueError if another run holds it.
        """
        path = Path(folder).resolve()  # two names of one directory share a lock
        if path in self._locks:
            return
        lock = self._locks[path] = FolderLock(path)
        cleaned = clean_leftovers(path) if lock.sure else []
        if cleaned:
            rank_zero_info(f"Removed incomplete files from a crashed run: {', '.join(map(str, cleaned))}")

    def release(self) -> None:
        """Releases all directories."""
        while self._locks:
            self._locks.popitem()[1].release()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Installs the checkpoint plugin and locks the logger's directory."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = CheckedCheckpointIO()
        self._run = trainer.strategy.broadcast(secrets.token_hex(8))
        folder = trainer.log_dir  # called on every rank: Lightning broadcasts rank 0's
        if trainer.loggers and folder is not None:
            self._hold_for(trainer, folder)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Locks the checkpoint directories."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                self._hold_for(trainer, callback.dirpath)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Marks directories with checkpoints of other runs."""
        for folder in self._locks:
            resumed_here = trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve().parent == folder
            if (folder / RUN).is_file() or (not resumed_here and any(folder.glob("*.ckpt"))):
                with atomic_write(folder / RUN, "w") as file:
                    file.write(self._run)

    def _hold_for(self, trainer: Trainer, folder: str | Path) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run and "://" not in str(folder):  # type: ignore[attr-defined]
            self.hold(folder)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[RECORD] = {"run": self._run}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores the run's ID from the checkpoint."""
        self._run = _run_of(checkpoint) or self._run

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Releases the directories unless a later hook saves, and ends launched ranks at exit, unlike Lightning."""
        if not trainer.checkpoint_callbacks:
            self.release()
        launcher = trainer.strategy.launcher
        if trainer.world_size > 1 and launcher is not None and isinstance(exception, Exception):
            atexit.register(launcher.kill, signal.SIGKILL)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.release()


def is_of_another_run(path: Path) -> bool:
    """Whether a checkpoint belongs to a run before the one that last started in its directory."""
    mark = path.parent / RUN
    if not mark.is_file():
        return False
    with contextlib.suppress(Exception):  # unpickling may raise any error
        return _run_of(read_header(path)) != mark.read_text()
    return True


def _run_of(checkpoint: Mapping[str, Any]) -> str:
    record = checkpoint.get(RECORD)
    return str(record.get("run", "")) if isinstance(record, Mapping) else ""


def checkpoints_in(folder: Path) -> set[Path]:
    """Returns the checkpoints in a directory, after restoring one that a killed run was replacing."""
    restore_replaced(folder)
    return set(folder.glob("*.ckpt"))


def newest_whole(found: set[Path]) -> set[str]:
    """Returns the newest intact checkpoint as a set; empty if there are none. Raises a ValueError if none is intact.

    Compares file times, but prefers `last.ckpt` at the same step or later: a ranked file may lack gradients that were
    accumulated before its evaluation.
    """
    skipped: dict[Path, str] = {}
    for path in sorted(found, key=written_at, reverse=True):
        damage = _damage(path)
        if damage is None:
            last = path.with_name(LAST)
            if last in found and path.is_file() and _damage(last) is None and _step(last) >= _step(path):
                path = last
            if skipped:
                rank_zero_warn(f"ckpt_path=last resumes from {path} and skips {_listed(skipped)}.")
            return {str(path)}
        skipped[path] = damage
    if not skipped:
        return set()
    raise ValueError(
        f"ckpt_path=last: found no intact checkpoint ({_listed(skipped)}). Pass the path of one to resume from it, "
        "or remove ckpt_path to start a new run."
    )


def _listed(skipped: Mapping[Path, str]) -> str:
    return "; ".join(f"{path}: {why}" for path, why in skipped.items())


def last_of_runs(folder: Path, settings: Mapping[str, Any]) -> set[Path]:
    """Returns the checkpoints of a logger's newest run with these settings; raises a ValueError if all have others."""
    other: list[str] = []
    for path in sorted(folder.glob(f"*/checkpoints/{LAST}"), key=written_at, reverse=True):
        theirs: Any = {}
        with contextlib.suppress(Exception):  # damaged, or of another module
            theirs = read_header(path)["lightrl"]["settings"]
        differing = [
            f"{name}={theirs[name]}" for name in settings if theirs.get(name, settings[name]) != settings[name]
        ]
        if not differing:
            return checkpoints_in(path.parent)
        other.append(f"{path.parent.parent} has {', '.join(differing)}")
    if other:
        raise ValueError(
            f"ckpt_path=last: the runs in {folder} have different settings ({'; '.join(sorted(other))}). Pass the "
            "path of a checkpoint to resume from it, or remove ckpt_path to start a new run."
        )
    return set()


def written_at(path: Path) -> int:
    """Returns when a file was written, in ns; for a broken link, when the link was."""
    return path.stat(follow_symlinks=path.exists()).st_mtime_ns


def _step(path: Path) -> int:
    with contextlib.suppress(Exception):  # pickled objects
        return int(read_header(path)["global_step"])
    return 0


def _damage(path: Path) -> str | None:
    """Returns why a run can't resume from a file or directory; None if it can."""
    try:
        checkpoint_kind(path)
        verify(path)
        header = read_header(path)
        if path.is_file() and not header.keys() >= {"loops", "optimizer_states"}:
            return "it has only weights" if "state_dict" in header else "it is not a Lightning checkpoint"
    except ValueError as error:
        return str(error)
    except pickle.UnpicklingError:  # objects of user classes, accepted only in this run's own files
        if not has_checksums(path):
            return "it has pickled objects and no checksum"
    except Exception as error:  # unpickling may raise any error
        return f"it can't be read ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]})"
    return "it was written by an earlier run in the directory" if is_of_another_run(path) else None

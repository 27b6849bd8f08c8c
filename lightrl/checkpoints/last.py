"""What `--ckpt_path last` resumes from: the newest whole checkpoint of this run."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lightrl.checkpoints.files import has_checksums, verify
from lightrl.checkpoints.guard import is_of_another_run
from lightrl.checkpoints.reading import checkpoint_kind, read_header
from lightrl.compat.lightning import SavingCheckpoint, choose_last

LAST = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}"
PREVIOUS = ".previous"
EARLIER = "an earlier run in the folder wrote it"
WEIGHTS_ONLY = "it holds weights only"


def checkpoints_in(folder: Path) -> set[Path]:
    """The checkpoints in a folder."""
    return {*folder.glob("*.ckpt"), *folder.glob(f"*.ckpt{PREVIOUS}")}


def newest_whole(found: set[Path]) -> set[str]:
    """Of checkpoints the newest that is whole, in a set; an empty set if there are none.

    The newest is the one whose file is newest, unless `last.ckpt` has come as far: clocks can be set back.

    Raises:
        ValueError: None is whole, or none is of the run that last started in the folder.
    """
    skipped: dict[Path, str] = {}
    for path in sorted(found, key=written_at, reverse=True):
        damage = _damage(path)
        if damage is None:
            last = path.with_name(LAST)
            if last in found and path.is_file() and _damage(last) is None and _step(last) >= _step(path):
                path = last
            if skipped:
                listed = "; ".join(f"{each}: {why}" for each, why in skipped.items())
                rank_zero_warn(f"ckpt_path=last resumes from {path}, and skips {listed}.")
            return {str(path)}
        skipped[path] = damage
    if not skipped:
        return set()
    usable = [path for path, why in skipped.items() if why == WEIGHTS_ONLY]
    if usable:  # enough for an evaluation; training raises
        return {str(usable[0])}
    listed = "; ".join(f"{each}: {why}" for each, why in skipped.items())
    raise ValueError(
        f"ckpt_path=last: no checkpoint is whole ({listed}). Pass the path of one to resume from it, or "
        "leave ckpt_path out to start over."
    )


def last_of_runs(trainer: Trainer, folder: Path) -> set[Path]:
    """Checkpoints of the newest run under a logger's name that started with this run's settings.

    Raises:
        ValueError: All runs there have other settings.
    """
    runs = sorted(folder.glob(f"*/checkpoints/{LAST}"), key=written_at, reverse=True)
    other: list[str] = []
    for path in runs:
        differing = _other_settings(trainer, path)
        if not differing:
            return checkpoints_in(path.parent)
        other.append(f"{path.parent.parent} has {differing}")
    if other:
        raise ValueError(
            f"ckpt_path=last: the runs in {folder} have other settings ({'; '.join(sorted(other))}). Pass the path of "
            "a checkpoint to resume from it, or leave ckpt_path out to start over."
        )
    return set()


def _other_settings(trainer: Trainer, path: Path) -> str:
    """What differs between a checkpoint's run and this one, as "name=value, ..."."""
    try:
        theirs: Any = read_header(path)["lightrl"]["settings"]
    except Exception:  # damaged, or another module's
        return ""
    own: dict[str, Any] = getattr(trainer.lightning_module, "run_settings", dict)()
    return ", ".join(f"{name}={theirs[name]}" for name in own if name in theirs and theirs[name] != own[name])


def take_whole_ones(trainer: Trainer) -> None:
    """Makes `--ckpt_path last` skip damaged files with Lightning's `ModelCheckpoint` as well."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and not isinstance(callback, SavingCheckpoint):
            choose_last(callback, _newest_of_folders)


def _newest_of_folders(found: set[str]) -> set[str]:
    if any("://" in path for path in found):
        return found
    return newest_whole({other for path in found for other in checkpoints_in(Path(path).parent)})


def written_at(path: Path) -> int:
    """When a file was written, in ns; of a broken link, the link."""
    return path.stat(follow_symlinks=path.exists()).st_mtime_ns


def _step(path: Path) -> int:
    with contextlib.suppress(Exception):  # pickled objects
        return int(read_header(path)["global_step"])
    return 0


def _damage(path: Path) -> str | None:
    """Why a run cannot resume from a file or folder; None if it can."""
    try:
        checkpoint_kind(path)
        verify(path)
        header = read_header(path)
        if path.is_file() and not header.keys() >= {"loops", "optimizer_states"}:
            return WEIGHTS_ONLY if "state_dict" in header else "it is not a checkpoint of Lightning"
    except ValueError as error:
        return str(error)
    except pickle.UnpicklingError:  # objects of the user's classes, which only this run's own files may hold
        if not has_checksums(path):
            return "it holds pickled objects, and has no checksum"
    except Exception as error:  # unpickling raises nearly anything
        return f"it cannot be read ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]})"
    return EARLIER if is_of_another_run(path) else None

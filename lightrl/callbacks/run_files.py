"""Files of a run: its directory, and descriptions of media."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightrl.checkpoints.files import atomic_write
from lightrl.records import Media


def run_folder(trainer: Trainer) -> Path:
    """Returns the run directory, which contains the checkpoints. Collective.

    With W&B and other remote loggers, Lightning's `trainer.log_dir` is shared by all runs.
    """
    logger = trainer.loggers[0] if trainer.loggers else None
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    if logger is not None and not isinstance(logger, CSVLogger | TensorBoardLogger):
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = trainer.strategy.broadcast(folder / str(logger.name) / version)
    return folder


def describe(media: Media) -> str:
    """Describes media, such as `2 images (640x480, 56x56), video (16 frames of 224x224)`."""
    sizes = ", ".join(f"{image.width}x{image.height}" for image in media.images)
    parts = [] if not media.images else [f"{_count(len(media.images), 'image')} ({sizes})"]
    parts += [f"video ({len(video)} frames of {video.shape[2]}x{video.shape[1]})" for video in media.videos]
    pairs = zip(media.audios, media.sampling_rates, strict=False)
    parts += [f"sound ({len(samples) / rate:.1f} s)" for samples, rate in pairs]
    return ", ".join(parts)


def write_once(data: bytes, folder: Path, suffix: str) -> str:
    """Writes data to a file named by its hash, unless it exists, and returns the name."""
    path = folder / f"{hashlib.blake2b(data, digest_size=8).hexdigest()}.{suffix}"
    if not path.exists():
        with atomic_write(path) as file:
            file.write(data)
    return path.name


def type_name(value: Any) -> Any:
    """Converts a value for JSON: a scalar of NumPy or torch to a number, anything else to its type's name."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else f"<{type(value).__name__}>"


def _count(number: int, noun: str) -> str:
    return noun if number == 1 else f"{number} {noun}s"

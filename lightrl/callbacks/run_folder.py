"""The folder of a run."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def run_folder(trainer: Trainer) -> Path:
    """Where what a run writes goes: beside its checkpoints. Collective, and the same on every rank.

    Lightning's `trainer.log_dir` is, with W&B and other loggers that are not of files, the folder of all their runs.
    """
    logger = trainer.loggers[0] if trainer.loggers else None
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    if logger is not None and not isinstance(logger, CSVLogger | TensorBoardLogger):
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = trainer.strategy.broadcast(folder / str(logger.name) / version)
    return folder

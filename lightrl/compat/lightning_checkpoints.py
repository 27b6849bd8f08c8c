"""Private parts of Lightning 2.6 for checkpoints, sharding, and batches; see tests/compat/test_lightning.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy


class SavingCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` with an overridable choice of the last checkpoint. Its subclass saves checkpoints."""

    def last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Returns the files from which `--ckpt_path last` uses the newest. Override it."""
        return super()._find_last_checkpoints(trainer)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        return self.last_checkpoints(trainer)

    def write(self, trainer: Trainer, path: str) -> None:
        """Saves the run to a file or directory, and notifies loggers. Collective."""
        trainer.save_checkpoint(path, weights_only=False)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = path
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.after_save_checkpoint(self)


def load_module_state(state: Mapping[str, Any], module: Any) -> None:
    """Loads full tensors into a module sharded by FSDP2; ignores names that it lacks."""
    from lightning.fabric.strategies.model_parallel import _load_raw_module_state

    _load_raw_module_state(dict(state), module, strict=False)


def load_distributed_checkpoint(folder: Path) -> dict[str, Any]:
    """Loads the full tensors of a directory written by FSDP2 ranks, without a process group."""
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    return _load_distributed_checkpoint(folder)


def set_logged_step(trainer: Any, step: int) -> None:
    """Sets the step of the next logged metrics: Lightning counts one too many when a run is resumed."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def ended_in_batch(trainer: Any) -> bool:
    """Whether the checkpoint was saved at the end of a batch, before Lightning counted that batch and evaluated."""
    return bool(trainer.fit_loop.epoch_loop.restarted_on_train_batch_end)


def evaluation_follows(trainer: Any) -> bool:
    """Whether Lightning evaluates before the next batch. Call it at the end of a batch."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def tensor_parallel_size(strategy: ModelParallelStrategy) -> int | str:
    """Returns the number of ranks over which layers are split, or "auto"."""
    return strategy._tensor_parallel_size


def set_data_parallel_size(strategy: ModelParallelStrategy, ranks: int) -> None:
    """Sets the constructor argument once the number of ranks is known."""
    strategy._data_parallel_size = ranks


def count_updates(trainer: Any) -> float:
    """Returns the number of updates of the run, infinite if it has no end.

    To count, Lightning sets up the training data before it reads a checkpoint, so a resumed run would begin with the
    first examples. This sets the data up again.
    """
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        raise ValueError("lr_scheduler: named schedules don't support GradientAccumulationScheduler. Remove one.")
    updates: float = trainer.estimated_stepping_batches
    trainer.fit_loop._combined_loader = None
    return math.inf if updates < 0 else updates  # -1 for a loader without a length


def accumulates(trainer: Any) -> bool:
    """Whether the last batch's gradients wait for the optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


@contextlib.contextmanager
def evaluation_pending(trainer: Any) -> Iterator[None]:
    """Context manager that makes a run resumed from checkpoints saved within start with the pending evaluation.

    Lightning finishes an evaluation whose first batch had begun, so the saved state imitates that.
    """
    loop = trainer.fit_loop.epoch_loop
    trained, evaluated = loop.batch_progress, loop.val_loop.batch_progress
    before = trained.state_dict(), evaluated.state_dict()
    for tracker in (trained.total, trained.current):
        tracker.completed = tracker.processed
    for tracker in (evaluated.total, evaluated.current):
        tracker.reset()
        tracker.ready = tracker.started = 1
    try:
        yield
    finally:
        trained.load_state_dict(before[0])
        evaluated.load_state_dict(before[1])


def begin_evaluation(trainer: Any) -> None:
    """Resets the batch that had begun, which Lightning would keep counting."""
    trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.reset_on_restart()


def flush_step_metrics(trainer: Any) -> None:
    """Logs this step's metrics now; Lightning does so after `on_train_batch_end`."""
    trainer._logger_connector.update_train_step_metrics()

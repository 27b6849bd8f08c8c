"""Checkpoints counted in rollouts, and a Ctrl-C that loses nothing."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

__all__ = ["RolloutCheckpoint"]


class RolloutCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, saving every N rollouts, at the end, and when the run is interrupted.

    `ModelCheckpoint(every_n_train_steps=N)` looks whether Lightning's step counter, which jumps by the updates of a
    rollout, is divisible by N. This one counts rollouts. Ctrl-C (and SIGTERM, where SLURM does not use it) while a
    rollout is generated saves and ends at once. During an update, and always with several processes, it waits for that
    rollout's updates (a second one does not wait, and saves nothing). So `last.ckpt` always lies between two rollouts
    and resuming from it continues exactly: `lightrl fit --config x.yaml --ckpt_path last`. The exit status is 1.

    Args:
        every_n_rollouts: rollouts between two checkpoints, at least 1.
        dirpath: folder; `checkpoints/` under the logger's folder where None.
        save_top_k: how many to keep beside `last.ckpt`; -1 keeps all.
        monitor: logged metric to keep the best by; None keeps the newest.
        mode: whether the best is the largest (`max`) or smallest (`min`).
        filename: of a checkpoint, with `{rollout}` for the number of rollouts done.
    """

    def __init__(
        self,
        every_n_rollouts: int = 20,
        dirpath: str | None = None,
        save_top_k: int = 1,
        monitor: str | None = None,
        mode: str = "max",
        filename: str = "rollout={rollout:06d}",
    ) -> None:
        if every_n_rollouts < 1:
            raise ValueError(f"RolloutCheckpoint.every_n_rollouts={every_n_rollouts}: must be at least 1.")
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            auto_insert_metric_name=False,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=True,
            every_n_train_steps=1,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.every_n_rollouts = every_n_rollouts
        self._updating = False
        self._stop_requested = False
        self._cursor: int | None = None
        self._trainer: Trainer | None = None
        self._previous_handlers: dict[int, Any] = {}

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Any]:
        return {**super()._monitor_candidates(trainer), "rollout": torch.tensor(trainer.fit_loop.total_batch_idx + 1)}

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """`--ckpt_path last` also finds earlier runs under the logger's name; Lightning looks in the new folder."""
        found = super()._find_last_checkpoints(trainer)
        if found or self.dirpath is not None or not trainer.loggers:
            return found
        folder = Path(trainer.loggers[0].save_dir or trainer.default_root_dir) / str(trainer.loggers[0].name)
        return {str(path) for path in folder.glob(f"*/checkpoints/{self.CHECKPOINT_NAME_LAST}.ckpt")}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes over Ctrl-C and SIGTERM."""
        super().on_train_start(trainer, pl_module)
        self._trainer, self._cursor = trainer, _prompt_cursor(trainer)
        self._updating = self._stop_requested = False
        loop = trainer.fit_loop
        if loop.restarted_mid_epoch and loop.epoch_loop.batch_progress.current.ready >= loop.max_batches:
            # Saved in the last batch of an epoch. Lightning would not count the next epoch, and train one too many
            # after a second restart.
            loop.reset_restart_stage()
        # Lightning answers SIGTERM at the end of the batch, with exit status 0; on SLURM it belongs to requeueing.
        slurm = isinstance(getattr(trainer.strategy, "cluster_environment", None), SLURMEnvironment)
        for signum in (signal.SIGINT,) if slurm else (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous_handlers[signum] = signal.signal(signum, self._on_interrupt)
            except ValueError:  # not in the main thread: whoever runs us there handles signals
                return

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        trainer = self._trainer
        if trainer is None or self._stop_requested:
            raise KeyboardInterrupt
        # A rollout that is made but not yet learned from would be lost: its prompts count as used.
        made = _prompt_cursor(trainer) != self._cursor
        if not (self._updating or made or trainer.world_size > 1):
            raise KeyboardInterrupt
        self._stop_requested = True
        rank_zero_info(
            f"\n{signal.Signals(signum).name}: finishing this rollout, then saving. Ctrl-C again stops at once."
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """From here on the weights move."""
        self._updating = True
        # The step of loggers: Lightning counts one too many when a run goes on from between two epochs.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.fit_loop.total_batch_idx

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves every N rollouts; ends the run if Ctrl-C was pressed during the updates."""
        self._updating, self._cursor = False, _prompt_cursor(trainer)
        if (trainer.fit_loop.total_batch_idx + 1) % self.every_n_rollouts == 0 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save(trainer)
        # With several processes all stop, or none: the next update would wait for the missing ones.
        if trainer.strategy.reduce_boolean_decision(self._stop_requested, all=False):
            self._stop_requested = True
            trainer._logger_connector.update_train_step_metrics()  # Lightning would log them after this hook
            raise KeyboardInterrupt

    def _save(self, trainer: Trainer) -> None:
        """The newest or best K, and `last.ckpt`."""
        candidates = self._monitor_candidates(trainer)
        if self.monitor is not None and self.monitor not in candidates:
            self._defer_save_until_validation = True  # `on_validation_end` saves
            return
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves `last.ckpt` if the weights lie between two rollouts; says how to resume."""
        stopped = self._stop_requested and not self._updating
        self._restore_handlers()
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if trainer.fast_dev_run or not fitting:  # type: ignore[attr-defined]
            return
        idle = not self._updating and self._cursor == _prompt_cursor(trainer)
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        between = stopped or (idle and progress.ready == progress.processed)
        if between and (stopped or trainer.world_size == 1) and trainer.global_step > 0:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        if self.last_model_path:
            rank_zero_info(f"Resume with: --ckpt_path {self.last_model_path}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the final state."""
        self._restore_handlers()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if trainer.global_step > self._last_global_step_saved:
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def _restore_handlers(self) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        self._previous_handlers.clear()


def _prompt_cursor(trainer: Trainer) -> int | None:
    return getattr(trainer.datamodule, "prompt_cursor", None)  # type: ignore[attr-defined]

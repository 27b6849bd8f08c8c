"""Checkpoints counted in rollouts, and a Ctrl-C that loses nothing."""

from __future__ import annotations

import signal
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

__all__ = ["RolloutCheckpoint"]


class RolloutCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, saving every N rollouts, at the end, and when the run is interrupted.

    `ModelCheckpoint(every_n_train_steps=N)` looks whether Lightning's step counter, which jumps by the updates of a
    rollout, is divisible by N. This one counts rollouts. Ctrl-C during an update waits for that rollout's updates to
    finish (a second Ctrl-C does not wait), so that `last.ckpt` always lies between two rollouts and resuming from it
    continues exactly: `lightrl fit --config x.yaml --ckpt_path last`.

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
        self._previous_handler: Any = None

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Any]:
        import torch

        return {**super()._monitor_candidates(trainer), "rollout": torch.tensor(trainer.fit_loop.total_batch_idx + 1)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes over Ctrl-C."""
        super().on_train_start(trainer, pl_module)
        try:
            self._previous_handler = signal.signal(signal.SIGINT, self._on_interrupt)
        except ValueError:  # not in the main thread: whoever runs us there handles signals
            self._previous_handler = None

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        if self._updating and not self._stop_requested:
            self._stop_requested = True
            rank_zero_info("\nCtrl-C: finishing the updates of this rollout, then saving. Again to stop at once.")
            return
        raise KeyboardInterrupt

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """From here on the weights move."""
        self._updating = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves every N rollouts; ends the run if Ctrl-C was pressed during the updates."""
        self._updating = False
        if (trainer.fit_loop.total_batch_idx + 1) % self.every_n_rollouts == 0:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._stop_requested:
            raise KeyboardInterrupt

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves `last.ckpt` if the weights lie between two rollouts; else says what the newest checkpoint is."""
        self._restore_handler()
        between = not self._updating or self._stop_requested
        interrupted = isinstance(exception, KeyboardInterrupt)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if trainer.training and between and (interrupted or trainer.world_size == 1) and trainer.global_step > 0:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        if trainer.training and self.last_model_path:
            rank_zero_info(f"Resume with: --ckpt_path {self.last_model_path}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the final state."""
        self._restore_handler()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if trainer.global_step > self._last_global_step_saved:
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def _restore_handler(self) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
            self._previous_handler = None

"""Exports the policy in Hugging Face format."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightrl.callbacks.moving_weights import EMA
from lightrl.callbacks.run_files import run_folder


class HFExport(Callback):
    """Exports the policy and its tokenizer to a directory that transformers and vLLM can load, with LoRA merged.

    For a `RewardLightningModule`, exports the reward model in the format of `RewardModelSpec`.

    Args:
        dirpath: Directory. Defaults to `model/` in the run directory.
        every_n_rollouts: Number of rollouts between additional exports to `dirpath/rollout=N`. Defaults to exporting
            only at the end.
        ema: Whether to export the average of the `EMA` callback instead of the policy.

    Raises:
        ValueError: If `ema` is set and the callback `EMA` is missing.
    """

    def __init__(self, dirpath: str | None = None, every_n_rollouts: int | None = None, ema: bool = False) -> None:
        self.dirpath = dirpath
        self.every_n_rollouts = every_n_rollouts
        self.ema = ema

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.ema and stage == "fit" and not _averages(trainer):
            raise ValueError("HFExport.ema=True: the EMA callback is missing. Add it, or set ema: false.")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = trainer.fit_loop.total_batch_idx + 1
        if self.every_n_rollouts is not None and done % self.every_n_rollouts == 0:
            self.export(trainer, pl_module, self._folder(trainer) / f"rollout={done}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.export(trainer, pl_module, self._folder(trainer))

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.dirpath or run_folder(trainer) / "model")

    def export(self, trainer: Trainer, pl_module: Any, folder: Path) -> None:
        """Gathers the weights and writes them on rank 0. Collective."""
        with _averages(trainer)[0].swapped(pl_module) if self.ema else nullcontext():
            pl_module.save_pretrained(folder)
        rank_zero_info(f"Exported the model to {folder}")


def _averages(trainer: Trainer) -> list[EMA]:
    return [callback for callback in trainer.callbacks if isinstance(callback, EMA)]  # type: ignore[attr-defined]

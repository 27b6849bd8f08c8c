"""Exports the policy in Hugging Face format."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightrl.algorithms.saving import SavesPretrained
from lightrl.callbacks.moving_weights import EMA
from lightrl.callbacks.run_files import run_folder
from lightrl.compat.arguments import at_least


class HFExport(Callback):
    """Exports the policy and its tokenizer to a directory that transformers and vLLM can load, with LoRA merged.

    For a `RewardLightningModule`, exports the reward model in the format of `RewardModelSpec`.

    Args:
        dirpath: Directory. Defaults to `model/` in the run directory.
        every_n_rollouts: Number of rollouts between additional exports to `dirpath/rollout=N`. Defaults to exporting
            only at the end.
        ema: Whether to export the average of the `EMA` callback instead of the policy.
        best: Whether the final export uses the checkpoint with the best `RolloutCheckpoint.monitor` instead of the last
            weights. Exports the `EMA` average if evaluations used it.

    Raises:
        ValueError: If `every_n_rollouts` is below 1, the callback that `ema` or `best` needs is missing, or the module
            has no model to export.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        every_n_rollouts: int | None = None,
        ema: bool = False,
        best: bool = False,
    ) -> None:
        self.dirpath = dirpath
        self.every_n_rollouts = at_least("HFExport.every_n_rollouts", every_n_rollouts, 1, or_none="for the end only")
        self.ema = ema
        self.best = best

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Rejects modules without a model to export, and missing callbacks."""
        if not isinstance(pl_module, SavesPretrained):
            raise ValueError(
                f"callback HFExport with {type(pl_module).__name__}: requires a LightRL module. Remove the callback."
            )
        if self.ema and stage == "fit" and not _averages(trainer):
            raise ValueError("HFExport.ema=True: the EMA callback is missing. Add it, or set ema: false.")
        if self.best and stage == "fit" and not _rankings(trainer):
            raise ValueError(
                "HFExport.best=True: no checkpoint callback ranks checkpoints. Set RolloutCheckpoint.monitor, for "
                "example to eval/reward."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Exports the model every N rollouts."""
        done = trainer.fit_loop.total_batch_idx + 1
        if self.every_n_rollouts is not None and done % self.every_n_rollouts == 0:
            self.export(trainer, pl_module, self._folder(trainer) / f"rollout={done}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exports the final weights, except in a `fast_dev_run`."""
        if not self.best and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.export(trainer, pl_module, self._folder(trainer))

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Exports the best checkpoint."""
        if not self.best or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        ranking = _rankings(trainer)[0]
        path, by = ranking.best_model_path, f"{ranking.monitor}={float(ranking.best_model_score or 0):.4g}"
        if not path:
            rank_zero_warn(f"HFExport.best: no checkpoint was ranked by {ranking.monitor}. Exporting the last weights.")
            self.export(trainer, pl_module, self._folder(trainer))
            return
        average = _averages(trainer)[:1] if self.ema or _ranks_average(trainer, ranking) else []
        with pl_module.weights_of(path, average[0].state_key if average else None):
            pl_module.save_pretrained(self._folder(trainer))
        rank_zero_info(f"Exported {path} ({by}) to {self._folder(trainer)}")

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.dirpath or run_folder(trainer) / "model")

    def export(self, trainer: Trainer, pl_module: Any, folder: Path) -> None:
        """Gathers the weights and writes them on rank 0. Collective."""
        with _averages(trainer)[0].swapped(pl_module) if self.ema else nullcontext():
            pl_module.save_pretrained(folder)
        rank_zero_info(f"Exported the model to {folder}")


def _averages(trainer: Trainer) -> list[EMA]:
    return [callback for callback in trainer.callbacks if isinstance(callback, EMA)]  # type: ignore[attr-defined]


def _rankings(trainer: Trainer) -> list[ModelCheckpoint]:
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    return [saver for saver in savers if saver.monitor is not None and saver.save_top_k != 0]


def _ranks_average(trainer: Trainer, ranking: ModelCheckpoint) -> bool:
    """Whether the ranking uses evaluations of the average, rather than a training metric of the policy."""
    by_evaluation = getattr(ranking, "ranked_by", "evaluation") == "evaluation"
    return by_evaluation and any(average.evaluate for average in _averages(trainer))

"""Writes the policy as a Hugging Face folder."""

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
    """Exports the policy with its tokenizer as a folder that transformers and vLLM load, LoRA merged.

    From a `RewardLightningModule` it exports the reward model, as a folder that `RewardModelSpec` loads.

    Args:
        dirpath: Folder. Defaults to `model/` in the run's folder.
        every_n_rollouts: Also export during training, to `dirpath/rollout=N`. Defaults to the end only.
        ema: Export the average that the `EMA` callback keeps instead of the policy.
        best: At the end export the checkpoint with the best `RolloutCheckpoint.monitor` instead of the last weights. If
            evaluations used the average of `EMA`, it exports the average.

    Raises:
        ValueError: `every_n_rollouts` is below 1. When the run is set up: the callback that `ema` or `best` needs is
            missing, or the module has no model to export.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        every_n_rollouts: int | None = None,
        ema: bool = False,
        best: bool = False,
    ) -> None:
        self.dirpath = dirpath
        self.every_n_rollouts = at_least("HFExport.every_n_rollouts", every_n_rollouts, 1, or_none="for the end alone")
        self.ema = ema
        self.best = best

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Rejects a module that has no model to export, and an average or best checkpoint that nothing keeps."""
        if not isinstance(pl_module, SavesPretrained):
            raise ValueError(
                f"callback HFExport with {type(pl_module).__name__}: only LightRL's modules have a model to export. "
                "Remove the callback."
            )
        if self.ema and stage == "fit" and not _averages(trainer):
            raise ValueError("HFExport.ema=True needs the callback EMA: add it, or export the policy (ema: false).")
        if self.best and stage == "fit" and not _rankings(trainer):
            raise ValueError(
                "HFExport.best=True: no checkpoint callback ranks checkpoints. Set RolloutCheckpoint.monitor, such as "
                "eval/reward."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Exports every N rollouts."""
        done = trainer.fit_loop.total_batch_idx + 1
        if self.every_n_rollouts is not None and done % self.every_n_rollouts == 0:
            self.export(trainer, pl_module, self._folder(trainer) / f"rollout={done}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exports the final weights; a `fast_dev_run` must not replace those of a real run."""
        if not self.best and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.export(trainer, pl_module, self._folder(trainer))

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Exports the best checkpoint, once all are ranked."""
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
        """Gathers the weights on every rank, tensor by tensor, and writes them on rank 0."""
        with _averages(trainer)[0].swapped(pl_module) if self.ema else nullcontext():
            pl_module.save_pretrained(folder)
        rank_zero_info(f"Exported the model to {folder}")


def _averages(trainer: Trainer) -> list[EMA]:
    return [callback for callback in trainer.callbacks if isinstance(callback, EMA)]  # type: ignore[attr-defined]


def _rankings(trainer: Trainer) -> list[ModelCheckpoint]:
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    return [saver for saver in savers if saver.monitor is not None and saver.save_top_k != 0]


def _ranks_average(trainer: Trainer, ranking: ModelCheckpoint) -> bool:
    """Whether the scores are those of the average: a training metric is that of the policy."""
    by_evaluation = getattr(ranking, "ranked_by", "evaluation") == "evaluation"
    return by_evaluation and any(average.evaluate for average in _averages(trainer))

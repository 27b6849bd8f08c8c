"""Writes the policy as a Hugging Face folder."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightrl.algorithms.saving import SavesPretrained
from lightrl.arguments import rollouts_between
from lightrl.callbacks.ema import EMA
from lightrl.callbacks.run_folder import run_folder

__all__ = ["HFExport"]


class HFExport(Callback):
    """Exports the actor with its tokenizer as a folder that transformers and vLLM load, LoRA merged.

    From a `RewardLightningModule` it exports the reward model, as a folder that `RewardModelSpec` loads.

    Args:
        dirpath: the folder; `model/` under the run's folder where None.
        every_n_rollouts: also export while training, to `dirpath/rollout=N`; None exports at the end only.
        ema: export the average that the `EMA` callback keeps instead of the policy.
    """

    def __init__(self, dirpath: str | None = None, every_n_rollouts: int | None = None, ema: bool = False) -> None:
        self.dirpath = dirpath
        self.every_n_rollouts = rollouts_between(
            "HFExport.every_n_rollouts", every_n_rollouts, or_none="for the end alone"
        )
        self.ema = ema

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a module that cannot be written, and looks for the average, if that is what to export."""
        if not isinstance(pl_module, SavesPretrained):
            raise ValueError(
                f"callback HFExport with {type(pl_module).__name__}: only LightRL's modules have a model to export. "
                "Remove the callback."
            )
        if self.ema and stage == "fit" and not _averages(trainer):
            raise ValueError("HFExport.ema=True needs the callback EMA: add it, or export the policy (ema: false).")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Exports every N rollouts."""
        done = trainer.fit_loop.total_batch_idx + 1
        if self.every_n_rollouts is not None and done % self.every_n_rollouts == 0:
            self.export(trainer, pl_module, self._folder(trainer) / f"rollout={done}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exports the final weights; a `fast_dev_run` must not replace those of a real run."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self.export(trainer, pl_module, self._folder(trainer))

    def _folder(self, trainer: Trainer) -> Path:
        return Path(self.dirpath or run_folder(trainer) / "model")

    def export(self, trainer: Trainer, pl_module: Any, folder: Path) -> None:
        """Gathers the weights on every rank, tensor by tensor, and writes them on rank 0."""
        with _averages(trainer)[0].swapped(pl_module) if self.ema else nullcontext():
            pl_module.save_pretrained(folder)
        rank_zero_info(f"Exported the model to {folder}")


def _averages(trainer: Trainer) -> list[EMA]:
    return [callback for callback in trainer.callbacks if isinstance(callback, EMA)]  # type: ignore[attr-defined]

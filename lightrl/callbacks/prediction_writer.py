"""Writes the completions and rewards of `lightrl predict` to a JSONL file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lightrl.algorithms.experience import first_rows
from lightrl.callbacks.run_files import run_folder, type_name
from lightrl.checkpoints.files import append_lines
from lightrl.distributed import strategies


class PredictionWriter(BasePredictionWriter):
    """Writes the records of `predict_step`, one per trajectory, in the order of the prompts.

    Rank 0 appends the records of all ranks after each batch. Values that JSON doesn't support, such as images, are
    replaced by their type name in angle brackets.

    Args:
        path: JSONL file. Replaces an existing file. Defaults to `predictions.jsonl` in the run directory (under
            `predict/` with `run_dir`).
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self._target = Path()
        self._written = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Determines the run directory. Collective."""
        super().setup(trainer, pl_module, stage)
        # Lightning warns that it can't infer batch indices, which are not needed here.
        warnings.filterwarnings("ignore", message="Couldn't infer the batch indices")
        self._target = Path(self.path or run_folder(trainer) / "predictions.jsonl")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._written = 0
        if trainer.is_global_zero:
            self._target.unlink(missing_ok=True)

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Appends the records of all ranks in the order of the prompts. Collective."""
        # Prompts are interleaved across ranks: prompt g of rank r is prompt g * world_size + r of the batch.
        groups = batch.group_ids[first_rows(batch.trajectory_ids)].tolist()  # a record is a trajectory
        order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        own = [
            (order[group], trainer.global_rank, row, json.dumps(record, default=type_name, ensure_ascii=False))
            for row, (group, record) in enumerate(zip(groups, prediction, strict=True))
        ]
        gathered = strategies.gather_objects([] if batch.filler else own)  # a filler pads a rank without prompts
        if trainer.is_global_zero:
            lines = [line for *_, line in sorted(line for part in gathered for line in part)]
            append_lines(self._target, lines)
            self._written += len(lines)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.print(f"Wrote {self._written} completions to {self._target}")

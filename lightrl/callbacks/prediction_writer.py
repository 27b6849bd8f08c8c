"""Writes what `lightrl predict` completes, with rewards, to one JSONL or Parquet file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lightrl.algorithms.experience import first_rows
from lightrl.callbacks.run_files import run_folder
from lightrl.checkpoints.files import append_lines, atomic_write

SUFFIXES = (".jsonl", ".parquet")


class PredictionWriter(BasePredictionWriter):
    """Writes the records of `predict_step`, one per trajectory, in the order of the prompts.

    Each rank appends to its own shard, so an interrupted run loses nothing; at the end rank 0 merges the shards into
    `path`. Several nodes need a shared folder. Values that JSON cannot hold, such as images, become the name of their
    type in angle brackets.

    Args:
        path: File, `.jsonl` (one object per line) or `.parquet`; an existing one is replaced. Defaults to
            `predictions.jsonl` in the run's folder (under `predict/` with `run_dir`).

    Raises:
        ValueError: `path` has another suffix.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        if path is not None and Path(path).suffix not in SUFFIXES:
            raise ValueError(f"PredictionWriter.path={path!r}: must end in .jsonl or .parquet.")
        self.path = path
        self._target = Path()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the folder; every rank asks, because Lightning answers with rank 0's."""
        super().setup(trainer, pl_module, stage)
        # Lightning looks for the indices of a sampler; the records' places are kept here without them.
        warnings.filterwarnings("ignore", message="Couldn't infer the batch indices")
        self._target = Path(self.path or run_folder(trainer) / "predictions.jsonl")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rank 0 removes shards of an interrupted run, of however many ranks, before any rank writes."""
        if trainer.is_global_zero:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            for shard in self._shards():
                shard.unlink()
        trainer.strategy.barrier("predictions_start")

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
        """Appends one batch to this rank's shard, each record with its place in the data set."""
        if batch.filler:  # repeats a prompt so that a rank without one takes part in the last generation
            return
        groups = batch.group_ids[first_rows(batch.trajectory_ids)].tolist()  # a record is a trajectory
        # Prompts are dealt to the ranks like cards, so prompt g of rank r is number g * world_size + r of the batch.
        order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
        shard = Path(f"{self._target}.rank{trainer.global_rank}")
        lines = []
        for row, record in enumerate(prediction):
            place = [dataloader_idx, batch_idx, order[groups[row]], trainer.global_rank, row]
            lines.append(json.dumps([place, record], default=_type_name, ensure_ascii=False))
        append_lines(shard, lines)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merges the shards on rank 0."""
        trainer.strategy.barrier("predictions_end")
        if not trainer.is_global_zero:
            return
        placed = [json.loads(line) for shard in self._shards() for line in shard.open(encoding="utf-8")]
        write_records([record for _, record in sorted(placed, key=lambda pair: pair[0])], self._target)
        for shard in self._shards():
            shard.unlink()
        trainer.print(f"Wrote {len(placed)} completions to {self._target}")

    def _shards(self) -> list[Path]:
        return sorted(self._target.parent.glob(f"{self._target.name}.rank*"))


def write_records(records: list[dict[str, Any]], path: Path) -> None:
    """Writes records as JSONL or Parquet, by the suffix; keys that a record lacks are null in Parquet."""
    if path.suffix == ".jsonl":
        with atomic_write(path, "w") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        return
    import pyarrow as pa
    from pyarrow import parquet

    names = dict.fromkeys(name for record in records for name in record)
    with atomic_write(path) as file:
        parquet.write_table(pa.table({name: [record.get(name) for record in records] for name in names}), file)


def _type_name(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else f"<{type(value).__name__}>"

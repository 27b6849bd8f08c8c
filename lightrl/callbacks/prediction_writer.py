"""Writes the completions and rewards of `lightrl predict` to a JSONL or Parquet file."""

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

    Each rank appends to a shard, which survives interruptions, and rank 0 merges the shards at the end. Multi-node runs
    need a shared file system. Values that JSON doesn't support, such as images, are replaced by their type name in
    angle brackets.

    Args:
        path: File with suffix `.jsonl` or `.parquet`. Replaces an existing file. Defaults to `predictions.jsonl` in the
            run directory (under `predict/` with `run_dir`).

    Raises:
        ValueError: If `path` has another suffix.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        if path is not None and Path(path).suffix not in SUFFIXES:
            raise ValueError(f"PredictionWriter.path={path!r}: unsupported suffix. Use .jsonl or .parquet.")
        self.path = path
        self._target = Path()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Determines the run directory. Collective."""
        super().setup(trainer, pl_module, stage)
        # Lightning warns that it can't infer batch indices, which are not needed here.
        warnings.filterwarnings("ignore", message="Couldn't infer the batch indices")
        self._target = Path(self.path or run_folder(trainer) / "predictions.jsonl")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the shards of an interrupted run on rank 0."""
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
        """Appends a batch to this rank's shard, with the position of each record."""
        if batch.filler:  # padding of a rank without prompts
            return
        groups = batch.group_ids[first_rows(batch.trajectory_ids)].tolist()  # a record is a trajectory
        # Prompts are interleaved across ranks: prompt g of rank r is prompt g * world_size + r of the batch.
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
    """Writes records as JSONL or Parquet, depending on the suffix. Missing keys are null in Parquet."""
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

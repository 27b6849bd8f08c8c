"""Private parts of Lightning 2.6 that only the command line and CSV logs use."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter


class YamlCLI(LightningCLI):
    """`LightningCLI` whose YAML takes precedence over a checkpoint's hyperparameters on resume."""

    def help_of(self, subcommand: str) -> tuple[str, str | None]:
        """Returns a subcommand's description, and its usage (None lists all options). Override it."""
        return "", None

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> Any:
        kwargs["description"], usage = self.help_of(subcommand)
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.usage = usage
        return parser

    def _parse_ckpt_path(self) -> None:
        """Disabled: Lightning would merge the checkpoint's hyperparameters over the YAML."""

    def record_hyperparameters(self) -> None:
        """Uses `config` as the hyperparameters of checkpoints and loggers."""
        self._dump_config()


class _KeptTable(ExperimentWriter):
    """`CSVLogger` writer that preserves the `metrics.csv` of an earlier run until the run of `trainer` logs a row.

    Lightning deletes the file when the logger starts. Here, a resumed run appends to it, and a new run replaces it.
    """

    trainer: Trainer
    _begun = False

    def _check_log_dir_exists(self) -> None:
        """Disabled: Lightning deletes the file here."""

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        if not self._begun:
            self._begun = True
            self._begin()
        super().log_metrics(metrics_dict, step)

    def _begin(self) -> None:
        table = Path(self.metrics_file_path)
        if self.trainer.ckpt_path is None:
            table.unlink(missing_ok=True)
        elif table.is_file():
            content = table.read_bytes()
            os.truncate(table, content.rfind(b"\n") + 1)  # removes an incomplete line
            with table.open(newline="", errors="replace") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        """Rewrites the file atomically. Lightning's would lose it if the disk is full or the run is killed."""
        if "://" in self.metrics_file_path:
            super()._rewrite_with_new_header(fieldnames)
            return
        with open(self.metrics_file_path, newline="", errors="replace") as file:
            rows = list(csv.DictReader(file))
        partial = Path(f"{self.metrics_file_path}.partial")
        try:
            with partial.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=fieldnames)
                writer.writeheader()
                writer.writerows(rows)
            partial.replace(self.metrics_file_path)
        finally:
            partial.unlink(missing_ok=True)


def begin_tables(trainer: Trainer) -> None:
    """Starts the `CSVLogger`s. The first row is appended to `metrics.csv` on resume, and replaces it otherwise."""
    for logger in [each for each in trainer.loggers if isinstance(each, CSVLogger) and trainer.is_global_zero]:
        logger._experiment = logger._experiment or _KeptTable(logger.log_dir)
        if isinstance(logger._experiment, _KeptTable):
            logger._experiment.trainer = trainer

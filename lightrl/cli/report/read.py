"""Reads a run's metrics, samples, and trajectories from disk, complete or truncated."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrl.cli.config_files import read_yaml

Series = dict[int, float]
"""Logged step (0 is the first rollout, -1 is before it) -> value, sorted by step."""


@dataclass
class Run:
    """A run."""

    name: str  # in the title
    metrics: dict[str, Series]  # name -> series, without empty ones
    samples: list[dict[str, Any]] = field(default_factory=list)  # of `CompletionLogger`, sorted by step
    settings: dict[str, Any] = field(default_factory=dict)  # hyperparameters that the run logged; empty if none

    @property
    def num_rollouts(self) -> int:
        """Number of the last logged rollout."""
        return 1 + max((max(series) for series in self.metrics.values()), default=-1)


def read_run(folder: Path) -> Run:
    """Reads `metrics.csv`, or raises a ValueError without values, and `samples.jsonl` and `hparams.yaml` of a run."""
    if not is_file_inside(folder / "metrics.csv", folder):
        raise ValueError(f"run_dir={str(folder)!r}: has no metrics.csv. Pass a run logged by Lightning's CSVLogger.")
    found = _metrics(folder / "metrics.csv")
    metrics = {name: dict(sorted(series.items())) for name, series in sorted(found.items()) if series}
    if not metrics:
        raise ValueError(f"run_dir={str(folder)!r}: metrics.csv has no metrics yet. Wait for the first rollout.")
    samples: list[dict[str, Any]] = []
    for record in read_records(folder / "samples.jsonl", folder):
        if samples and record["step"] < samples[-1]["step"]:  # a resumed run repeats some steps
            samples = [old for old in samples if old["step"] < record["step"]]
        samples.append(record)
    return Run(folder.resolve().name, metrics, samples, _yaml(folder / "hparams.yaml", folder))


def is_file_inside(path: Path, folder: Path) -> bool:
    """Whether a path is a file in a directory after resolving links, so that a copied run can't expose other files."""
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # the name is too long or contains a NUL
        return False


def read_records(path: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file in a directory, without lines that a crash cut off."""
    text = path.read_text(encoding="utf-8", errors="replace") if is_file_inside(path, folder) else ""
    for number, line in enumerate(text.split("\n"), 1):  # not `splitlines`: texts may contain other line separators
        try:
            if line:
                yield json.loads(line, parse_constant=lambda name: None)  # NaN, infinity
        except ValueError:
            print(f"Skipped: line {number} of {path} is not valid JSON.", file=sys.stderr)


def _metrics(path: Path) -> dict[str, Series]:
    """Reads the table by name, without a truncated line. Non-finite values become NaN.

    If the step decreases, a resumed run is repeating steps, which replace the earlier ones.
    """
    metrics: dict[str, Series] = {}
    latest = -1
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(line.replace("\0", "") for line in file))
    for row in rows:
        if None in row or None in row.values() or not row.get("step"):
            continue
        step = int(row["step"])
        if step < latest:
            metrics = {name: {at: x for at, x in series.items() if at < step} for name, series in metrics.items()}
        latest = step
        for name, text in row.items():
            if name not in ("step", "epoch") and text:
                value = float(text)
                metrics.setdefault(name, {})[step] = value if math.isfinite(value) else math.nan
    return metrics


def _yaml(path: Path, run: Path) -> dict[str, Any]:
    """Reads a YAML file of the run. Returns {} if it is missing or not a mapping of plain YAML."""
    try:
        found = read_yaml(path) if is_file_inside(path, run) else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

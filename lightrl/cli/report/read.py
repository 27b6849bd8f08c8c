"""Reads a run's numbers and samples off the disk, whole or cut short."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrl.cli.config_files import read_yaml

Series = dict[int, float]
"""Step, as in the loggers (0 is the first rollout, -1 before it), -> value. Sorted by step."""

_RECORD = {"step": int, "phase": str, "prompt": str, "completion": str, "num_tokens": int}
"""What every record of `CompletionLogger` has."""

TRAINING = ("reward/", "loss/", "rollout/", "optim/")


@dataclass
class Run:
    """What is known of a run.

    Attributes:
        name: for the title.
        metrics: name -> series; names without any number are not in it.
        samples: records of `CompletionLogger`, in the order of the steps.
        kl_target: target of the `AdaptiveKL` callback, if `config.yaml` names one.
        checkpoints: (rollouts done, path within the run's folder) of those whose name says so.
        left_out: what could not be read and is not shown, a line for each file.
    """

    name: str
    metrics: dict[str, Series]
    samples: list[dict[str, Any]] = field(default_factory=list)
    kl_target: float | None = None
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def num_rollouts(self) -> int:
        """Number of the last rollout that anything was logged for."""
        return 1 + max((max(series) for series in self.metrics.values()), default=-1)


def read_run(folder: Path, argument: str) -> Run:
    """Reads `metrics.csv`, `samples.jsonl` and `config.yaml` of a run folder, joined over its `version_*` folders.

    Only files that lie in the run's folder are read, whatever links and records in it point to: a page is for showing
    around, and a run may come from somebody else. Records that cannot be shown are left out, which `left_out` says.

    Args:
        folder: the run.
        argument: what the caller calls it, for messages.

    Raises:
        ValueError: no `metrics.csv`, or no numbers in it; a file that is broken, or a link out of the folder.
    """
    left_out: list[str] = []
    folders = metric_folders(folder, argument)
    for name in ("metrics.csv", "samples.jsonl", "config.yaml"):
        require_inside([path / name for path in folders], folder, argument)
    tables = [read_metrics(path / "metrics.csv") for path in folders]
    trained = [i for i, table in enumerate(tables) if any(name.startswith(TRAINING) for name in table)]
    used = trained or range(len(tables))  # evaluations of a finished run do not belong to its curves
    metrics: dict[str, Series] = {}
    samples: list[dict[str, Any]] = []
    for i in used:
        restart(metrics, tables[i])
        for record in read_samples(folders[i] / "samples.jsonl", folder, left_out):
            if samples and samples[-1]["step"] > record["step"]:  # a resumed run repeats its last steps
                samples = [old for old in samples if old["step"] <= record["step"]]
            samples.append(record)
    metrics = {name: dict(sorted(series.items())) for name, series in sorted(metrics.items()) if series}
    if not metrics:
        files = ", ".join(str(path / "metrics.csv") for path in folders)
        raise ValueError(f"{argument}={str(folder)!r}: no numbers in {files} yet: wait for the first rollout to end.")
    target = kl_target(folders)
    return Run(folder.resolve().name, metrics, samples, target, checkpoints(folder), left_out)


def checkpoints(folder: Path) -> list[tuple[int, str]]:
    """(rollouts done, path) of the checkpoints whose name says after how many rollouts they were saved."""
    found = [(re.search(r"rollout=(\d+)", path.name), path) for path in sorted(folder.glob("**/*.ckpt"))]
    return [(int(match[1]), path.relative_to(folder).as_posix()) for match, path in found if match]


def inside(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder, after every link and `..` is followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))  # `resolve` raises for a circle


def is_file_inside(path: Path, folder: Path) -> bool:
    """Whether a path is a regular file that lies in a folder; False for names that no file can have, too."""
    try:
        return path.is_file() and inside(path, folder)
    except (OSError, ValueError):  # a name that is too long, or with a NUL
        return False


def tell(left_out: list[str], path: Path, what: str, reasons: Sequence[str]) -> None:
    """Adds a line to `left_out` if there are reasons: how many of a file's `what`, and the first reason."""
    if reasons:
        count = "one" if len(reasons) == 1 else f"{len(reasons)}"
        left_out.append(f"{count} of the {what} in {path}; the first: {reasons[0]}")


def require_inside(paths: Iterable[Path], folder: Path, argument: str) -> None:
    """Refuses links that lead out of a run's folder with a ValueError; `argument` is what the caller calls it."""
    for path in paths:
        if not inside(path, folder):
            raise ValueError(
                f"{path} is a link to {os.path.realpath(path)}, outside of {argument}={str(folder)!r}: only files of "
                "the run are read. Put a copy in its place, or give the folder that it lies in."
            )


def runs_below(folder: Path) -> list[Path]:
    """Folders of runs that lie below one that is no run itself, the one written to last first."""
    written: dict[Path, float] = {}
    if [*folder.glob("metrics.csv"), *folder.glob("version_*/metrics.csv")]:
        return []
    for path in sorted(folder.glob("*/**/metrics.csv")):
        if is_file_inside(path, folder):
            version = re.fullmatch(r"version_\d+", path.parent.name) is not None
            run = path.parent.parent if version else path.parent
            written[run] = max(written.get(run, 0.0), path.stat().st_mtime)
    return sorted(written, key=lambda run: (-written[run], run))


def metric_folders(folder: Path, argument: str) -> list[Path]:
    """The folder itself or its `version_*` folders by number, those with a `metrics.csv`."""
    if (folder / "metrics.csv").is_file():
        return [folder]
    versions = [path.parent for path in folder.glob("version_*/metrics.csv")]
    if versions:
        return sorted(versions, key=lambda path: (len(path.name), path.name))
    if not folder.is_dir():
        raise ValueError(f"{argument}={str(folder)!r}: there is no such folder.")
    below = sorted({str(path.parent) for path in sorted(folder.glob("*/**/metrics.csv")) if path.is_file()})
    hint = f" Did you mean one of {', '.join(below)}?" if below else ""
    raise ValueError(
        f"{argument}={str(folder)!r}: no metrics.csv in {folder} or in {folder / 'version_*'}. Give the folder of a "
        f"run whose trainer.logger is (or has) Lightning's CSVLogger.{hint}"
    )


def read_metrics(path: Path) -> dict[str, Series]:
    """The table as name -> series. A line cut short by a crash is left out; numbers that are not finite are NaN.

    Where steps go back, a resumed run repeats what came after its checkpoint, and what was there before goes.
    """
    metrics: dict[str, Series] = {}
    latest = -1
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        try:
            rows = list(csv.DictReader(line.replace("\0", "") for line in file))
        except csv.Error as error:
            raise ValueError(f"{path} is not a table: {error}") from error
    for row in rows:
        if None in row or None in row.values() or not row.get("step"):
            continue
        step = int(row["step"])
        if step < latest:
            metrics = {name: {at: x for at, x in series.items() if at < step} for name, series in metrics.items()}
        latest = step
        for name, text in row.items():
            if name not in ("step", "epoch") and text:
                try:
                    value = float(text)
                except ValueError:  # cut short
                    continue
                metrics.setdefault(name, {})[step] = value if math.isfinite(value) else math.nan
    return metrics


def restart(metrics: dict[str, Series], later: dict[str, Series]) -> None:
    """Adds a later table in place: from its first step on it replaces what was there."""
    first = min((min(series) for series in later.values()), default=None)
    if first is None:
        return
    for name in list(metrics):
        metrics[name] = {step: value for step, value in metrics[name].items() if step < first}
    for name, series in later.items():
        metrics.setdefault(name, {}).update(series)


def read_samples(path: Path, folder: Path, left_out: list[str]) -> list[dict[str, Any]]:
    """The records of one file, none if it is not there; a last line cut short is left out.

    `thumbnail` becomes the `Path` of the picture, or goes where that is not there any more or not in `folder`. Lines
    that are no records of `CompletionLogger` are left out, which `left_out` says. Where steps go back, what a resumed
    run
    repeats goes, as in `read_metrics`.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records: list[dict[str, Any]] = []
    odd: list[str] = []
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            odd += [f"line {i + 1}: not JSON: {error}"] if i < len(lines) - 1 else []
            continue
        if not isinstance(record, dict) or any(type(record.get(name)) is not kind for name, kind in _RECORD.items()):
            odd.append(f"line {i + 1}: not a record of CompletionLogger: {line[:80]}")
            continue
        record["extra"] = {name: str(value) for name, value in record.get("extra", {}).items() if value is not None}
        if records and record["step"] < records[-1]["step"]:
            records = [earlier for earlier in records if earlier["step"] < record["step"]]
        name = record.pop("thumbnail", "")
        picture = path.parent / (name if isinstance(name, str) else "")
        records.append({**record, "thumbnail": picture} if is_file_inside(picture, folder) else record)
    tell(left_out, path, "samples", odd)
    return records


def kl_target(folders: list[Path]) -> float | None:
    """Target of `AdaptiveKL` in the newest `config.yaml`; None without one."""
    for path in (folder / "config.yaml" for folder in reversed(folders)):
        if path.is_file():
            config = read_yaml(path)
            callbacks = (config.get("trainer") or {}).get("callbacks") if isinstance(config, dict) else None
            for callback in callbacks if isinstance(callbacks, list) else [callbacks or {}]:
                if str(callback.get("class_path")).split(".")[-1] == "AdaptiveKL":
                    target = (callback.get("init_args") or {}).get("target")
                    return None if target is None else float(target)
    return None

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

__all__ = ["Run", "Series", "found_below", "read_run", "runs_below"]

Series = dict[int, float]
"""Step, as in the loggers (0 is the first rollout, -1 before it), -> value. Sorted by step."""

LARGEST = 1e100
"""Size from which on a number is left out: nothing is logged so large, and sums of such overflow when drawn."""
STEP = re.compile(r"-?\d{1,15}")

_RECORD = {"step": int, "phase": str, "prompt": str, "completion": str, "num_tokens": int}
"""What every record of `SampleLog` has."""

TRAINING = ("reward/", "loss/", "rollout/", "optim/")


@dataclass
class Run:
    """What is known of a run.

    Attributes:
        name: for the title.
        metrics: name -> series; names without any number are not in it.
        samples: records of `SampleLog`, in the order of the steps.
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
    around, and a run may come from somebody else. What is no regular file (a pipe, a folder), and records and numbers
    that cannot be shown, are left out, which `left_out` says.

    Args:
        folder: the run.
        argument: what the caller calls it, for messages.

    Raises:
        ValueError: no `metrics.csv`, or no numbers in it; a file that is broken, or a link out of the folder.
    """
    left_out: list[str] = []
    folders = metric_folders(folder, argument, left_out)
    for name in ("metrics.csv", "samples.jsonl", "config.yaml"):
        require_inside([path / name for path in folders], folder, argument)
    tables = [read_metrics(path / "metrics.csv", left_out) for path in folders]
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
        more = "".join(f" Left out: {line}" for line in left_out)
        raise ValueError(
            f"{argument}={str(folder)!r}: no numbers in {files} yet: wait for the first rollout to end.{more}"
        )
    target = kl_target(folders, left_out)
    return Run(folder.resolve().name, metrics, samples, target, checkpoints(folder), left_out)


def checkpoints(folder: Path) -> list[tuple[int, str]]:
    """(rollouts done, path) of the checkpoints whose name says after how many rollouts they were saved."""
    found = [(re.search(r"rollout=(\d+)", path.name), path) for path in found_below(folder, "**/*.ckpt")]
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


def regular_files(paths: Iterable[Path], left_out: list[str]) -> list[Path]:
    """The regular files among paths; each other that is there adds a line to `left_out`: a pipe would never end."""
    found = list(paths)
    left_out += [f"{path} is not a regular file." for path in found if path.exists() and not path.is_file()]
    return [path for path in found if path.is_file()]


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


def found_below(folder: Path, pattern: str) -> list[Path]:
    """What a folder has below it, sorted; looked for again where a folder went meanwhile, as a running run's do."""
    for left in (2, 1, 0):
        try:
            return sorted(folder.glob(pattern))
        except (OSError, RecursionError) as error:
            if not left:
                raise ValueError(
                    f"{str(folder)!r} cannot be looked through: {error}. Give the folder of a run, or of runs alone."
                ) from error
    raise AssertionError("unreachable")


def runs_below(folder: Path) -> list[Path]:
    """Folders of runs that lie below one that is no run itself, the one written to last first."""
    written: dict[Path, float] = {}
    if [*folder.glob("metrics.csv"), *folder.glob("version_*/metrics.csv")]:
        return []
    for path in found_below(folder, "*/**/metrics.csv"):
        if is_file_inside(path, folder):
            version = re.fullmatch(r"version_\d+", path.parent.name) is not None
            run = path.parent.parent if version else path.parent
            written[run] = max(written.get(run, 0.0), path.stat().st_mtime)
    return sorted(written, key=lambda run: (-written[run], run))


def metric_folders(folder: Path, argument: str, left_out: list[str]) -> list[Path]:
    """The folder itself or its `version_*` folders by number, those with a `metrics.csv`."""
    if regular_files([folder / "metrics.csv"], left_out):
        return [folder]
    versions = [path.parent for path in regular_files(folder.glob("version_*/metrics.csv"), left_out)]
    if versions:
        return sorted(versions, key=lambda path: (len(path.name), path.name))
    if not folder.is_dir():
        raise ValueError(f"{argument}={str(folder)!r}: there is no such folder.")
    below = sorted({str(path.parent) for path in found_below(folder, "*/**/metrics.csv") if path.is_file()})
    hint = f" Did you mean one of {', '.join(below)}?" if below else ""
    raise ValueError(
        f"{argument}={str(folder)!r}: no metrics.csv in {folder} or in {folder / 'version_*'}. Give the folder of a "
        f"run whose trainer.logger is (or has) Lightning's CSVLogger.{hint}{''.join(f' {line}' for line in left_out)}"
    )


def read_metrics(path: Path, left_out: list[str]) -> dict[str, Series]:
    """The table as name -> series. A line cut short by a crash is left out; numbers that are not finite are NaN.

    So are those that are none or beyond `LARGEST`, and lines of steps of more than 15 digits go, which `left_out` says.

    Where steps go back, a resumed run repeats what came after its checkpoint, and what was there before goes.
    """
    metrics: dict[str, Series] = {}
    latest = -1
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        try:
            rows = list(csv.DictReader(line.replace("\0", "") for line in file))
        except csv.Error as error:
            raise ValueError(f"{path} is not a table: {error}") from error
    odd: list[str] = []
    for row in rows:
        if None in row or None in row.values():
            continue
        if not STEP.fullmatch(row.get("step", "")):
            odd += [f"step {row['step'][:40]!r}"] if row.get("step") else []
            continue
        step = int(row["step"])
        if step < latest:
            metrics = {name: {at: x for at, x in series.items() if at < step} for name, series in metrics.items()}
        latest = step
        for name, text in row.items():
            if name not in ("step", "epoch") and text:
                value = _number(text)
                if value is None:
                    odd.append(f"{name[:80]} {text[:40]!r} at step {step}")
                metrics.setdefault(name, {})[step] = math.nan if value is None else value
    tell(left_out, path, "steps and numbers", odd)
    return metrics


def _number(text: str) -> float | None:
    """A number of a table, NaN where it is not finite; None where it is none or too large."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return math.nan
    return value if abs(value) <= LARGEST else None


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
    that are no records of `SampleLog` are left out, which `left_out` says. Where steps go back, what a resumed run
    repeats goes, as in `read_metrics`.
    """
    if not regular_files([path], left_out):
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records: list[dict[str, Any]] = []
    odd: list[str] = []
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            odd += [f"line {i + 1}: not JSON: {error}"] if i < len(lines) - 1 else []
            continue
        reason = _why_no_record(record)
        if reason is not None:
            odd.append(f"line {i + 1}: not a record of SampleLog: {reason}: {line[:80]}")
            continue
        if records and record["step"] < records[-1]["step"]:
            records = [earlier for earlier in records if earlier["step"] < record["step"]]
        name = record.pop("thumbnail", "")
        picture = path.parent / (name if isinstance(name, str) else "")
        records.append({**record, "thumbnail": picture} if is_file_inside(picture, folder) else record)
    tell(left_out, path, "samples", odd)
    return records


def _why_no_record(record: Any) -> str | None:
    """What of a record cannot be shown; None where all can. Columns become text in it."""
    if not isinstance(record, dict):
        return "no object"
    wrong = [name for name, kind in _RECORD.items() if type(record.get(name)) is not kind]
    wrong += [name for name in ("step", "num_tokens") if name not in wrong and abs(record[name]) >= 10**15]
    wrong += [] if is_number(record.get("reward")) else ["reward"]
    parts, extra = record.get("reward_parts"), record.get("extra")
    if not isinstance(parts, dict | None) or not all(map(is_number, (parts or {}).values())):
        wrong.append("reward_parts")
    wrong += [] if isinstance(record.get("media"), str | None) else ["media"]
    try:
        record["extra"] = {name: str(value) for name, value in (extra or {}).items() if value is not None}
    except (AttributeError, ValueError, RecursionError):  # no object; too many digits; too deep
        wrong.append("extra")
    return f"its {', '.join(wrong)} cannot be read" if wrong else None


def is_number(value: Any) -> bool:
    """Whether a value is None or a number that can be drawn; not finite ones are shown as they are."""
    return value is None or (isinstance(value, int | float) and not LARGEST < abs(value) < math.inf)


def kl_target(folders: list[Path], left_out: list[str]) -> float | None:
    """Target of `AdaptiveKL` in the newest `config.yaml`, None without one; NaN where it is no number to draw.

    Nothing but numbers and texts is compared or shown: lists of references (`*name`) may be longer than any memory.
    """
    for path in (folder / "config.yaml" for folder in reversed(folders)):
        if regular_files([path], left_out):
            try:
                config = read_yaml(path)
            except ValueError as error:
                raise ValueError(" ".join(str(error).split())) from error
            trainer = config.get("trainer") if isinstance(config, dict) else None
            callbacks = trainer.get("callbacks") if isinstance(trainer, dict) else None
            for callback in callbacks if isinstance(callbacks, list) else []:
                name = callback.get("class_path") if isinstance(callback, dict) else None
                if isinstance(name, str) and name.split(".")[-1] == "AdaptiveKL":
                    arguments = callback.get("init_args")
                    target = arguments.get("target") if isinstance(arguments, dict) else None
                    if isinstance(target, int | float) and abs(target) <= LARGEST:
                        return float(target)
                    short = isinstance(target, str | float) or (type(target) is int and target.bit_length() < 10_000)
                    shown = repr(target)[:40] if short else f"a value of type {type(target).__name__}"
                    tell(left_out, path, "targets of AdaptiveKL", [shown] if target is not None else [])
                    return math.nan
    return None

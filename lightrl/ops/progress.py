"""Progress of a run: time left, and a one-line result."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

SCORES = ("pass@1", "accuracy", "reward", "loss")
"""Evaluation metrics, most informative first."""
TRAINING = {"reward/mean": "reward", "loss/sft": "loss"}
"""Training metrics and their labels, for runs without evaluations."""

Points: TypeAlias = Mapping[str, tuple[int, float]]
"""Metric -> (number of completed rollouts, value)."""


def clock(seconds: float) -> str:
    """Formats seconds as `0:42`, `7:12`, or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def brief(value: float) -> str:
    """Formats three significant digits, without an exponent for large numbers."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rollouts_in_all(trainer: Any, done: int) -> int | None:
    """Returns the number of rollouts (or batches) of the run, from `max_epochs` and `max_steps`; None if unknown.

    `done` rollouts so far are used to estimate optimizer steps per rollout.
    """
    limits = []
    if isinstance(trainer.num_training_batches, int) and trainer.max_epochs not in (None, -1):
        limits.append(trainer.num_training_batches * trainer.max_epochs)
    if trainer.max_steps != -1 and trainer.global_step and done:
        limits.append(math.ceil(trainer.max_steps * done / trainer.global_step))
    return min(limits, default=None)


def evaluations_left(trainer: Any, done: int, total: int) -> int:
    """Returns the number of evaluations between `done` and `total` rollouts."""
    batch, epochs, per_epoch = trainer.val_check_batch, trainer.check_val_every_n_epoch, trainer.num_training_batches
    if not trainer.enable_validation or not batch or not math.isfinite(batch) or not math.isfinite(per_epoch):
        return 0
    every = batch if epochs is None else epochs * per_epoch / max(per_epoch // batch, 1)
    return int(total / every + 1e-6) - int(done / every + 1e-6)


def headline(names: Collection[str], binary: bool) -> dict[str, str]:
    """Returns a run's main metrics as label -> name: evaluations if there are any, else the training reward or loss.

    If each evaluation reward is 0 or 1 (`binary`), the mean is an accuracy.
    """
    for score in SCORES:
        label = "accuracy" if score == "pass@1" or (score == "reward" and binary) else score
        found: dict[str, str] = {}
        for name in names:
            kind, *named, last = name.split("/")  # the name of a set of prompts is optional
            if kind == "eval" and last == score and named != ["reward"]:
                found[" ".join(["eval", *named, label])] = name
        if found:
            return found
    return next(({label: name} for name, label in TRAINING.items() if name in names), {})


def result_line(first: Points, last: Points, binary: bool, done: str, seconds: float) -> str:
    """Formats a result such as `eval accuracy 0.12 -> 0.58 in 40 rollouts, 7:12`.

    `first` and `last` have each metric's first and last point. `done` is the total number of rollouts, as text.
    """
    several, single = list[str](), list[str]()
    for label, name in headline(last, binary).items():
        (at, start), (end, value) = first[name], last[name]
        after = f" (after {at:,})" if at and name not in TRAINING else ""
        if at < end:
            several.append(f"{label} {_number(start)}{after} -> {_number(value)}")
        else:
            single.append(f"{label} {_number(value)}{after if at else ' before training'}")
    told = f"{', '.join(several)} in " if several else f"{', '.join(single)}; " if single else ""
    return f"{told}{done}, {clock(seconds)}"


def count(number: int, unit: str) -> str:
    """Formats a count, such as `1 rollout` or `40 rollouts`."""
    return f"{number:,} {unit if number == 1 else unit + ('es' if unit.endswith('ch') else 's')}"


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"

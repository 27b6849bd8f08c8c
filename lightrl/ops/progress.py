"""Progress of a run: time left, and a one-line result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SCORES = ("pass@1", "accuracy", "reward", "loss")
"""Evaluation metrics, most informative first."""


def clock(seconds: float) -> str:
    """Formats seconds as `0:42`, `7:12`, or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def brief(value: float) -> str:
    """Formats three significant digits, without an exponent for large numbers."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rollouts_in_all(trainer: Any, done: int) -> int | None:
    """Returns the number of rollouts (or batches) of the run, from `max_epochs` and `max_steps`; None if unknown.

    Args:
        trainer: Lightning Trainer.
        done: Number of rollouts so far, used to estimate optimizer steps per rollout.
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


def headline(metrics: Mapping[str, float], binary: bool) -> dict[str, float]:
    """Returns a run's main metrics by label: evaluations if there are any, else the training reward or loss.

    Args:
        metrics: Metrics by name, as logged.
        binary: Whether each evaluation reward is 0 or 1, so that the mean is an accuracy.
    """
    for score in SCORES:
        label = "accuracy" if score == "pass@1" or (score == "reward" and binary) else score
        found: dict[str, float] = {}
        for name, value in metrics.items():
            kind, *named, last = name.split("/")  # the name of a set of prompts is optional
            if kind == "eval" and last == score and named != ["reward"] and not math.isnan(value):
                found[" ".join(["eval", *named, label])] = value
        if found:
            return found
    training = {"reward": "reward/mean", "loss": "loss/sft"}
    return next(({label: metrics[name]} for label, name in training.items() if name in metrics), {})


def result_line(first: Mapping[str, float], last: Mapping[str, float], at: int, done: str, seconds: float) -> str:
    """Formats a result such as `eval accuracy 0.12 -> 0.58 in 40 rollouts, 7:12`.

    Args:
        first: Metrics of `headline` at the start. Empty if there is one evaluation.
        last: Metrics of `headline` at the end.
        at: Number of rollouts before the first evaluation. Included unless it is 0.
        done: Total number of rollouts, as text.
        seconds: Duration of the run.
    """
    start = f" (after {at:,})" if at else ""
    parts = [f"{label} {_number(first[label])}{start} -> {_number(x)}" for label, x in last.items() if label in first]
    if parts:
        return f"{', '.join(parts)} in {done}, {clock(seconds)}"
    at_start = {True: start or " before training", False: ""}
    only = ", ".join(f"{label} {_number(x)}{at_start[label.startswith('eval')]}" for label, x in last.items())
    return f"{only}; {done}, {clock(seconds)}" if only else f"{done}, {clock(seconds)}"


def count(number: int, unit: str) -> str:
    """Formats a count, such as `1 rollout` or `40 rollouts`."""
    return f"{number:,} {unit if number == 1 else unit + ('es' if unit.endswith('ch') else 's')}"


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"

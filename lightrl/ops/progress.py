"""How far a run is: the time left, and its result in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SCORES = ("pass@1", "accuracy", "reward", "loss")
"""Evaluation metrics, the most telling first."""


def clock(seconds: float) -> str:
    """As `0:42`, `7:12`, or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def brief(value: float) -> str:
    """Three significant digits, without an exponent for large numbers."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rollouts_in_all(trainer: Any, done: int) -> int | None:
    """Rollouts (or batches) of the whole run, from `max_epochs` and `max_steps`; None if that is unknown.

    Args:
        trainer: Lightning's.
        done: Rollouts so far. They tell how many optimizer steps one takes.
    """
    limits = []
    if isinstance(trainer.num_training_batches, int) and trainer.max_epochs not in (None, -1):
        limits.append(trainer.num_training_batches * trainer.max_epochs)
    if trainer.max_steps != -1 and trainer.global_step and done:
        limits.append(math.ceil(trainer.max_steps * done / trainer.global_step))
    return min(limits, default=None)


def evaluations_left(trainer: Any, done: int, total: int) -> int:
    """Evaluations that follow between `done` and `total` rollouts."""
    batch, epochs, per_epoch = trainer.val_check_batch, trainer.check_val_every_n_epoch, trainer.num_training_batches
    if not trainer.enable_validation or not batch or not math.isfinite(batch) or not math.isfinite(per_epoch):
        return 0
    every = batch if epochs is None else epochs * per_epoch / max(per_epoch // batch, 1)
    return int(total / every + 1e-6) - int(done / every + 1e-6)


def headline(metrics: Mapping[str, float], binary: bool) -> dict[str, float]:
    """The numbers that sum up a run, by label: evaluations if there are any, else the training reward or loss.

    Args:
        metrics: Values by name, as logged.
        binary: Whether each evaluation reward is 0 or 1, so that their mean is an accuracy.
    """
    for score in SCORES:
        label = "accuracy" if score == "pass@1" or (score == "reward" and binary) else score
        found: dict[str, float] = {}
        for name, value in metrics.items():
            kind, *named, last = name.split("/")  # a set of prompts may have a name
            if kind == "eval" and last == score and named != ["reward"] and not math.isnan(value):
                found[" ".join(["eval", *named, label])] = value
        if found:
            return found
    training = {"reward": "reward/mean", "loss": "loss/sft"}
    return next(({label: metrics[name]} for label, name in training.items() if name in metrics), {})


def result_line(first: Mapping[str, float], last: Mapping[str, float], at: int, done: str, seconds: float) -> str:
    """Such as `eval accuracy 0.12 -> 0.58 in 40 rollouts, 7:12`.

    Args:
        first: Numbers of `headline`.
        last: The same, at the end.
        at: Rollouts before the first evaluation. It is in the line unless it is 0.
        done: Rollouts in all, in words.
        seconds: Duration of the run.
    """
    start = f" (after {at:,})" if at else ""
    parts = [f"{label} {_number(first[label])}{start} -> {_number(x)}" for label, x in last.items() if label in first]
    if parts:
        return f"{', '.join(parts)} in {done}, {clock(seconds)}"
    only = ", ".join(f"{label} {_number(x)}" for label, x in last.items())
    return f"{only} after {done}, {clock(seconds)}" if only else f"{done}, {clock(seconds)}"


def count(number: int, unit: str) -> str:
    """As `1 rollout` or `40 rollouts`."""
    return f"{number:,} {unit if number == 1 else unit + ('es' if unit.endswith('ch') else 's')}"


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"

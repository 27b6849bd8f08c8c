"""Private parts of Lightning 2.6's progress bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightrl.ops.progress import brief


def show_pace(bar: Any, pace: Callable[[], Mapping[str, str]]) -> None:
    """Shows `pace()` and short numbers in a progress bar, instead of Lightning's iterations per second.

    Lightning's estimate of the remaining time covers one epoch, without evaluations.
    """
    bar.get_metrics = partial(_with_pace, bar, pace)
    if isinstance(bar, RichProgressBar):
        bar.configure_columns = partial(_columns, bar)  # type: ignore[method-assign]
    elif isinstance(bar, TQDMProgressBar) and TQDMProgressBar.BAR_FORMAT == bar.BAR_FORMAT:
        bar.BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def _with_pace(bar: Any, pace: Callable[[], Mapping[str, str]], trainer: Any, module: Any) -> dict[str, Any]:
    given = type(bar).get_metrics(bar, trainer, module)
    bar.shown = {name: brief(float(x)) if isinstance(x, float | torch.Tensor) else x for name, x in given.items()}
    return {**pace(), **bar.shown}


def _columns(bar: RichProgressBar, trainer: Any) -> list[Any]:
    from lightning.pytorch.callbacks.progress.rich_progress import CustomTimeColumn, ProcessingSpeedColumn

    columns = type(bar).configure_columns(bar, trainer)
    return [column for column in columns if not isinstance(column, CustomTimeColumn | ProcessingSpeedColumn)]


def refresh_pace(bar: Any, trainer: Any, pace: Mapping[str, str], now: str, done: int, total: int) -> None:
    """Redraws a bar of Lightning between two batches, from any thread, with the latest `pace` and the current activity.

    Doesn't read metrics from Lightning, since their reduction is collective. `now` names the activity, or is empty.
    """
    evaluates = trainer.sanity_checking or trainer.evaluating
    metrics = {**pace, **getattr(bar, "shown", {})}
    if isinstance(bar, RichProgressBar) and bar.progress is not None and not bar._progress_stopped:
        own = next((task for task in bar.progress.tasks if task.id == getattr(bar, "now", None)), None)
        if own is None and now:
            vars(bar)["now"] = bar.progress.add_task(now, total=total, completed=done)
        elif own is not None:
            bar.progress.update(own.id, description=now, total=total, completed=done, visible=bool(now))
        if bar._metric_component is not None and not evaluates:
            bar._metric_component.update(metrics)
        bar.progress.refresh()
    elif isinstance(bar, TQDMProgressBar):
        shown = bar._val_progress_bar if evaluates else bar._train_progress_bar
        if shown is not None and not shown.disable:
            state = {} if not now else {now: f"{done}/{total}"}
            shown.set_postfix(state if evaluates else {**state, **metrics})


def stop_bar(bar: Any) -> None:
    """Ends a progress bar's display before the end of the run, so that later output is printed below it."""
    if isinstance(bar, RichProgressBar) and bar.progress is not None:
        if (now := getattr(bar, "now", None)) in bar.progress.task_ids:
            bar.progress.remove_task(now)
        bar._stop_progress()

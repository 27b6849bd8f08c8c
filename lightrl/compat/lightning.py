"""Private parts of Lightning 2.6; tests/compat/test_lightning.py fails if they change."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.strategies import ModelParallelStrategy


def run_seed() -> int:
    """Returns the seed of `seed_everything`; 0 without one."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


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


def begin_table(logger: CSVLogger, trainer: Trainer) -> None:
    """Starts a logger of rank 0. Its first row is appended to `metrics.csv` on resume, and replaces it otherwise."""
    if logger._experiment is None:
        logger._experiment = _KeptTable(logger.log_dir)
    if isinstance(logger._experiment, _KeptTable):
        logger._experiment.trainer = trainer


class SavingCheckpoint(ModelCheckpoint):
    """`ModelCheckpoint` with an overridable choice of the last checkpoint. Its subclass saves checkpoints."""

    def last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Returns the files from which `--ckpt_path last` uses the newest. Override it."""
        return super()._find_last_checkpoints(trainer)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        return self.last_checkpoints(trainer)

    def write(self, trainer: Trainer, path: str) -> None:
        """Saves the run to a file or directory, and notifies loggers. Collective."""
        trainer.save_checkpoint(path)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = path
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.after_save_checkpoint(self)


def choose_last(callback: ModelCheckpoint, choose: Callable[[set[str]], set[str]]) -> None:
    """Makes `ckpt_path="last"` use the newest of the callback's files that `choose` selects."""
    callback._find_last_checkpoints = partial(_chosen_last, callback, choose)  # type: ignore[method-assign]


def _chosen_last(callback: ModelCheckpoint, choose: Callable[[set[str]], set[str]], trainer: Any) -> set[str]:
    return choose(type(callback)._find_last_checkpoints(callback, trainer))


def tensor_parallel_size(strategy: ModelParallelStrategy) -> int | str:
    """Returns the number of ranks over which layers are split, or "auto"."""
    return strategy._tensor_parallel_size


def set_data_parallel_size(strategy: ModelParallelStrategy, ranks: int) -> None:
    """Sets the constructor argument once the number of ranks is known."""
    strategy._data_parallel_size = ranks


def writes_parts(strategy: ModelParallelStrategy) -> bool:
    """Whether each rank writes its own part of a checkpoint."""
    return strategy._save_distributed_checkpoint


def load_module_state(state: Mapping[str, Any], module: Any) -> None:
    """Loads full tensors into a module sharded by FSDP2; ignores names that it lacks."""
    from lightning.fabric.strategies.model_parallel import _load_raw_module_state

    _load_raw_module_state(dict(state), module, strict=False)


def load_distributed_checkpoint(folder: Path) -> dict[str, Any]:
    """Loads the full tensors of a directory written by FSDP2 ranks, without a process group."""
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    return _load_distributed_checkpoint(folder)


def set_logged_step(trainer: Any, step: int) -> None:
    """Sets the step of the next logged metrics: Lightning counts one too many when a run is resumed."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def count_updates(trainer: Any) -> float:
    """Returns the number of updates of the run, infinite if it has no end.

    To count, Lightning sets up the training data before it reads a checkpoint, so a resumed run would begin with the
    first examples. This sets the data up again.
    """
    updates: float = trainer.estimated_stepping_batches
    trainer.fit_loop._combined_loader = None
    return updates


def accumulates(trainer: Any) -> bool:
    """Whether the last batch's gradients wait for the optimizer step."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def ended_in_batch(trainer: Any) -> bool:
    """Whether a resumed run was saved at the end of a batch, before Lightning counted it and evaluated."""
    return bool(trainer.fit_loop.epoch_loop.restarted_on_train_batch_end)


def evaluations_come(trainer: Any) -> bool:
    """Whether this fit will evaluate, according to its data and intervals. Call it when training starts."""
    epochs, every = trainer.max_epochs, trainer.check_val_every_n_epoch
    if not trainer.enable_validation:
        return False
    if every is not None and epochs not in (None, -1) and every > epochs:
        return False
    interval, batches = trainer.val_check_batch, trainer.fit_loop.max_batches
    if every is None and epochs not in (None, -1) and interval is not None and interval > batches * epochs:
        return False
    return trainer.val_dataloaders is None or sum(trainer.num_val_batches) > 0  # None: loaded in a later epoch


def evaluation_follows(trainer: Any) -> bool:
    """Whether Lightning evaluates before the next batch. Call it at the end of a batch."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


@contextlib.contextmanager
def evaluation_pending(trainer: Any) -> Iterator[None]:
    """Context manager that makes a run resumed from checkpoints saved within start with the pending evaluation.

    Lightning finishes an evaluation whose first batch had begun, so the saved state imitates that.
    """
    loop = trainer.fit_loop.epoch_loop
    trained, evaluated = loop.batch_progress, loop.val_loop.batch_progress
    before = trained.state_dict(), evaluated.state_dict()
    for tracker in (trained.total, trained.current):
        tracker.completed = tracker.processed
    for tracker in (evaluated.total, evaluated.current):
        tracker.reset()
        tracker.ready = tracker.started = 1
    try:
        yield
    finally:
        trained.load_state_dict(before[0])
        evaluated.load_state_dict(before[1])


def begin_evaluation(trainer: Any) -> None:
    """Resets the batch that had begun, which Lightning would keep counting."""
    trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.reset_on_restart()


def forget_step_metrics(trainer: Any, names: Collection[str]) -> None:
    """Removes metrics that an earlier step logged and this one doesn't; Lightning would log their values again."""
    results = trainer.fit_loop.epoch_loop._results
    for metric in results.values():
        if metric.meta.name in names and metric.meta.on_step:
            metric.reset()


def flush_step_metrics(trainer: Any) -> None:
    """Logs this step's metrics now; Lightning does so after `on_train_batch_end`."""
    trainer._logger_connector.update_train_step_metrics()


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
    shown = {name: float(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    bar.shown = {name: f"{x:.0f}" if isinstance(x, float) and abs(x) >= 100 else x for name, x in shown.items()}
    bar.shown = {name: f"{x:.3g}" if isinstance(x, float) else x for name, x in bar.shown.items()}
    return {**pace(), **bar.shown}


def _columns(bar: RichProgressBar, trainer: Any) -> list[Any]:
    from lightning.pytorch.callbacks.progress.rich_progress import CustomTimeColumn, ProcessingSpeedColumn

    columns = type(bar).configure_columns(bar, trainer)
    return [column for column in columns if not isinstance(column, CustomTimeColumn | ProcessingSpeedColumn)]


def refresh_pace(bar: Any, trainer: Any, pace: Mapping[str, str], now: str, done: int, total: int) -> None:
    """Redraws a bar between two batches, from any thread, with the latest `pace` and the current activity.

    Doesn't read metrics from Lightning, since their reduction is collective.

    Args:
        bar: Progress bar. Bars other than Lightning's are left unchanged.
        trainer: Trainer of the bar.
        pace: Pace as in `show_pace`.
        now: Current activity. Empty for none.
        done: Completed amount of the activity.
        total: Total amount of the activity.
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

"""Checkpoints every N rollouts, and when a run is interrupted."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightrl.arguments import above, rollouts_between
from lightrl.callbacks.run_guard import RunGuard, is_of_another_run, other_settings
from lightrl.compat.lightning import (
    SavingCheckpoint,
    accumulates,
    begin_evaluation,
    choose_last,
    evaluation_follows,
    evaluation_pending,
    flush_step_metrics,
    set_logged_step,
)
from lightrl.distributed.checkpoint_io import WRITTEN_BY_LIGHTNING, first_nan_state, first_nonfinite
from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.storage import StorageError, checkpoint_kind, require_entries, verify

__all__ = ["Preempted", "RolloutCheckpoint", "newest_whole", "preempt", "preemptions", "take_whole_ones"]


class Preempted(KeyboardInterrupt):
    """The run was preempted (SIGTERM, SIGUSR1), and ends as after Ctrl-C; the command's exit status is 75."""


class RolloutCheckpoint(SavingCheckpoint):
    """Lightning's `ModelCheckpoint`, saving every N rollouts, at the end, and when the run is interrupted.

    `ModelCheckpoint(every_n_train_steps=N)` looks whether Lightning's step counter, which jumps by the updates of a
    rollout, is divisible by N. This one counts rollouts. Ctrl-C, SIGTERM or SIGUSR1 while a rollout is generated saves
    and ends at once. During an update, and always with several processes, it waits for that rollout's updates (a second
    Ctrl-C does not wait, and saves nothing). So `last.ckpt` always lies between two rollouts and resuming from it
    continues exactly: `lightrl fit --config x.yaml --ckpt_path last`. The exit status is 1 after Ctrl-C, and 75 (try
    again) after SIGTERM and SIGUSR1; where Lightning requeues SLURM jobs itself, these two stay with it.

    `--ckpt_path last` takes the newest checkpoint that is whole, and says which it skipped and why. Weights that are
    not finite are not saved: the run ends.

    An evaluation that did not come to its end before the save is made when the run goes on. With
    `accumulate_grad_batches` a save or an end that is due waits for the update that the batches are gathered for.

    Args:
        every_n_rollouts: rollouts (supervised: batches) between two checkpoints, at least 1. None saves when the run is
            interrupted (and by `save_every_minutes`) only, beside a callback that saves otherwise.
        save_every_minutes: also save at the end of a rollout that ends so long after the last save, above 0; None is
            off.
        dirpath: folder; `checkpoints/` under the logger's folder where None.
        save_top_k: how many to keep beside `last.ckpt`; -1 keeps all.
        monitor: logged metric to keep the best by; None keeps the newest.
        mode: whether the best is the largest (`max`) or smallest (`min`).
        filename: of a checkpoint, with `{rollout}` for the number of rollouts done.
    """

    def __init__(
        self,
        every_n_rollouts: int | None = 20,
        dirpath: str | None = None,
        save_top_k: int = 1,
        monitor: str | None = None,
        mode: str = "max",
        filename: str = "rollout={rollout:06d}",
        save_every_minutes: float | None = None,
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            auto_insert_metric_name=False,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=True,
            every_n_train_steps=1,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.every_n_rollouts = rollouts_between(
            "RolloutCheckpoint.every_n_rollouts", every_n_rollouts, or_none="for interruptions only"
        )
        self.save_every_minutes = above(
            "RolloutCheckpoint.save_every_minutes", save_every_minutes, or_none="for none by time"
        )
        self._saved_at = time.monotonic()
        self._updating = False
        self._save_due = False
        self._evaluation_due = False
        self._stop_requested = False
        self._preempted = False
        self._cursor: int | None = None
        self._trainer: Trainer | None = None
        self._previous_handlers: dict[int, Any] = {}

    def extra_metrics(self, trainer: Trainer) -> dict[str, Any]:
        """Number of rollouts done."""
        return {"rollout": torch.tensor(trainer.fit_loop.total_batch_idx + 1)}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the folder; adds a `RunGuard` to the callbacks where there is none."""
        super().setup(trainer, pl_module, stage)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, RunGuard) for callback in callbacks):
            callbacks.append(RunGuard())  # Lightning calls its hooks from this one on

    def last_checkpoints(self, trainer: Trainer) -> set[str]:
        """What `--ckpt_path last` chooses from: the newest checkpoint that is whole.

        It also finds earlier runs under the logger's name, of those the ones that began with this run's settings;
        Lightning looks in the new folder only. The newest is so by the time of its file; `last.ckpt` is taken where it
        has come further, since a clock may have been set back, and copying gives files new times.

        Raises:
            ValueError: there are checkpoints, and none is whole, or all are of runs with other settings.
        """
        elsewhere = super().last_checkpoints(trainer)
        if any("://" in path for path in elsewhere):
            return elsewhere
        found = {Path(path) for path in elsewhere}
        if not found and trainer.state.fn != "fit":  # `lightrl validate` has a folder of its own below the run's
            found = set(Path(trainer.default_root_dir, "checkpoints").glob(f"{self.CHECKPOINT_NAME_LAST}.ckpt"))
        if self.dirpath is not None:
            found |= set(Path(self.dirpath).glob("*.ckpt"))
        elif not found and trainer.loggers:
            folder = Path(trainer.loggers[0].save_dir or trainer.default_root_dir) / str(trainer.loggers[0].name)
            runs = {path.parent for path in folder.glob(f"*/checkpoints/{self.CHECKPOINT_NAME_LAST}.ckpt")}
            others = {run.parent: other_settings(trainer, run.parent) for run in runs}
            runs = {run for run in runs if not others[run.parent]}
            if others and not runs:
                differing = "; ".join(f"{run} has {settings}" for run, settings in sorted(others.items()))
                raise ValueError(
                    f"ckpt_path=last: the runs in {folder} began with other settings ({differing}), so none is this "
                    "run's. Give the checkpoint itself to go on from one, or leave ckpt_path out to start over."
                )
            newest = max(runs, key=lambda run: max(_time(path) for path in run.glob("*.ckpt")), default=None)
            found = set(newest.glob("*.ckpt")) if newest is not None else set()
        else:
            found |= {other for path in found for other in path.parent.glob("*.ckpt")}
        return newest_whole(found)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs handlers of Ctrl-C and SIGTERM."""
        super().on_train_start(trainer, pl_module)
        self._trainer, self._cursor = trainer, _prompt_cursor(trainer)
        self._updating = self._stop_requested = self._preempted = self._save_due = self._evaluation_due = False
        self._saved_at = time.monotonic()
        loop = trainer.fit_loop
        self._evaluation_due = loop.epoch_loop.val_loop.restarted_mid_evaluation  # it begins with this evaluation
        at_end = loop.epoch_loop.batch_progress.current.ready >= loop.max_batches
        if loop.restarted_mid_epoch and at_end and not self._evaluation_due:
            # Saved in the last batch of an epoch. Lightning would not count the next epoch, and train one too many
            # after a second restart.
            loop.reset_restart_stage()
        if threading.current_thread() is threading.main_thread():  # elsewhere whoever runs us handles signals
            for signum in (signal.SIGINT, *preemptions(trainer)):
                self._previous_handlers[signum] = signal.signal(signum, self._on_interrupt)

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        trainer, preempted = self._trainer, signum != signal.SIGINT
        if self._stop_requested and preempted:
            return  # schedulers send it to the launcher and to the process, or once more to remind
        if trainer is None:
            raise KeyboardInterrupt
        # A batch that is drawn but not yet learned from would be lost; the prompts of rollouts, too, count as used.
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        made = _prompt_cursor(trainer) != self._cursor or progress.ready != progress.processed
        if not (self._updating or made or trainer.world_size > 1):
            raise Preempted if preempted else KeyboardInterrupt
        self._stop_requested, self._preempted = True, preempted
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process, also inside of C
        unit = "batch" if self._cursor is None else "rollout"
        rank_zero_info(f"\n{signal.Signals(signum).name}: finishing this {unit}, then saving. Ctrl-C stops at once.")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """From here on the weights change."""
        self._updating, self._evaluation_due = True, False
        # The step of loggers: Lightning counts one too many when a run goes on from between two epochs.
        set_logged_step(trainer, trainer.fit_loop.total_batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves every N rollouts; ends the run if Ctrl-C was pressed during the updates."""
        every_n, self._cursor = self.every_n_rollouts, _prompt_cursor(trainer)
        self._save_due |= every_n is not None and (trainer.fit_loop.total_batch_idx + 1) % every_n == 0
        if accumulates(trainer):  # gradients are in no checkpoint
            return
        self._updating, self._evaluation_due = False, evaluation_follows(trainer)
        if self.save_every_minutes is not None:
            late = time.monotonic() - self._saved_at >= 60 * self.save_every_minutes
            self._save_due |= trainer.strategy.reduce_boolean_decision(late, all=False)
        if self._save_due and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_due = False
            self._require_finite(trainer)
            with self._evaluation_due_kept(trainer):
                self.save_all(trainer, may_wait=True)
        # With several processes all stop, or none: the next update would wait for the missing ones.
        if trainer.strategy.reduce_boolean_decision(self._stop_requested, all=False):
            self._stop_requested = True
            preempted = trainer.strategy.reduce_boolean_decision(self._preempted, all=False)
            flush_step_metrics(trainer)  # Lightning would log them after this hook
            raise Preempted if preempted else KeyboardInterrupt

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts an evaluation that a run goes on with as one that begins."""
        if trainer.state.fn == "fit":
            begin_evaluation(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves what waited for a monitored metric."""
        super().on_validation_end(trainer, pl_module)
        self._evaluation_due = False

    def _require_finite(self, trainer: Trainer) -> None:
        bad = _nonfinite(trainer)
        if trainer.strategy.reduce_boolean_decision(bad is not None, all=False):
            raise ValueError(
                f"The weights are not finite ({bad or 'on another rank'}), so they are not saved; "
                f"{self.last_model_path or 'the checkpoint before'} is the newest state to go on from. Lower the "
                "learning rate, or bound max_grad_norm."
            )
        self._saved_at = time.monotonic()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves `last.ckpt` if the weights lie between two rollouts; says how to resume."""
        stopped = self._stop_requested and not self._updating
        self._restore_handlers()
        self._save_what_is_between(trainer, stopped=stopped)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunGuard):
                callback.release()

    def _save_what_is_between(self, trainer: Trainer, *, stopped: bool) -> None:
        fitting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if trainer.fast_dev_run or not fitting:  # type: ignore[attr-defined]
            return
        idle = not self._updating and self._cursor == _prompt_cursor(trainer)
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        between = stopped or (idle and progress.ready == progress.processed)
        wanted = between and (stopped or trainer.world_size == 1) and trainer.global_step > 0
        if wanted and _nonfinite(trainer) is None:
            try:
                with self._evaluation_due_kept(trainer):
                    self.save_newest(trainer)
            except StorageError as error:  # what ends the run is told by others
                rank_zero_info(f"Not saved: {error}")
        if self.last_model_path:
            rank_zero_info(f"Resume with: --ckpt_path {self.last_model_path}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the final state."""
        self._restore_handlers()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        by_itself = self.every_n_rollouts is not None or self.save_every_minutes is not None
        if by_itself and trainer.global_step > self.saved_step:
            self._require_finite(trainer)
            self.save_all(trainer, may_wait=False)

    def _evaluation_due_kept(self, trainer: Trainer) -> contextlib.AbstractContextManager[None]:
        """What is saved meanwhile goes on with the evaluation that is still to be made, if there is one."""
        return evaluation_pending(trainer) if self._evaluation_due else contextlib.nullcontext()

    def _restore_handlers(self) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        self._previous_handlers.clear()


def preempt(signum: int, frame: Any) -> None:
    """Handler of a signal that ends a run at once."""
    raise Preempted


def preemptions(trainer: Trainer) -> list[signal.Signals]:
    """The signals that end a run so that it can go on: without those that Lightning requeues a SLURM job by.

    Lightning alone answers SIGTERM at the end of a batch, of training only, with exit status 0.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return []
    found = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
    return [s for s in found if s != signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN]  # under nohup


def _prompt_cursor(trainer: Trainer) -> int | None:
    data = trainer.datamodule  # type: ignore[attr-defined]
    return data.prompt_cursor if isinstance(data, RolloutDataModule) else None


def _nonfinite(trainer: Trainer) -> str | None:
    """What of this rank's trained parameters is not finite, or of the optimizer's state NaN."""
    trained = {name: p.detach() for name, p in trainer.lightning_module.named_parameters() if p.requires_grad}
    bad = first_nonfinite(trained)
    for optimizer in trainer.optimizers:
        bad = bad or first_nan_state(optimizer.state)
    return bad


EARLIER = "it is of a run before the one that began there last"
WEIGHTS_ONLY = "it holds weights only"


def newest_whole(found: set[Path]) -> set[str]:
    """Of checkpoints the newest that is whole, as `RolloutCheckpoint.last_checkpoints` has it; nothing of nothing.

    Where a run began anew beside checkpoints of an earlier one, these are skipped.

    Raises:
        ValueError: there are some, and none is whole, or none of the run that began last.
    """
    skipped: list[str] = []
    earlier: list[Path] = []
    weights: list[Path] = []
    for path in sorted(found, key=_time, reverse=True):
        damage = _damage(path)
        if damage is None:
            last = path.with_name(f"{RolloutCheckpoint.CHECKPOINT_NAME_LAST}.ckpt")
            if last != path and last in found and _damage(last) is None and _step(last) > _step(path):
                path = last
            if skipped:
                rank_zero_warn(f"ckpt_path=last goes on from {path}, and skips {'; '.join(skipped)}.")
            return {str(path)}
        skipped.append(f"{path}: {damage}")
        earlier += [path] if damage == EARLIER else []
        weights += [path] if damage == WEIGHTS_ONLY else []
    if earlier:
        raise ValueError(
            f"ckpt_path=last: the run that began last in {str(earlier[0].parent)!r} has no whole checkpoint yet "
            f"({'; '.join(skipped)}). Give the checkpoint itself (ckpt_path={earlier[0]}) to go on with the earlier "
            "run, or leave ckpt_path out to start over."
        )
    if weights:  # enough for an evaluation; a run that would go on is told
        return {str(weights[0])}
    if skipped:
        raise ValueError(
            f"ckpt_path=last: no checkpoint is whole ({'; '.join(skipped)}). Give one of another folder, or leave "
            "ckpt_path out to start over."
        )
    return set()


def take_whole_ones(trainer: Trainer) -> None:
    """Has `--ckpt_path last` skip what is not whole with Lightning's `ModelCheckpoint`, too."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and not isinstance(callback, SavingCheckpoint):
            choose_last(callback, _newest_beside)


def _newest_beside(found: set[str]) -> set[str]:
    """Of all checkpoints in the folders of those that Lightning would choose from, which services keep elsewhere."""
    if any("://" in path for path in found):
        return found
    return newest_whole({other for path in found for other in Path(path).parent.glob("*.ckpt")})


def _time(path: Path) -> int:
    """When a file was changed; of a link that leads nowhere the link."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return path.lstat().st_mtime_ns


def _step(path: Path) -> int:
    """`trainer.global_step` of a checkpoint in one file; 0 for those in folders, whose files were written together."""
    with contextlib.suppress(pickle.UnpicklingError):
        return int(_opened(path)["global_step"]) if path.is_file() else 0
    return 0


def _opened(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _damage(path: Path) -> str | None:
    """Why a run cannot go on from there; None where it can."""
    if not path.exists():
        return "the link leads to nothing"
    try:
        checkpoint_kind(path)
        verify(path)
        if path.is_file():
            stored = _opened(path)
            require_entries(stored, WRITTEN_BY_LIGHTNING)
            if "loops" not in stored or "optimizer_states" not in stored:
                return WEIGHTS_ONLY
    except ValueError as error:
        return str(error)
    except Exception as error:  # what unpickling meets in a file of something else; errors of the disk
        if isinstance(error, pickle.UnpicklingError):  # with sums a run's own, which may hold objects of its classes
            if not Path(f"{path}.sha256").is_file():
                return "it holds objects of code, and has no checksum"
        else:
            return f"it cannot be read ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]})"
    return EARLIER if is_of_another_run(path) else None

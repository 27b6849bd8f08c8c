"""Checkpoints every N rollouts, and when a run is interrupted."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightrl.arguments import above, at_least
from lightrl.callbacks.run_guard import RunGuard, is_of_another_run, other_settings
from lightrl.compat.lightning import (
    SavingCheckpoint,
    accumulates,
    begin_evaluation,
    choose_last,
    ended_in_batch,
    evaluation_follows,
    evaluation_pending,
    evaluations_come,
    flush_step_metrics,
    logged_names,
    set_logged_step,
)
from lightrl.distributed.checkpoint_io import WRITTEN_BY_LIGHTNING, first_nan_state, first_nonfinite
from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.storage import (
    StorageError,
    checkpoint_kind,
    has_checksums,
    link,
    remove,
    require_entries,
    same_data,
    verify,
)

__all__ = ["Preempted", "RolloutCheckpoint", "newest_whole", "preempt", "preemptions", "take_whole_ones"]


PREVIOUS = ".previous"
PACKAGES = {"lightrl", "lightning", "torch", "builtins", "abc", "typing"}
METRIC_GROUPS = {
    *("advantage", "eval", "kl", "loss", "off_policy", "optim", "policy", "reward", "rollout", "throughput", "time"),
    *("tools", "value", "completions", "env"),
}
"""What the names of LightRL's metrics begin with."""


class Preempted(KeyboardInterrupt):
    """The run was preempted (SIGTERM, SIGUSR1), and ends as after Ctrl-C; the command's exit status is 75."""


class RolloutCheckpoint(SavingCheckpoint):
    """Saves every N rollouts, after evaluations, at the end, and when the run is interrupted.

    `last.ckpt` is written every N rollouts, whatever `monitor` is. Without `monitor` the newest `save_top_k`
    checkpoints are kept as well. With the name of an evaluation metric, each evaluation is ranked. The file of a score
    holds the weights that were evaluated, and the training state that belongs to them. `EvaluateFirst` ranks the
    initial weights as rollout 0. With the name of a training metric, every Nth rollout is ranked by the value that was
    logged with it. A reward is that of the completions sampled before the rollout's update.

    `last.ckpt` is a hard link if the same state has another name. `last.ckpt.previous` is the state saved before it. It
    is kept while no other checkpoint would survive damage to `last.ckpt`.

    Ctrl-C, SIGTERM, or SIGUSR1 while a rollout is generated saves and ends at once. During an update, and always with
    several processes, it waits for that rollout's updates. A second Ctrl-C ends without a save. So `last.ckpt` always
    lies between two rollouts, and resuming from it is exact: `lightrl fit --config x.yaml --ckpt_path last`. The exit
    status is 1 after Ctrl-C and 75 (try again) after SIGTERM and SIGUSR1. If Lightning requeues SLURM jobs, these two
    stay with it.

    `--ckpt_path last` takes the newest whole checkpoint, and reports which it skipped and why. Weights that are not
    finite end the run instead of being saved. A run saved before its evaluation ended evaluates when it is resumed.
    With `accumulate_grad_batches` a save waits for the update that the batches are gathered for.

    Args:
        every_n_rollouts: Rollouts (supervised: batches) between two checkpoints, at least 1. None saves only when the
            run is interrupted, by `save_every_minutes`, and after evaluations with `monitor`.
        save_every_minutes: Also save at the end of the first rollout this long after the last save. Defaults to never.
        dirpath: Folder. Defaults to `checkpoints/` in the logger's folder.
        save_top_k: Number of checkpoints to keep in addition to `last.ckpt`; -1 keeps all.
        monitor: Logged metric to keep the best by. Defaults to none, which keeps the newest.
        mode: Whether the best value is the largest (`max`) or smallest (`min`).
        filename: Name of a checkpoint, with `{rollout}` for the number of finished rollouts and `{NAME}` for a metric.

    Raises:
        ValueError: An interval is out of range. When training starts, or at the first evaluation: nothing logs
            `monitor`.
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
            save_top_k=save_top_k if monitor else min(save_top_k, 1),  # Lightning ranks by a metric only
            save_last=True,
            every_n_train_steps=1,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.save_top_k = save_top_k
        self.every_n_rollouts = at_least(
            "RolloutCheckpoint.every_n_rollouts", every_n_rollouts, 1, or_none="for interruptions only"
        )
        self.save_every_minutes = above(
            "RolloutCheckpoint.save_every_minutes", save_every_minutes, or_none="for none by time"
        )
        self._saved_at = time.monotonic()
        self._saved_rollouts = 0
        self._updating = False
        self._save_due = False
        self._evaluation_due = False
        self._evaluations_come = True
        self._stop_requested = False
        self._preempted = False
        self._cursor: int | None = None
        self._trainer: Trainer | None = None
        self._previous_handlers: dict[int, Any] = {}
        self._seen: Any = None  # the monitored value before the batch or evaluation that may log it again
        self._ranked_by: str | None = None  # what logs it: "batch", "epoch", or "evaluation"
        self._before_training: Any = None  # its value in an evaluation before training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the folder; adds a `RunGuard` to the callbacks where there is none."""
        super().setup(trainer, pl_module, stage)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, RunGuard) for callback in callbacks):
            callbacks.append(RunGuard())  # Lightning calls its hooks from this one on

    @property
    def ranked_by(self) -> str | None:
        """What logs the monitored metric: "batch", "epoch", or "evaluation". None until it was logged."""
        return self._ranked_by

    def state_dict(self) -> dict[str, Any]:
        """Lightning's, and what logs the monitored metric."""
        return {**super().state_dict(), "ranked_by": self._ranked_by}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the ranking of the checkpoints that are still there, or were moved to this run's folder."""
        self._ranked_by = state_dict.get("ranked_by")
        ranking = {}
        for path, score in state_dict["best_k_models"].items():
            moved = Path(str(self.dirpath)) / Path(path).name
            there = next((each for each in (path, str(moved)) if "://" in each or Path(each).exists()), None)
            if there is not None:
                ranking[there] = score
        self._set_ranking(ranking)
        last = Path(str(self.dirpath)) / Path(state_dict["last_model_path"] or "none").name
        self.last_model_path = str(last) if last.exists() else ""

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
            found |= _inside(Path(self.dirpath))
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
            found = _inside(newest) if newest is not None else set()
        else:
            found |= {other for path in found for other in _inside(path.parent)}
        return newest_whole(found)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs handlers of Ctrl-C and SIGTERM; saves the initial weights if they were evaluated."""
        self._trainer, self._cursor = trainer, _prompt_cursor(trainer)
        self._updating = self._stop_requested = self._preempted = self._save_due = self._evaluation_due = False
        self._saved_at = time.monotonic()
        loop = trainer.fit_loop
        self._evaluation_due = loop.epoch_loop.val_loop.restarted_mid_evaluation  # it begins with this evaluation
        at_end = loop.epoch_loop.batch_progress.current.ready >= loop.max_batches
        if loop.restarted_mid_epoch and at_end and not self._evaluation_due and ended_in_batch(trainer):
            # Saved in the last batch of an epoch. Lightning would not count the next epoch, and train one too many
            # after a second restart.
            loop.reset_restart_stage()
        if threading.current_thread() is threading.main_thread():  # elsewhere whoever runs us handles signals
            for signum in (signal.SIGINT, *preemptions(trainer)):
                self._previous_handlers[signum] = signal.signal(signum, self._on_interrupt)
        self._saved_rollouts = self._rollouts(trainer)
        self._evaluations_come = evaluations_come(trainer)
        self._require_monitor(trainer, started=False)
        score, self._before_training, self._seen = self._before_training, None, None
        if score is not None:
            self._ranked_by = "evaluation"
            self._save(trainer, score)

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
        # A second Ctrl-C ends the process, also inside of C, but never a notebook or an interactive session.
        signal.signal(signal.SIGINT, signal.default_int_handler if hasattr(sys, "ps1") else signal.SIG_DFL)
        unit = "batch" if self._cursor is None else "rollout"
        rank_zero_info(f"\n{signal.Signals(signum).name}: finishing this {unit}, then saving. Ctrl-C stops at once.")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """From here on the weights change."""
        self._updating, self._evaluation_due = True, False
        self._new_score(trainer)
        # The step of loggers: Lightning counts one too many when a run is resumed between two epochs.
        set_logged_step(trainer, trainer.fit_loop.total_batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves every N rollouts; ends the run if Ctrl-C was pressed during the updates."""
        every_n, self._cursor = self.every_n_rollouts, _prompt_cursor(trainer)
        self._save_due |= every_n is not None and self._rollouts(trainer) % every_n == 0
        if accumulates(trainer):  # gradients are in no checkpoint
            return
        self._updating, self._evaluation_due = False, evaluation_follows(trainer)
        score = self._new_score(trainer, "batch")
        if self.save_every_minutes is not None:
            late = time.monotonic() - self._saved_at >= 60 * self.save_every_minutes
            self._save_due |= trainer.strategy.reduce_boolean_decision(late, all=False)
        if self._save_due and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_due = False
            with self._evaluation_due_kept(trainer):
                self._save(trainer, score)
            if not self._evaluations_come:
                self._require_monitor(trainer)
        # With several processes all stop, or none: the next update would wait for the missing ones.
        if trainer.strategy.reduce_boolean_decision(self._stop_requested, all=False):
            self._stop_requested = True
            preempted = trainer.strategy.reduce_boolean_decision(self._preempted, all=False)
            flush_step_metrics(trainer)  # Lightning would log them after this hook
            raise Preempted if preempted else KeyboardInterrupt

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts an evaluation that a resumed run repeats as one that begins."""
        if trainer.state.fn == "fit":
            begin_evaluation(trainer)
            self._new_score(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ranks the weights that were evaluated, before they change."""
        if trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._evaluation_due = False
        if self.monitor is None:
            return
        score = self._new_score(trainer, "evaluation")
        if trainer.sanity_checking:
            if score is not None and trainer.num_sanity_val_batches == trainer.num_val_batches:
                self._before_training = score  # saved when training begins, with the generators' states of then
        elif score is None:
            self._require_monitor(trainer)
        else:
            self._save(trainer, score, last=not accumulates(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ranks by a training metric that is known at the end of an epoch only."""
        score = self._new_score(trainer, "epoch")
        if score is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save(trainer, score)
        self._require_monitor(trainer, epoch_ended=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves `last.ckpt` if the weights lie between two rollouts; reports how to resume."""
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
                    self._save(trainer)
            except StorageError as error:  # what ends the run is told by others
                rank_zero_info(f"Not saved: {error}")
        newest = self._newest(trainer)
        rank_zero_info(f"Resume with: --ckpt_path {newest}" if newest else "This run has saved no checkpoint yet.")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the final state."""
        self._restore_handlers()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        by_itself = self.every_n_rollouts is not None or self.save_every_minutes is not None
        if by_itself and self._rollouts(trainer) > self._saved_rollouts:
            self._save(trainer, self._new_score(trainer, "batch"))

    # ---- which checkpoints are kept ------------------------------------------------------------------------------

    def _rollouts(self, trainer: Trainer) -> int:
        """Finished rollouts, at the end of a batch or later."""
        return int(trainer.fit_loop.total_batch_idx) + 1

    def _new_score(self, trainer: Trainer, logged_by: str = "") -> Any:
        """What ranks the weights: the monitored value, if it was logged since the last call; else None.

        Args:
            trainer: Holds the metrics.
            logged_by: What has just ended: a "batch", "epoch", or "evaluation". Empty only takes note of the value.
        """
        if self.monitor is None:
            return torch.tensor(self._rollouts(trainer)) if logged_by == "batch" else None
        before, now = self._seen, trainer.callback_metrics.get(self.monitor)
        self._seen = now
        same = isinstance(now, Tensor) and isinstance(before, Tensor) and now.data_ptr() == before.data_ptr()
        if not logged_by or now is None or now is before or same:
            return None
        if self._ranked_by != logged_by and (self._ranked_by is None or logged_by == "evaluation"):
            if self._ranked_by is not None and not trainer.sanity_checking:  # values of training under the same name
                self._remove(trainer, list(self.best_k_models))
                self._set_ranking({})
            self._ranked_by = logged_by
        return torch.as_tensor(now).detach().clone() if self._ranked_by == logged_by else None

    def _save(self, trainer: Trainer, score: Any = None, *, last: bool = True) -> None:
        """Saves `last.ckpt`, and with a score that ranks among the best also the rollout's own file. Collective.

        Args:
            trainer: The run to save.
            score: Rank of the weights. Defaults to none.
            last: Whether the state may become `last.ckpt`.

        Raises:
            ValueError: Weights are not finite.
            StorageError: The disk is full, or the like. The checkpoints of before stay, and are what this object knows.
        """
        self._require_finite(trainer)
        before = (self.best_k_models, self.current_score, self.last_model_path)
        path, dropped = None, list[str]()
        try:
            if last:
                self.last_model_path = self.format_checkpoint_name({}, self.CHECKPOINT_NAME_LAST)
            if score is not None and self.save_top_k != 0:
                path, dropped = self._rank(trainer, score)
            if path is not None:
                self.write(trainer, path)
            if last:
                self._write_last(trainer, path)
        except BaseException:
            ranking, self.current_score, self.last_model_path = before
            self._set_ranking(ranking)
            raise
        self._remove(trainer, dropped)
        if last:
            self._saved_rollouts, self._saved_at = self._rollouts(trainer), time.monotonic()
            self._keep_previous(trainer)

    def _rank(self, trainer: Trainer, score: Tensor) -> tuple[str | None, list[str]]:
        """The file to write, None if the score is not among the best, and those that fall out of the ranking."""
        metrics: dict[str, Any] = {
            **trainer.callback_metrics,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
        }
        metrics |= {"rollout": self._rollouts(trainer), **({self.monitor: score} if self.monitor else {})}
        path = self.format_checkpoint_name(metrics)
        if bool(score.isnan()):
            score = torch.tensor(float("inf" if self.mode == "min" else "-inf"))
        ranking, k = self.best_k_models, self.save_top_k
        rival = ranking.get(path, ranking[self.kth_best_model_path] if len(ranking) == k else None)
        newest = self.monitor is None
        wins = rival is None or newest or bool(score < rival if self.mode == "min" else score > rival)
        if not trainer.strategy.reduce_boolean_decision(wins):
            return None, []
        ranked = sorted({**ranking, path: score}.items(), key=lambda each: float(each[1]), reverse=self._largest)
        kept = ranked if k == -1 else ranked[:k]
        self.current_score = score
        self._set_ranking(dict(kept))
        return path, [name for name, _ in ranked[len(kept) :]]

    @property
    def _largest(self) -> bool:
        return self.monitor is None or self.mode == "max"

    def _set_ranking(self, ranking: dict[str, Any]) -> None:
        """Best first, in the attributes that Lightning and loggers read."""
        ordered = sorted(ranking.items(), key=lambda each: float(each[1]), reverse=self._largest)
        self.best_k_models = dict(ordered)
        self.best_model_path, self.best_model_score = ordered[0] if ordered else ("", None)
        self.kth_best_model_path = ordered[-1][0] if ordered else ""
        if ordered:
            self.kth_value = ordered[-1][1]

    def _write_last(self, trainer: Trainer, path: str | None) -> None:
        """`last.ckpt`, as a link to what was written as `path` a moment ago, if that is possible."""
        last, linked = Path(self.last_model_path), False
        if "://" not in self.last_model_path:
            with _told_to_all(trainer):
                if trainer.is_global_zero:
                    if has_checksums(last):
                        link(last, _previous(last))
                    linked = path is not None and has_checksums(Path(path))
                    if linked:
                        link(Path(path or ""), last)
        if not trainer.strategy.broadcast(linked):
            self.write(trainer, self.last_model_path)

    def _keep_previous(self, trainer: Trainer) -> None:
        """Removes the checkpoint before the last one if another survives damage to the last."""
        last = Path(self.last_model_path)
        if trainer.is_global_zero and "://" not in self.last_model_path:
            others = [path for path in map(Path, self.best_k_models) if path.exists() and not same_data(path, last)]
            if others or same_data(_previous(last), last):
                remove(_previous(last))

    def _remove(self, trainer: Trainer, paths: list[str]) -> None:
        """Removes checkpoints of this run's folder, except the one that the run was resumed from."""
        for path in paths:
            resumed = trainer.ckpt_path is not None and Path(trainer.ckpt_path).absolute() == Path(path).absolute()
            if "://" in path or (Path(path).parent == Path(str(self.dirpath)) and not resumed):
                trainer.strategy.remove_checkpoint(path)

    def _newest(self, trainer: Trainer) -> str | None:
        """The newest checkpoint of this run that exists, or the one that it was resumed from."""
        last = Path(self.last_model_path or "none")
        ranked = sorted(self.best_k_models, key=lambda path: _time(Path(path)) if Path(path).exists() else 0)
        known = [self.last_model_path, *reversed(ranked), str(_previous(last)), str(trainer.ckpt_path or "")]
        return next((path for path in known if path and ("://" in path or Path(path).exists())), None)

    def _require_finite(self, trainer: Trainer) -> None:
        bad = _nonfinite(trainer)
        if trainer.strategy.reduce_boolean_decision(bad is not None, all=False):
            newest = self._newest(trainer)
            raise ValueError(
                f"The weights are not finite ({bad or 'on another rank'}), so they are not saved. "
                f"{f'Resume from {newest}' if newest else 'Start over'} with a lower learning rate or max_grad_norm."
            )

    def _require_monitor(self, trainer: Trainer, *, started: bool = True, epoch_ended: bool = False) -> None:
        """Raises a ValueError if it is known by now that nothing logs `monitor`."""
        name = self.monitor
        if name is None or self.save_top_k == 0 or self._ranked_by or self._before_training is not None:
            return
        known = trainer.callback_metrics.keys() | logged_names(trainer)
        if name in known or name in {f"{each}_epoch" for each in known}:
            return
        parts = [trainer.lightning_module, *trainer.callbacks]  # type: ignore[attr-defined]
        if not started:
            foreign = name.partition("/")[0] not in METRIC_GROUPS and not name.startswith("lr-")
            wrong = foreign or (name.startswith("eval/") and not self._evaluations_come)
            wrong = wrong and not any(_may_log(part) for part in parts)
        elif epoch_ended:
            wrong = not self._evaluations_come
        else:
            wrong = not any(_of_user(part, "on_train_epoch_end") for part in parts)
        if wrong:
            why = "" if self._evaluations_come else " and this run has no evaluation (eval_prompts, validation rows)"
            raise ValueError(
                f"RolloutCheckpoint.monitor={name!r}: nothing logs this metric{why}. "
                "Monitor a metric that is logged, or leave monitor out to keep the newest checkpoints."
            )

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


def _may_log(part: Any) -> bool:
    """Whether the user's part of a module or callback logs metrics, or its source is unknown."""
    return any(_logs(cls) for cls in type(part).__mro__ if cls.__module__.partition(".")[0] not in PACKAGES)


def _logs(cls: type) -> bool:
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return True
    return any(each in source for each in ("log(", "log_dict(", "callback_metrics"))


def _of_user(part: Any, hook: str) -> bool:
    owner = next((cls for cls in type(part).__mro__ if hook in vars(cls)), object)
    return owner.__module__.partition(".")[0] not in PACKAGES


@contextlib.contextmanager
def _told_to_all(trainer: Trainer) -> Iterator[None]:
    """Has every rank raise what rank 0 could not write."""
    problem = None
    try:
        yield
    except StorageError as error:
        problem = str(error)
    problem = trainer.strategy.broadcast(problem)
    if problem is not None:
        raise StorageError(problem)


def _previous(last: Path) -> Path:
    return last.with_name(f"{last.name}{PREVIOUS}")


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
            if (
                last != path
                and last in found
                and _damage(last) is None
                and path.is_file()
                and _step(last) >= _step(path)
            ):
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
    return newest_whole({other for path in found for other in _inside(Path(path).parent)})


def _inside(folder: Path) -> set[Path]:
    """The checkpoints in a folder."""
    return {*folder.glob("*.ckpt"), *folder.glob(f"*.ckpt{PREVIOUS}")}


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

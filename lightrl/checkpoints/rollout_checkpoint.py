"""`RolloutCheckpoint`: saves every N rollouts, ranks evaluated weights, and saves interrupted runs."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightrl.checkpoints.checkpoint_io import first_nonfinite
from lightrl.checkpoints.files import StorageError, has_checksums, link
from lightrl.checkpoints.run_folder import LAST, RunGuard, checkpoints_in, last_of_runs, newest_whole, written_at
from lightrl.compat.lightning import KeepsHooks
from lightrl.compat.lightning_checkpoints import (
    SavingCheckpoint,
    accumulates,
    begin_evaluation,
    ended_in_batch,
    evaluation_follows,
    evaluation_pending,
    flush_step_metrics,
    set_logged_step,
)


class Preempted(KeyboardInterrupt):
    """The run was preempted (SIGTERM, SIGUSR1). It ends as after Ctrl-C, but with exit code 75."""


class RolloutCheckpoint(KeepsHooks, SavingCheckpoint):
    """Saves checkpoints every N rollouts, after evaluations, at the end, and when the run is interrupted.

    `last.ckpt` is written every N rollouts, regardless of `monitor`. Without `monitor`, the newest checkpoints are also
    kept. With an evaluation metric, each evaluation is ranked, and the checkpoint of a score holds the evaluated
    weights. `EvaluateFirst` ranks the initial weights as rollout 0. With a training metric, every Nth rollout is ranked
    by its value. A training reward scores completions sampled before the rollout's update.

    `last.ckpt` is a hard link if another checkpoint has the same state.

    Ctrl-C, SIGTERM, or SIGUSR1 during generation saves and ends the run immediately. During an update, and always with
    several processes, the run first finishes the rollout's updates. A second Ctrl-C ends it without saving. Therefore
    `last.ckpt` is always between two rollouts, and resuming from it is exact. To resume from the newest intact
    checkpoint, run `lightrl fit --config x.yaml --ckpt_path last`.

    The exit code is 1 after Ctrl-C and 75 (try again) after SIGTERM and SIGUSR1, unless Lightning requeues the SLURM
    job. Non-finite weights end the run and are not saved.

    Args:
        every_n_rollouts: Number of rollouts (supervised: batches) between checkpoints, at least 1. None saves only on
            interruption, and after evaluations with `monitor`.
        dirpath: Directory for checkpoints. Defaults to `checkpoints/` in the logger's directory.
        save_top_k: Number of checkpoints to keep in addition to `last.ckpt`. -1 keeps all.
        monitor: Logged metric that ranks checkpoints. Defaults to none, which keeps the newest.
        mode: `max` if larger values of `monitor` are better, `min` if smaller ones are.
        filename: Name of a checkpoint, with `{rollout}` for the number of finished rollouts and `{NAME}` for a metric.

    Attributes:
        ranked_by: What logs `monitor`: "batch" or "evaluation". None before it is logged.
    """

    kept_hooks = (
        *("setup", "state_dict", "load_state_dict", "on_train_start", "on_train_batch_start", "on_train_batch_end"),
        *("on_validation_start", "on_validation_end", "on_exception", "on_train_end"),
    )

    def __init__(
        self,
        every_n_rollouts: int | None = 20,
        dirpath: str | None = None,
        save_top_k: int = 1,
        monitor: str | None = None,
        mode: str = "max",
        filename: str = "rollout={rollout:06d}",
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            auto_insert_metric_name=False,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k if monitor else min(save_top_k, 1),  # Lightning ranks only by a metric
            save_last=True,
            every_n_train_steps=1,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.save_top_k = save_top_k
        self.every_n_rollouts = every_n_rollouts
        self._saved_rollouts = 0
        self._updating = self._save_due = self._evaluation_due = self._stop_requested = self._preempted = False
        self._cursor: int | None = None
        self._trainer: Trainer | None = None
        self._previous_handlers: dict[int, Any] = {}
        self._seen: Any = None  # monitored value before the batch or evaluation that may log it
        self._before_training: Any = None  # monitored value of an evaluation before training
        self.ranked_by: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sets the checkpoint directory, and locks the run's directories."""
        super().setup(trainer, pl_module, stage)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, RunGuard) for callback in callbacks):
            callbacks.append(RunGuard())  # Lightning calls its remaining hooks

    def state_dict(self) -> dict[str, Any]:
        """Adds what logs the monitored metric to Lightning's state."""
        return {**super().state_dict(), "ranked_by": self.ranked_by}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the ranking of checkpoints that still exist or were moved to this run's directory."""
        self.ranked_by = state_dict.get("ranked_by")
        ranking = {}
        for path, score in state_dict["best_k_models"].items():
            moved = str(Path(str(self.dirpath)) / Path(path).name)
            there = next((each for each in (path, moved) if "://" in each or Path(each).exists()), None)
            if there is not None:
                ranking[there] = score
        self._set_ranking(ranking)
        last = Path(str(self.dirpath)) / Path(state_dict["last_model_path"] or "none").name
        self.last_model_path = str(last) if last.exists() else ""

    def last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Returns the checkpoint for `--ckpt_path last`: the newest intact one, if any.

        Without `dirpath`, also searches earlier runs under the logger's name that have this run's settings. Raises a
        ValueError if no checkpoint is intact, or if all belong to runs with different settings.
        """
        elsewhere = super().last_checkpoints(trainer)
        if any("://" in path for path in elsewhere):
            return elsewhere
        found = {Path(path) for path in elsewhere}
        if not found and trainer.state.fn != "fit":  # `lightrl validate` has its own directory in the run's
            found = set(Path(trainer.default_root_dir, "checkpoints").glob(LAST))
        if self.dirpath is not None:
            found |= checkpoints_in(Path(self.dirpath))
        elif not found and trainer.loggers:
            logger = trainer.loggers[0]
            settings: dict[str, Any] = getattr(trainer.lightning_module, "run_settings", dict)()
            found = last_of_runs(Path(logger.save_dir or trainer.default_root_dir) / str(logger.name), settings)
        return newest_whole(found | {other for path in found for other in checkpoints_in(path.parent)})

    # ---- saving ------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs handlers for Ctrl-C and SIGTERM; saves the initial weights if they were evaluated."""
        self._trainer, self._cursor = trainer, _prompt_cursor(trainer)
        self._updating = self._stop_requested = self._preempted = self._save_due = False
        loop = trainer.fit_loop
        self._evaluation_due = loop.epoch_loop.val_loop.restarted_mid_evaluation  # then it starts with this evaluation
        at_end = loop.epoch_loop.batch_progress.current.ready >= loop.max_batches
        if loop.restarted_mid_epoch and at_end and not self._evaluation_due and ended_in_batch(trainer):
            # Saved in the last batch of an epoch. Without this, Lightning would not count the next epoch, and would
            # train one too many after a second restart.
            loop.reset_restart_stage()
        if threading.current_thread() is threading.main_thread():  # only the main thread can handle signals
            for signum in (signal.SIGINT, *preemptions(trainer)):
                self._previous_handlers[signum] = signal.signal(signum, self._on_interrupt)
        self._saved_rollouts = self._rollouts(trainer)
        score, self._before_training, self._seen = self._before_training, None, None
        if score is not None:
            self.ranked_by = "evaluation"
            self._save(trainer, score)

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        trainer, preempted = self._trainer, signum != signal.SIGINT
        if self._stop_requested and preempted:
            return  # schedulers signal both the launcher and the process, or repeat the signal
        if trainer is None:
            raise KeyboardInterrupt
        # A batch that is drawn but not yet trained on would be lost, and its prompts would count as used.
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        made = _prompt_cursor(trainer) != self._cursor or progress.ready != progress.processed
        if not (self._updating or made or trainer.world_size > 1):
            raise Preempted if preempted else KeyboardInterrupt
        self._stop_requested, self._preempted = True, preempted
        # A second Ctrl-C ends the process, even inside C code, but never a notebook or an interactive session.
        signal.signal(signal.SIGINT, signal.default_int_handler if hasattr(sys, "ps1") else signal.SIG_DFL)
        unit = "batch" if self._cursor is None else "rollout"
        rank_zero_info(
            f"\n{signal.Signals(signum).name}: finishing this {unit}, then saving. Press Ctrl-C to stop immediately."
        )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Records that the weights are changing."""
        self._updating, self._evaluation_due = True, False
        self._new_score(trainer)
        # The step for loggers: Lightning counts one too many when a run is resumed between two epochs.
        set_logged_step(trainer, trainer.fit_loop.total_batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves every N rollouts; ends the run if it was interrupted during the updates."""
        every_n, self._cursor = self.every_n_rollouts, _prompt_cursor(trainer)
        self._save_due |= every_n is not None and self._rollouts(trainer) % every_n == 0
        if accumulates(trainer):  # checkpoints don't include gradients
            return
        self._updating, self._evaluation_due = False, evaluation_follows(trainer)
        score = self._new_score(trainer, "batch")
        if self._save_due and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_due = False
            with self._evaluation_due_kept(trainer):
                self._save(trainer, score)
        # With several processes, either all stop or none: the next update would wait for missing ones.
        if trainer.strategy.reduce_boolean_decision(self._stop_requested, all=False):
            self._stop_requested = True
            preempted = trainer.strategy.reduce_boolean_decision(self._preempted, all=False)
            flush_step_metrics(trainer)  # Lightning logs them after this hook
            raise Preempted if preempted else KeyboardInterrupt

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Treats an evaluation that a resumed run repeats as new."""
        if trainer.state.fn == "fit":
            begin_evaluation(trainer)
            self._new_score(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ranks the evaluated weights before they change."""
        if trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._evaluation_due = False
        score = None if self.monitor is None else self._new_score(trainer, "evaluation")
        if trainer.sanity_checking:
            if score is not None and trainer.num_sanity_val_batches == trainer.num_val_batches:
                self._before_training = score  # saved when training begins, with the random states of that time
        elif score is not None:
            self._save(trainer, score, last=not accumulates(trainer))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves `last.ckpt` if the run is between two rollouts; reports how to resume."""
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
            except StorageError as error:  # the error that ends the run is reported separately
                rank_zero_info(f"Not saved: {error}")
        newest = self._newest(trainer)
        rank_zero_info(f"Resume with: --ckpt_path {newest}" if newest else "This run has saved no checkpoint yet.")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the final state."""
        self._restore_handlers()
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        unranked = self.monitor is not None and self.ranked_by is None
        if (self.every_n_rollouts is not None or unranked) and self._rollouts(trainer) > self._saved_rollouts:
            self._save(trainer, self._new_score(trainer, "batch"))
        if unranked:
            rank_zero_warn(f"RolloutCheckpoint.monitor={self.monitor!r}: nothing logged this metric.")

    # ---- ranking -------------------------------------------------------------------------------------------------

    def _rollouts(self, trainer: Trainer) -> int:
        return int(trainer.fit_loop.total_batch_idx) + 1

    def _new_score(self, trainer: Trainer, logged_by: str = "") -> Any:
        """Returns the monitored value if it was logged since the last call, else None.

        `logged_by` is what has just ended: a "batch" or "evaluation". Empty only records the value.
        """
        if self.monitor is None:
            return torch.tensor(self._rollouts(trainer)) if logged_by == "batch" else None
        before, now = self._seen, trainer.callback_metrics.get(self.monitor)
        self._seen = now
        same = isinstance(now, Tensor) and isinstance(before, Tensor) and now.data_ptr() == before.data_ptr()
        if not logged_by or now is None or now is before or same:
            return None
        if self.ranked_by != logged_by and (self.ranked_by is None or logged_by == "evaluation"):
            if self.ranked_by is not None and not trainer.sanity_checking:  # ignores training values of the same name
                self._remove(trainer, list(self.best_k_models))
                self._set_ranking({})
            self.ranked_by = logged_by
        return torch.as_tensor(now).detach().clone() if self.ranked_by == logged_by else None

    def _save(self, trainer: Trainer, score: Any = None, *, last: bool = True) -> None:
        """Saves `last.ckpt` and, if the score ranks among the best, the rollout's own file. Collective.

        If it fails, earlier checkpoints and the ranking are kept.
        """
        bad = _nonfinite(trainer)
        if trainer.strategy.reduce_boolean_decision(bad is not None, all=False):
            newest = self._newest(trainer)
            raise ValueError(
                f"The weights are not finite ({bad or 'on another rank'}), so they are not saved. "
                f"{f'Resume from {newest}' if newest else 'Start over'} with a lower learning rate or max_grad_norm."
            )
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
            self._saved_rollouts = self._rollouts(trainer)

    def _rank(self, trainer: Trainer, score: Tensor) -> tuple[str | None, list[str]]:
        """Returns the file to write, or None if the score is not among the best, and files that leave the ranking."""
        known = {"epoch": trainer.current_epoch, "step": trainer.global_step, "rollout": self._rollouts(trainer)}
        metrics: dict[str, Any] = {**trainer.callback_metrics, **known}
        path = self.format_checkpoint_name(metrics | ({self.monitor: score} if self.monitor else {}))
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
        ordered = sorted(ranking.items(), key=lambda each: float(each[1]), reverse=self._largest)
        self.best_k_models = dict(ordered)
        self.best_model_path, self.best_model_score = ordered[0] if ordered else ("", None)
        self.kth_best_model_path = ordered[-1][0] if ordered else ""
        if ordered:
            self.kth_value = ordered[-1][1]

    def _write_last(self, trainer: Trainer, path: str | None) -> None:
        """Writes `last.ckpt`, if possible as a link to `path`, which was just written."""
        linked, problem = False, None
        if trainer.is_global_zero and path is not None and "://" not in self.last_model_path:
            try:
                if linked := has_checksums(Path(path)):
                    link(Path(path), Path(self.last_model_path))
            except StorageError as error:
                problem = str(error)
        linked, problem = trainer.strategy.broadcast((linked, problem))
        if problem is not None:  # on every rank
            raise StorageError(problem)
        if not linked:
            self.write(trainer, self.last_model_path)

    def _remove(self, trainer: Trainer, paths: list[str]) -> None:
        """Removes checkpoints of this run's directory, except the one that the run was resumed from."""
        for path in paths:
            resumed = trainer.ckpt_path is not None and Path(trainer.ckpt_path).absolute() == Path(path).absolute()
            if "://" in path or (Path(path).parent == Path(str(self.dirpath)) and not resumed):
                trainer.strategy.remove_checkpoint(path)

    def _newest(self, trainer: Trainer) -> str | None:
        """Returns the newest existing checkpoint of this run, or the one that it was resumed from."""
        ranked = sorted(self.best_k_models, key=lambda path: written_at(Path(path)) if Path(path).exists() else 0)
        known = [self.last_model_path, *reversed(ranked), str(trainer.ckpt_path or "")]
        return next((path for path in known if path and ("://" in path or Path(path).exists())), None)

    def _evaluation_due_kept(self, trainer: Trainer) -> contextlib.AbstractContextManager[None]:
        """Context manager for saving checkpoints from which a resumed run starts with the due evaluation."""
        return evaluation_pending(trainer) if self._evaluation_due else contextlib.nullcontext()

    def _restore_handlers(self) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        self._previous_handlers.clear()


def preempt(signum: int, frame: Any) -> None:
    """Signal handler that ends a run immediately."""
    raise Preempted


def preemptions(trainer: Trainer) -> list[signal.Signals]:
    """Returns the signals that end a run resumably, except those used by Lightning to requeue a SLURM job."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return []
    found = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
    return [s for s in found if s != signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN]  # under nohup


def _prompt_cursor(trainer: Trainer) -> int | None:
    """Position in the prompts of a RolloutDataModule; None for other data."""
    return getattr(trainer.datamodule, "prompt_cursor", None)  # type: ignore[attr-defined]


def _nonfinite(trainer: Trainer) -> str | None:
    """Returns the name of non-finite trained parameters or NaN optimizer state on this rank."""
    trained = {name: p.detach() for name, p in trainer.lightning_module.named_parameters() if p.requires_grad}
    return first_nonfinite(trained, [optimizer.state for optimizer in trainer.optimizers])

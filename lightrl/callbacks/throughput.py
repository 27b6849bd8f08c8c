"""Throughput and memory of each rollout, and an evaluation before training."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from math import isnan
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info

from lightrl.compat.progress_bars import refresh_pace, show_pace, stop_bar
from lightrl.distributed.strategies import all_reduce
from lightrl.ops.progress import TRAINING, brief, clock, count, evaluations_left, result_line, rollouts_in_all
from lightrl.records import Rollouts

IN_PROGRESS_BAR = {"reward/mean": "reward", "kl/ref": "kl"}
KEPT = ("first", "last", "binary")
TICK, LINES = 1.0, 10.0
"""Seconds between updates of the progress bar, and between log lines."""


class ThroughputMonitor(Callback):
    """Logs the throughput of each rollout, and shows the run's progress and result.

    The progress bar shows seconds per rollout, the estimated time left, reward, KL, tokens/s, and the finished prompts
    of the current rollout. Without a terminal, a log line shows the same at most every ten seconds. At the end of the
    run, it prints the result, such as `eval accuracy 0.12 -> 0.58 in 40 rollouts, 7:12`. The result compares the first
    and last evaluation (see `EvaluateFirst`), or training rewards if there are no evaluations.

    Metrics per rollout, where t is the wall time between the ends of two updates, without evaluation:

    - `time/step`: t in seconds, including generation, scoring, experience, update, and callbacks. The first one
      includes the engine's startup.
    - `throughput/tokens_per_second`: prompt and completion tokens across all ranks per second, without padding.
    - `throughput/samples_per_second`: completions across all ranks per second.
    - `throughput/peak_memory_gb`: peak memory since the start in 10^9 bytes, maximum over ranks. Allocated by PyTorch
      on a GPU, or resident in this process on a CPU. Excludes engines in separate processes.

    For `SFTLightningModule`, a batch counts as a rollout. Batches without an `attention_mask` are skipped. The command
    line adds this callback to every run.

    Args:
        progress_bar: Whether to show progress, in the progress bar or as log lines.
    """

    def __init__(self, progress_bar: bool = True) -> None:
        self.progress_bar = progress_bar
        self._reset()

    def _reset(self) -> None:
        self._start = self._paused = 0.0
        self._begun = time.perf_counter()
        self._earlier = 0.0  # seconds before the run resumed
        self._steps: deque[float] = deque(maxlen=10)
        self._warm = False  # whether a step after engine startup has been timed
        self._evaluation = 0.0
        self._done, self._unit = 0, "rollout"
        self._left: float | None = None
        self._binary = True
        self._first: dict[str, tuple[int, float]] = {}
        self._last: dict[str, tuple[int, float]] = {}
        self._ended = threading.Event()

    # ---- progress ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._reset()
        bar: Any = trainer.progress_bar_callback
        if self.progress_bar and bar is not None and bar.is_enabled and trainer.is_global_zero:
            show_pace(bar, self.pace)
            threading.Thread(target=self._show, args=(trainer, bar, self._ended), name="progress", daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: Any) -> None:
        self._ended.set()

    on_exception = teardown  # type: ignore[assignment]

    def pace(self) -> dict[str, str]:
        """Returns seconds per rollout and the time left for the progress bar."""
        shown = {f"s/{self._unit}": brief(median(self._steps))} if self._steps else {}
        if self._left is not None:
            shown["left"] = clock(max(self._left - (time.perf_counter() - self._start), 0.0))
        return shown

    def _show(self, trainer: Any, bar: Any, ended: threading.Event) -> None:
        """Updates the progress bar, or logs lines without a terminal, until `ended` is set."""
        terminal, said = sys.stdout.isatty() or "ipykernel" in sys.modules, time.perf_counter()
        while not ended.wait(TICK):
            done, total, details = getattr(trainer.datamodule, "progress", None) or (0, 0, "")
            doing = "Evaluating" if trainer.sanity_checking or trainer.evaluating else "Sampling"
            now = f"{doing} ({details})" if details else doing if total else ""
            if terminal:
                refresh_pace(bar, trainer, self.pace(), now, done, total)
            elif time.perf_counter() - said > LINES and (now or self._steps):
                said = time.perf_counter()
                numbers = {**({now: f"{done}/{total}"} if now else {}), **self.pace(), **getattr(bar, "shown", {})}
                told = ", ".join(f"{name} {value}" for name, value in numbers.items())
                rank_zero_info(f"After {count(self._done, self._unit)}: {told}")

    # ---- metrics -----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.perf_counter()
        self._done = trainer.fit_loop.total_batch_idx + 1

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *numbers: int
    ) -> None:
        """Records whether all rewards are 0 or 1, so that their mean is an accuracy."""
        rewards = batch.rewards if isinstance(batch, Rollouts) else torch.zeros(0)
        self._binary &= bool(((rewards == 0) | (rewards == 1) | rewards.isnan()).all())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resumes the timer and stores the metrics of a full evaluation."""
        seconds = time.perf_counter() - self._paused
        self._start += seconds
        if not trainer.sanity_checking:
            self._evaluation = seconds
            self._left = None if self._left is None else max(self._left - seconds, 0.0)
            self._note(trainer.callback_metrics)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stores the metrics of an evaluation before training."""
        if trainer.num_sanity_val_steps == float("inf"):
            self._note(trainer.callback_metrics)

    def _note(self, metrics: Mapping[str, Any]) -> None:
        """Stores the first and last points of evaluations and training rewards."""
        for name, value in metrics.items():
            if (name.startswith("eval/") or name in TRAINING) and not isnan(value):
                self._last[name] = self._done, float(value)
                self._first.setdefault(name, self._last[name])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        results = outputs if isinstance(outputs, Mapping) else {}
        now = time.perf_counter()
        seconds, self._start = max(now - self._start, 1e-9), now
        self._keep_time(trainer, seconds, batch, results)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else getattr(batch, "attention_mask", None)
        if mask is None:
            return
        counts = torch.tensor([float(mask.sum()), float(len(mask))])
        tokens, samples = all_reduce(trainer.strategy, counts, "sum").tolist()
        peak = all_reduce(trainer.strategy, torch.tensor(peak_memory(pl_module.device)), "max")
        metrics = {
            "time/step": seconds,
            "throughput/tokens_per_second": tokens / seconds,
            "throughput/samples_per_second": samples / seconds,
            "throughput/peak_memory_gb": float(peak) / 1e9,
        }
        pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=len(mask))
        if self.progress_bar:
            shown = {short: results[name] for name, short in IN_PROGRESS_BAR.items() if name in results}
            shown["tok/s"] = round(tokens / seconds)
            # Loggers already receive these metrics under their full names.
            pl_module.log_dict(shown, on_step=True, on_epoch=False, prog_bar=True, logger=False, batch_size=len(mask))

    def _keep_time(self, trainer: Trainer, seconds: float, batch: Any, results: Mapping[str, Any]) -> None:
        self._unit = "rollout" if isinstance(batch, Rollouts) else "batch"
        self._done = done = trainer.fit_loop.total_batch_idx + 1
        if not self._warm and self._steps:
            self._warm, self._steps = True, deque(maxlen=10)  # excludes the engine's startup
        self._steps.append(seconds)
        logged = {**trainer.callback_metrics, **results}
        self._note({name: logged[name] for name in TRAINING if name in logged})
        if (total := rollouts_in_all(trainer, done)) is not None:
            evaluations = evaluations_left(trainer, done - 1, total) * self._evaluation  # one may follow now
            self._left = max(total - done, 0) * median(self._steps) + evaluations

    # ---- the result --------------------------------------------------------------------------------------------

    @property
    def _seconds(self) -> float:
        return self._earlier + time.perf_counter() - self._begun

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._done:
            line = result_line(self._first, self._last, self._binary, count(self._done, self._unit), self._seconds)
            stop_bar(trainer.progress_bar_callback)
            print(f"Result: {line}", flush=True)
            for logger in trainer.loggers:
                if isinstance(logger, CSVLogger):
                    logger.log_hyperparams({"result": line})

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for the result of a resumed run."""
        return {name: getattr(self, f"_{name}") for name in KEPT} | {"earlier": self._seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self, f"_{name}", value)


def peak_memory(device: torch.device) -> float:
    """Returns peak memory in bytes: allocated by PyTorch on a CUDA device, otherwise resident in this process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # Linux counts in KiB


class EvaluateFirst(Callback):
    """Evaluates once before training on all evaluation prompts and logs `eval/*` at step -1.

    Extends Lightning's sanity check to the whole evaluation set and logs its metrics, which Lightning discards. Resumed
    runs skip it. `CompletionLogger` logs its samples, and `lightrl report` plots it at rollout 0.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.num_sanity_val_steps = float("inf") if trainer.ckpt_path is None else 0

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval/")}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=-1)
            logger.save()

"""Speed and memory of each rollout, and an evaluation before the first."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

IN_PROGRESS_BAR = {"reward/mean": "reward", "kl/ref": "kl"}


class ThroughputMonitor(Callback):
    """Logs how fast a rollout went from prompts to updated weights, and shows reward, KL and tokens/s in the bar.

    Per rollout, with t the wall time from the end of the previous rollout's update to the end of this one's:

    - `time/step` = t in seconds: generation, scoring, experience, update, and callbacks, without evaluation. The first
      includes the start of the engine.
    - `throughput/tokens_per_second` = prompt and completion tokens of the rollout over all ranks / t. Each token counts
      once, padding never.
    - `throughput/samples_per_second` = completions of the rollout over all ranks / t.
    - `throughput/peak_memory_gb` = maximum over ranks in 10^9 bytes since the start: memory that PyTorch allocated on
      the GPU, or on a CPU the resident memory of this process. It excludes an engine in a separate process.

    With `SFTLightningModule` a batch takes the place of a rollout. Batches without an `attention_mask` are skipped. The
    command line adds it to every run; `--without=[ThroughputMonitor]` leaves it out.

    Args:
        progress_bar: Whether `reward`, `kl` and `tok/s` are in the progress bar.
    """

    def __init__(self, progress_bar: bool = True) -> None:
        self.progress_bar = progress_bar
        self._start = 0.0
        self._paused = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock; the first rollout is generated after this."""
        self._start = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restarts the clock."""
        self._start += time.perf_counter() - self._paused

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the rollout."""
        now = time.perf_counter()
        seconds, self._start = max(now - self._start, 1e-9), now
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else getattr(batch, "attention_mask", None)
        if mask is None:
            return
        counts = torch.tensor([float(mask.sum()), float(len(mask))], device=pl_module.device)
        tokens, samples = _reduce(trainer, counts, "sum").tolist()
        peak = _reduce(trainer, torch.tensor(peak_memory(pl_module.device), device=pl_module.device), "max")
        metrics = {
            "time/step": seconds,
            "throughput/tokens_per_second": tokens / seconds,
            "throughput/samples_per_second": samples / seconds,
            "throughput/peak_memory_gb": float(peak) / 1e9,
        }
        pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=len(mask))
        if self.progress_bar:
            results = outputs if isinstance(outputs, Mapping) else {}
            shown = {short: results[name] for name, short in IN_PROGRESS_BAR.items() if name in results}
            shown["tok/s"] = round(tokens / seconds)
            # Loggers have these numbers under their full names already.
            pl_module.log_dict(shown, on_step=True, on_epoch=False, prog_bar=True, logger=False, batch_size=len(mask))


def _reduce(trainer: Trainer, tensor: Tensor, how: str) -> Tensor:
    return trainer.strategy.reduce(tensor, reduce_op=how)  # type: ignore[arg-type, return-value]


def peak_memory(device: torch.device) -> float:
    """Most bytes so far: allocated by PyTorch on a CUDA device, else resident in this process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # Linux counts in KiB


class EvaluateFirst(Callback):
    """Evaluates once before training, on all evaluation prompts, and logs `eval/*` at step -1.

    It has Lightning's sanity check run over the whole evaluation set and logs the result, which Lightning drops. A
    resumed run has no sanity check. `CompletionLogger` shows its samples, and `lightrl report` draws it at rollout 0.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Requests a sanity check over everything, or none in a resumed run."""
        trainer.num_sanity_val_steps = float("inf") if trainer.ckpt_path is None else 0

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the metrics of the evaluation."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval/")}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=-1)
            logger.save()

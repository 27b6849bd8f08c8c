"""Frees the optimizer's device memory while the engine generates."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn


def on_host(value: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; of CUDA in page-locked memory while there is some, which halves the time of either way."""
    if not value.is_cuda:
        return value.to("cpu")
    try:
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    except RuntimeError as error:
        rank_zero_warn(f"No page-locked memory for what leaves the GPU: copies are slower. CUDA says: {error}")
        return value.to("cpu")
    return host.copy_(value)


class OffloadOptimizer(Callback):
    """Keeps the optimizer's state (for Adam twice the trained weights in float32) in host memory between updates.

    It leaves the device at the end of a rollout's updates, so that generation and the forward passes before the next
    update have its memory, and comes back right before the next step. Together with an engine that sleeps
    (`VLLMEngine.sleep_level`) trainer and engine take turns on one GPU. On CPU there is nothing to free, and nothing is
    moved. Each way copies the state once per rollout.

    Raises:
        ValueError: with DeepSpeed, whose configuration has `offload_optimizer`, and with FSDP2.
    """

    def __init__(self) -> None:
        self._away: list[tuple[dict[Any, Any], str, torch.device]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses strategies whose optimizer state is not the callback's to move."""
        strategy = trainer.strategy
        if isinstance(strategy, (DeepSpeedStrategy, ModelParallelStrategy)):
            raise ValueError(
                f"callback OffloadOptimizer with strategy={type(strategy).__name__}: it shards the optimizer's state "
                "itself. Remove the callback; DeepSpeed's own configuration has `offload_optimizer: true`."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves the state to the host."""
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                        self._away.append((state, name, value.device))
                        state[name] = on_host(value)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Moves it back to the device."""
        away, self._away = self._away, []
        for state, name, device in away:
            state[name] = state[name].to(device, non_blocking=True)

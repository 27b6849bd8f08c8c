"""Frees device memory while the engine generates: of the optimizer, and of models that sampling does not need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightrl.algorithms.hooks import RLCallback
from lightrl.records import Experience
from lightrl.rollout.datamodule import RolloutDataModule

Role = Literal["reference", "critic", "reward_models", "teachers"]
ROLES: tuple[Role, ...] = ("reference", "critic", "reward_models", "teachers")


def on_host(value: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; from CUDA in page-locked memory if available, which halves the time."""
    if not value.is_cuda:
        return value.to("cpu")
    try:
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    except RuntimeError as error:
        rank_zero_warn(f"No page-locked memory is left, so copies from the GPU are slower: {error}")
        return value.to("cpu")
    return host.copy_(value)


class OffloadOptimizer(Callback):
    """Keeps the optimizer's state (for Adam twice the trained weights in float32) in host memory between updates.

    It leaves the device after a rollout's updates and returns right before the next step, which frees its memory for
    generation and forward passes. With an engine that sleeps (`VLLMEngine.sleep_level`) trainer and engine take turns
    on one GPU. Each way copies the state once per rollout. On a CPU nothing moves.

    Raises:
        ValueError: with DeepSpeed, whose configuration has `offload_optimizer`, and with FSDP2.
    """

    def __init__(self) -> None:
        self._away: list[tuple[dict[Any, Any], str, torch.device]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Rejects strategies that shard the optimizer's state."""
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


class OffloadModels(RLCallback):
    """Keeps reference, critic, reward models and teachers in host memory while the engine generates.

    They return once a rollout is sampled. Frozen ones leave when its experience is made, the critic after the last
    update. In evaluation and prediction reward models return for each batch. With `OffloadOptimizer` and an engine that
    sleeps (`VLLMEngine.sleep_level`) only the actor stays on the device during generation. No number changes. Each way
    copies the models once per rollout. An override of `compute_loss` that calls the reference finds it on the host:
    call it in `evaluate_models`.

    Args:
        models: Models to move, if they are separate models.

    Raises:
        ValueError: The module has none of them; DeepSpeed or FSDP2 shards the models; a schedule learns while the
            engine samples; a critic with DDP, which would not see its gradients.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, models: Sequence[Role] = ROLES) -> None:
        unknown = sorted(set(models) - set(ROLES))
        if unknown or not models:
            raise ValueError(f"OffloadModels.models={list(models)}: name some of {', '.join(ROLES)}.")
        self.models = tuple(models)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Rejects strategies and schedules that need the models on the device all the time."""
        super().setup(trainer, pl_module, stage)
        strategy, data = trainer.strategy, trainer.datamodule  # type: ignore[attr-defined]
        name = type(strategy).__name__
        if isinstance(strategy, (DeepSpeedStrategy, ModelParallelStrategy)):
            raise ValueError(
                f"callback OffloadModels with strategy={name}: it shards the models itself. Remove the callback; "
                "FSDP2Strategy has `cpu_offload`, DeepSpeed's configuration `offload_parameters`."
            )
        if isinstance(data, RolloutDataModule) and data.schedule.max_staleness:
            raise ValueError(
                f"callback OffloadModels with schedule={type(data.schedule).__name__}: the engine samples while the "
                "module learns, so the models are needed all the time. Remove one of the two."
            )
        critic = getattr(pl_module, "critic_spec", None)
        own_critic = critic is not None and not critic.shared
        if isinstance(strategy, DDPStrategy) and "critic" in self.models and own_critic:
            others = [role for role in self.models if role != "critic"]
            raise ValueError(
                f"callback OffloadModels with strategy={name}: DDP reduces the gradients of tensors that stay where "
                f"they are, so the critic cannot move. Give models={others}, or a shared critic."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Rejects a module without such models, which are built by now."""
        if not any(True for _ in self._models(pl_module, self.models)):
            raise ValueError(
                f"callback OffloadModels: {type(pl_module).__name__} has no {', '.join(self.models)} to "
                "move. Remove the callback."
            )

    def _models(self, module: Any, roles: Sequence[str]) -> Any:
        found = (getattr(module, role, None) for role in roles if role in self.models)
        return (model for model in found if isinstance(model, nn.Module) and any(True for _ in model.parameters()))

    def _leave(self, module: Any, roles: Sequence[str]) -> None:
        with torch.inference_mode(False):  # else their weights could never be trained again
            for model in self._models(module, roles):
                for tensor in chain(model.parameters(), model.buffers()):
                    if tensor.is_cuda:
                        tensor.data = on_host(tensor.data)
                model.to("cpu")

    def _return(self, module: Any, roles: Sequence[str]) -> None:
        with torch.inference_mode(False):
            for model in self._models(module, roles):
                model.to(module.device, non_blocking=True)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Moves them to the host before the first rollout is sampled."""
        self._leave(pl_module, ROLES)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Moves them back to the device: the rollout is complete."""
        self._return(pl_module, ROLES)

    def on_experience_made(self, trainer: Trainer, pl_module: Any, experience: Experience) -> None:
        """Moves the frozen ones to the host, which updates do not need."""
        self._leave(pl_module, [role for role in ROLES if role != "critic"])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Moves the critic after them."""
        self._leave(pl_module, ROLES)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Moves all of them to the host before prompts are sampled."""
        self._leave(pl_module, ROLES)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Brings reward models for one batch."""
        self._return(pl_module, ["reward_models"])

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Moves them back to the host."""
        self._leave(pl_module, ["reward_models"])

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

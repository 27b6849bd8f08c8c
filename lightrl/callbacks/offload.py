"""Offloads the optimizer and unused models to the CPU during generation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch import nn

from lightrl.records import Experience
from lightrl.rollout.learner import RLCallback

Role = Literal["reference", "critic", "reward_models", "teachers"]
ROLES: tuple[Role, ...] = ("reference", "critic", "reward_models", "teachers")


def on_host(value: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to the CPU, into pinned memory if available, which halves the time."""
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=torch.cuda.is_available())
    return host.copy_(value)


class OffloadOptimizer(Callback):
    """Offloads the optimizer state to CPU memory between updates.

    For Adam, the state is twice the trained weights in float32. It moves to the CPU after a rollout's updates and back
    before the next step, which frees GPU memory for generation and forward passes. Combine it with
    `VLLMEngine.sleep_level` to share one GPU between trainer and engine. The state is copied twice per rollout. Has no
    effect on a CPU.

    Raises:
        ValueError: With DeepSpeed, whose config has `offload_optimizer`, and with FSDP2.
    """

    def __init__(self) -> None:
        self._away: list[tuple[dict[Any, Any], str, torch.device]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, (DeepSpeedStrategy, ModelParallelStrategy)):
            raise ValueError(
                f"callback OffloadOptimizer with strategy={type(strategy).__name__}: the strategy shards the optimizer "
                "state. Remove the callback, or set `offload_optimizer: true` in DeepSpeed's config."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                        self._away.append((state, name, value.device))
                        state[name] = on_host(value)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        away, self._away = self._away, []
        for state, name, device in away:
            state[name] = state[name].to(device, non_blocking=True)


class OffloadModels(RLCallback):
    """Offloads reference, critic, reward models, and teachers to CPU memory during generation.

    Models return to the GPU once a rollout is sampled. Frozen models are offloaded again before the updates, and the
    critic after them. In evaluation and prediction, reward models return for each batch. With `OffloadOptimizer` and
    `VLLMEngine.sleep_level`, only the actor stays on the GPU during generation. The models are copied twice per
    rollout. Results don't change. If you override `compute_loss`, call the reference in `evaluate_models` instead,
    because it is offloaded during updates.

    Args:
        models: Models to offload, if they are separate models.

    Raises:
        ValueError: If DeepSpeed or FSDP2 shards the models, or a critic is used with DDP, which requires its parameters
            in place.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, models: Sequence[Role] = ROLES) -> None:
        self.models = tuple(models)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        strategy = trainer.strategy
        name = type(strategy).__name__
        if isinstance(strategy, (DeepSpeedStrategy, ModelParallelStrategy)):
            raise ValueError(
                f"callback OffloadModels with strategy={name}: the strategy shards the models. Remove the callback, or "
                "use `cpu_offload` of FSDP2Strategy or `offload_parameters` in DeepSpeed's config."
            )
        critic = getattr(pl_module, "critic_spec", None)
        own_critic = critic is not None and not critic.shared
        if isinstance(strategy, DDPStrategy) and "critic" in self.models and own_critic:
            others = [role for role in self.models if role != "critic"]
            raise ValueError(
                f"callback OffloadModels with strategy={name}: DDP does not support offloading the critic. Set "
                f"models={others}, or use a shared critic."
            )

    def _models(self, module: Any, roles: Sequence[str]) -> Any:
        found = (getattr(module, role, None) for role in roles if role in self.models)
        return (model for model in found if isinstance(model, nn.Module) and any(True for _ in model.parameters()))

    def _leave(self, module: Any, roles: Sequence[str]) -> None:
        with torch.inference_mode(False):  # inference tensors can't be trained
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
        """Offloads all models before the first rollout, and before evaluation."""
        self._leave(pl_module, ROLES)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._return(pl_module, ROLES)

    def on_experience_made(self, trainer: Trainer, pl_module: Any, experience: Experience) -> None:
        """Offloads the frozen models, which updates don't need."""
        self._leave(pl_module, [role for role in ROLES if role != "critic"])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._leave(pl_module, ROLES)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._return(pl_module, ["reward_models"])

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._leave(pl_module, ["reward_models"])

    on_validation_start = on_test_start = on_predict_start = on_train_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

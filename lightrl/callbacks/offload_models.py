"""Frees the device memory of models that sampling does not need while the engine generates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch import nn

from lightrl.algorithms.hooks import RLCallback
from lightrl.callbacks.offload_optimizer import on_host
from lightrl.records import Experience
from lightrl.rollout.datamodule import RolloutDataModule

Role = Literal["reference", "critic", "reward_models", "teachers"]
ROLES: tuple[Role, ...] = ("reference", "critic", "reward_models", "teachers")


class OffloadModels(RLCallback):
    """Keeps reference, critic, reward models and teachers in host memory while the engine generates.

    They come back once a rollout has been sampled. Frozen ones leave again as soon as its experience is made, so that
    the updates have their memory, too; the critic leaves after the last update. In evaluation and prediction reward
    models come for each batch that was sampled. With `OffloadOptimizer` and an engine that sleeps
    (`VLLMEngine.sleep_level`) only the actor stays on the device while tokens are sampled. No number changes. Each way
    copies the models once per rollout; on CPU there is nothing to free, and nothing is moved. An override of
    `compute_loss` that calls the reference finds it on the host: call it in `evaluate_models`.

    Args:
        models: which of them are moved, where the module has them as models of their own.

    Raises:
        ValueError: the module has none of them; with DeepSpeed and FSDP2, which shard models themselves; with
            `staleness`, which learns while the engine samples; a critic with DDP, which would no longer
            see its gradients.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, models: Sequence[Role] = ROLES) -> None:
        unknown = sorted(set(models) - set(ROLES))
        if unknown or not models:
            raise ValueError(f"OffloadModels.models={list(models)}: name some of {', '.join(ROLES)}.")
        self.models = tuple(models)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuses strategies and sources that need the models on the device all the time."""
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
        """Refuses a module without such models, which were built by now."""
        if not any(True for _ in self._models(pl_module, self.models)):
            raise ValueError(
                f"callback OffloadModels: {type(pl_module).__name__} has no {', '.join(self.models)} of its own to "
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

    # ---- training ----------------------------------------------------------------------------------------------

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

    # ---- evaluation and prediction -----------------------------------------------------------------------------

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

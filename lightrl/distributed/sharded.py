"""FSDP2 and DeepSpeed ZeRO: loading, gradients, and parameters of which ranks hold parts.

FSDP2 has a switch for the reduction of gradients, and DeepSpeed ZeRO silently loses gradients unless the reduction is
coalesced.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn

from lightrl.distributed.strategies import Gradients, is_partitioned

LARGE_MODEL = 3_000_000_000
"""Number of parameters above which each rank can't hold all gradients."""


def keep_zero3_config(strategy: Strategy) -> Any:
    """Makes transformers partition parameters for ZeRO-3 while loading, as long as the result is referenced.

    Keep it in a local variable only while building models: an engine that later loads a model in this process needs it
    unpartitioned.
    """
    if not (isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3):
        return None
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(strategy.config)


def shards_parameters(strategy: Strategy) -> bool:
    """Whether each rank holds only parts of parameters: under FSDP2 and ZeRO-3."""
    return isinstance(strategy, ModelParallelStrategy) or bool(
        isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3
    )


def shard_model(model: nn.Module, layers: Iterable[nn.Module], module: Any) -> None:
    """Shards one model with FSDP2, one unit per transformer block in `layers`.

    `model` is always called through `forward` and becomes the FSDP2 root. `module` has the strategy's `device_mesh`.
    """
    from torch.distributed.fsdp import fully_shard

    options = {"mesh": module.device_mesh["data_parallel"], **getattr(module.trainer.strategy, "shard_options", {})}
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, reshard_after_forward=True, **options)


def set_gradient_clipping(strategy: DeepSpeedStrategy, max_norm: float | None) -> None:
    """Passes the maximum gradient norm to DeepSpeed, which clips inside `step`."""
    if strategy.config is not None:
        strategy.config["gradient_clipping"] = 0.0 if max_norm is None else max_norm


class FSDP2Gradients(Gradients):
    """Gradients under FSDP2. Until the last backward pass, every rank holds all of them, unless each pass reduces."""

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        for model in self.models:
            model.set_requires_gradient_sync(last or self.reduces_always(model))  # type: ignore[operator]
        return nullcontext()

    def reduces_always(self, model: nn.Module) -> bool:
        """Whether each backward pass reduces the gradients of a model."""
        asked: bool | None = getattr(self.strategy, "reduce_every_micro_batch", None)
        if asked is not None:
            return asked
        sizes = (int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())  # ZeRO-3 empties p
        return sum(sizes) > LARGE_MODEL


class ZeROGradients(FSDP2Gradients):
    """Gradients under DeepSpeed, which sees all models as one. ZeRO-1 doesn't shard gradients."""

    def window(self) -> AbstractContextManager[None]:
        if self._stage() and not self._always():
            return self.strategy.deepspeed_engine.coalesce_grad_reduction()  # type: ignore[no-any-return]
        return nullcontext()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        if self._always():
            from lightrl.compat.deepspeed import begin_backward

            begin_backward(self.strategy.deepspeed_engine, last=last)
        return nullcontext()

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float | None, scale: float = 1.0) -> Tensor | None:
        """Returns None: DeepSpeed clips inside `step`. See `set_gradient_clipping`."""
        return None

    def after_step(self, norm: Tensor | None) -> tuple[Tensor | None, bool]:
        """Returns what DeepSpeed knows only after the step. It skips non-finite gradients on all ranks."""
        engine = self.strategy.deepspeed_engine
        known = engine.get_global_grad_norm()  # None without ZeRO
        norm = None if known is None else torch.as_tensor(float(known))
        return norm, bool(getattr(engine.optimizer, "overflow", False))

    def discard(self) -> None:
        """Discards gradients that ZeRO has already reduced."""
        from lightrl.compat.deepspeed import discard_reduced_gradients

        discard_reduced_gradients(self.strategy.deepspeed_engine.optimizer)

    def _stage(self) -> int:
        return int((self.strategy.config or {}).get("zero_optimization", {}).get("stage", 0))

    def _always(self) -> bool:
        return self._stage() >= 2 and any(self.reduces_always(model) for model in self.models)


@torch.no_grad()
def blend_parameter(parameter: Any, full: Tensor, weight: float) -> None:
    """Blends a full tensor into a possibly sharded parameter: `p = weight * full + (1 - weight) * p`. Collective."""
    if is_partitioned(parameter):
        from lightrl.compat.deepspeed import gathered

        with gathered(parameter, write=True):
            parameter.data.lerp_(full.to(parameter), weight)
        return
    target = parameter.detach()
    if hasattr(parameter, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        full = distribute_tensor(full.to(target), parameter.device_mesh, parameter.placements)
        target.mul_(1 - weight).add_(full, alpha=weight)
    else:
        target.lerp_(full.to(target), weight)


def is_sharded(parameter: Any) -> bool:
    """Whether ranks hold different parts of a parameter (FSDP2, ZeRO-3)."""
    return hasattr(parameter, "full_tensor") or is_partitioned(parameter)

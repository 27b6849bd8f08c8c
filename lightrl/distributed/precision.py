"""Precision: unsupported combinations, what half precision must not round, and float16's loss scale."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, HalfPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn

from lightrl.compat.lightning_checkpoints import tensor_parallel_size
from lightrl.records import Rollouts


def keep_exact(plugin: Any) -> None:
    """Stops bf16-true and DeepSpeed from rounding rewards, log-probs, a step's new tensors, and rotary factors.

    They convert only parameters and media. Engines keep rotary factors in float32.
    """
    kind: Any = type(plugin)
    if issubclass(kind, HalfPrecision | DeepSpeedPrecision):
        plugin.forward_context = nullcontext
        plugin.convert_input = partial(_convert_media, partial(kind.convert_input, plugin))
        plugin.convert_module = partial(_convert_parameters, partial(kind.convert_module, plugin))


def _convert_parameters(convert: Callable[[Any], Any], module: nn.Module) -> nn.Module:
    buffers = [(part, name, buffer) for part in module.modules() for name, buffer in part.named_buffers(recurse=False)]
    convert(module)
    for part, name, buffer in buffers:
        setattr(part, name, buffer)
    return module


def _convert_media(convert: Callable[[Any], Any], batch: Any) -> Any:
    if isinstance(batch, Rollouts):
        once = {id(inputs): convert(inputs) for inputs in batch.inputs}  # rows of a group share one object
        return replace(batch, inputs=[once[id(x)] for x in batch.inputs], supervised=convert(batch.supervised))
    return batch | {"inputs": convert(batch["inputs"])} if isinstance(batch, dict) and "inputs" in batch else batch


def refuse_unsupported(strategy: Strategy, precision: str) -> None:
    """Raises a ValueError for FSDP1, tensor parallelism, float16 weights without DeepSpeed, and float16 under FSDP2.

    FSDP1's whole-module wrapping fails with manual optimization. Under FSDP2, only one rank would detect an overflow.
    """
    if isinstance(strategy, FSDPStrategy):
        raise ValueError(
            "strategy=fsdp (FSDPStrategy, FSDP1): its backward runs inside the wrapped module's forward, which manual "
            "optimization doesn't support. Use FSDP2Strategy (--config lightrl:strategies/fsdp2)."
        )
    if isinstance(strategy, ModelParallelStrategy) and tensor_parallel_size(strategy) != 1:
        raise ValueError(
            f"ModelParallelStrategy.tensor_parallel_size={tensor_parallel_size(strategy)} (auto: all devices): tensor "
            "parallelism is not supported. Use lightrl.distributed.FSDP2Strategy, or set data_parallel_size to the "
            "number of ranks and tensor_parallel_size to 1."
        )
    if precision.startswith("16") and not isinstance(strategy, DeepSpeedStrategy):
        sharded = isinstance(strategy, ModelParallelStrategy)
        if precision != "16-mixed" or sharded:
            raise ValueError(
                f"precision={precision}{' with FSDP2' if sharded else ''}: float16 loss scaling is supported only on "
                "one device with 16-mixed, under DDP with 16-mixed, and under DeepSpeed. Use one of these, bf16-mixed, "
                "bf16-true, or 32-true."
            )


def lower_scale(scaler: torch.amp.GradScaler) -> None:
    """Lowers the scale (by `backoff_factor`) after non-finite gradients, and resets the growth counter.

    `GradScaler.update` would do so only on ranks whose own gradients overflowed.
    """
    state = scaler.state_dict()
    scaler.load_state_dict({**state, "scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0})

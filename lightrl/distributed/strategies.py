"""What differs between Lightning's strategies in manual optimisation, in one place.

Everything here was needed because several backwards belong to one optimizer step: DDP must hold its reduction back
until the last one, FSDP2 has a switch for it, DeepSpeed ZeRO loses gradients silently unless its reduction is
coalesced over the window. Modules call these functions and stay free of strategy names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn

from lightrl.compat.deepspeed import begin_backward, discard_reduced_gradients, gathered, is_partitioned, local_part
from lightrl.compat.lightning import tensor_parallel_size


def refuse_unsupported(strategy: Strategy, precision: str = "32-true") -> None:
    """Refuses, before a model is loaded, what would train wrongly.

    Args:
        strategy: the trainer's.
        precision: the trainer's, of modules that optimise manually; Lightning's own loop scales float16 losses right.

    Raises:
        ValueError: a crowd of processes on a CPU; FSDP1, whose whole-module wrapping breaks under manual optimisation;
            tensor parallelism; float16 weights without DeepSpeed; float16 autocast under FSDP2, whose overflows one
            rank alone would see.
    """
    refuse_crowd(strategy)
    if isinstance(strategy, FSDPStrategy):
        raise ValueError(
            "strategy=fsdp (FSDPStrategy, FSDP1): its backward runs inside the wrapped module's forward, which manual "
            "optimisation cannot do. Use FSDP2: configs/strategies/fsdp2.yaml (FSDP2Strategy)."
        )
    if isinstance(strategy, ModelParallelStrategy) and tensor_parallel_size(strategy) != 1:
        raise ValueError(
            f"ModelParallelStrategy.tensor_parallel_size={tensor_parallel_size(strategy)} (auto: all devices): layers "
            "are not split over ranks here, which would train apart. Use lightrl.distributed.FSDP2Strategy, or set "
            "data_parallel_size to the number of ranks and tensor_parallel_size to 1."
        )
    if precision.startswith("16") and not isinstance(strategy, DeepSpeedStrategy):
        sharded = isinstance(strategy, ModelParallelStrategy)
        if precision != "16-mixed" or sharded:
            raise ValueError(
                f"precision={precision}{' with FSDP2' if sharded else ''}: losses are scaled with 16-mixed on one "
                "device and under DDP only, and by DeepSpeed in its own engine. Use one of these, bf16-mixed, "
                "bf16-true or 32-true."
            )


def refuse_crowd(strategy: Strategy) -> None:
    """Raises a ValueError where a CPU would get more processes than it can do anything with, a model in each."""
    cores = os.cpu_count() or 1
    most = max(16, 4 * cores)  # trials of a few ranks pass on any machine
    processes = getattr(strategy, "num_processes", 1)
    if isinstance(strategy.accelerator, CPUAccelerator) and processes > most:
        raise ValueError(
            f"trainer.devices={processes} on the CPU: that many processes would share {cores} cores, each with a model "
            f"of its own. Give 1, or at most {most}."
        )


def keep_zero3_config(strategy: Strategy) -> Any:
    """Tells transformers that ZeRO-3 partitions parameters while they load, for as long as the result is referenced.

    The caller keeps it in a local variable while it builds its models and no longer: an engine that loads a model of
    its own in this process afterwards needs it whole.
    """
    if not (isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3):
        return None
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(strategy.config)


def shards_parameters(strategy: Strategy) -> bool:
    """Whether a rank holds parts of parameters only: under FSDP2 and ZeRO-3."""
    return isinstance(strategy, ModelParallelStrategy) or bool(
        isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3
    )


def shard_model(model: nn.Module, layers: Iterable[nn.Module], module: Any) -> None:
    """Shards one model with FSDP2, each transformer block its own unit; does nothing under other strategies.

    Args:
        model: wrapper whose `forward` is the only entrance; becomes the FSDP2 root.
        layers: its transformer blocks.
        module: the LightningModule (its `device_mesh` is the strategy's).
    """
    if not isinstance(module.trainer.strategy, ModelParallelStrategy):
        return
    from torch.distributed.fsdp import fully_shard

    options = {"mesh": module.device_mesh["data_parallel"], **getattr(module.trainer.strategy, "shard_options", {})}
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, reshard_after_forward=True, **options)


def context_group(strategy: Strategy) -> Any:
    """The process group whose ranks run their rows as one stream of tokens, or None. Collective where there are any."""
    return getattr(strategy, "context_group", None)


def loads_in_shards(strategy: Strategy) -> bool:
    """Whether each rank reads the parts of weights that it keeps, and none reads a model whole: FSDP2."""
    return isinstance(strategy, ModelParallelStrategy)


def shard_device(strategy: Strategy) -> torch.device:
    """Where a rank's parts of weights are."""
    offloaded = getattr(strategy, "cpu_offload", False)
    return torch.device("cpu") if offloaded else strategy.root_device


def optimizer_window(strategy: Strategy, models: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """The context of all backwards of one optimizer step, through the trained `models`."""
    if isinstance(strategy, DeepSpeedStrategy) and _zero_stage(strategy) and not _zero_reduces_always(strategy, models):
        return strategy.deepspeed_engine.coalesce_grad_reduction()  # type: ignore[no-any-return]
    return nullcontext()


@contextmanager
def backward_scope(strategy: Strategy, models: Iterable[Any], *, last: bool) -> Iterator[None]:
    """The context of one micro-batch: gradients are reduced over ranks in the last one only.

    Under FSDP2 and ZeRO-2 and 3 they are whole on every rank until then, unless the strategy reduces in each.
    """
    if isinstance(strategy, DeepSpeedStrategy):  # a DDPStrategy by inheritance, so asked first
        if _zero_reduces_always(strategy, models):
            begin_backward(strategy.deepspeed_engine, last=last)
        yield
    elif isinstance(strategy, ModelParallelStrategy):
        for model in models:
            model.set_requires_gradient_sync(last or _reduces_always(strategy, model))
        yield
    elif isinstance(strategy, DDPStrategy) and not last:
        with strategy.block_backward_sync():
            yield
    else:
        yield


LARGE_MODEL = 3_000_000_000
"""Parameters from which on whole gradients are too much for each rank."""


def _reduces_always(strategy: Strategy, model: nn.Module) -> bool:
    asked: bool | None = getattr(strategy, "reduce_every_micro_batch", None)
    if asked is not None:
        return asked
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters()) > LARGE_MODEL  # ZeRO-3 empties p


def _zero_stage(strategy: DeepSpeedStrategy) -> int:
    return int((strategy.config or {}).get("zero_optimization", {}).get("stage", 0))


def _zero_reduces_always(strategy: DeepSpeedStrategy, models: Iterable[nn.Module]) -> bool:
    """Whether every backward reduces; all models are one to DeepSpeed. ZeRO-1 does not shard gradients."""
    return _zero_stage(strategy) >= 2 and any(_reduces_always(strategy, model) for model in models)


def loss_scaler(precision: Precision) -> torch.amp.GradScaler | None:
    """What multiplies losses before their backward, so that float16 gradients do not vanish; None without one."""
    return precision.scaler if isinstance(precision, MixedPrecision) else None


def lower_scale(scaler: torch.amp.GradScaler) -> None:
    """Halves the scale (by `backoff_factor`) after gradients that were not finite, and restarts the count.

    `GradScaler.update` would do so on the ranks only whose own gradients overflowed.
    """
    state = scaler.state_dict()
    scaler.load_state_dict({**state, "scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0})


def clip_gradients(
    strategy: Strategy, parameters: Iterable[nn.Parameter], max_norm: float | None, scale: float = 1.0
) -> Tensor | None:
    """Clips the joint gradient norm of all parameters.

    Args:
        strategy: the trainer's.
        parameters: with gradients.
        max_norm: bound on the norm; None is off.
        scale: what the losses were multiplied by. The gradients stay so, until the step undoes it.

    Returns:
        the norm before clipping, float32 scalar, the same on every rank; None under DeepSpeed, which clips by its own
        configuration inside `step`.
    """
    if isinstance(strategy, DeepSpeedStrategy):
        return None
    norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm * scale)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).detach().float() / scale


def after_step(strategy: Strategy, norm: Tensor | None) -> tuple[Tensor | None, bool]:
    """The gradient norm before clipping, and whether the step was not taken after all.

    DeepSpeed knows either only now: it steps over gradients that are not finite, on all ranks together.
    """
    if not isinstance(strategy, DeepSpeedStrategy):
        return norm, False
    engine = strategy.deepspeed_engine
    known = engine.get_global_grad_norm()  # none without ZeRO
    norm = None if known is None else torch.as_tensor(float(known))
    return norm, bool(getattr(engine.optimizer, "overflow", False))


def discard_gradients(strategy: Strategy) -> None:
    """Forgets what DeepSpeed ZeRO has reduced already, and would add the next gradients to; `zero_grad` keeps it."""
    if isinstance(strategy, DeepSpeedStrategy):
        discard_reduced_gradients(strategy.deepspeed_engine.optimizer)


def set_gradient_clipping(strategy: Strategy, max_norm: float | None) -> None:
    """Hands the gradient bound to DeepSpeed, which clips by its own configuration; nothing for other strategies."""
    if isinstance(strategy, DeepSpeedStrategy) and strategy.config is not None:
        strategy.config["gradient_clipping"] = 0.0 if max_norm is None else max_norm


@contextmanager
def frozen_group(optimizer: Any, name: str) -> Iterator[None]:
    """Keeps one named parameter group still during a step.

    By a learning rate of 0 (which stops decoupled weight decay too), because DeepSpeed steps every parameter.
    """
    groups = [group for group in optimizer.param_groups if group.get("name") == name]
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def gather_parameter(strategy: Strategy) -> Callable[[Tensor], AbstractContextManager[Tensor]]:
    """A function that gives a context manager around the full tensor of a possibly sharded parameter.

    Collective under FSDP2 and ZeRO-3: every rank must gather the same parameters in the same order.
    """

    @contextmanager
    def full(parameter: Tensor) -> Iterator[Tensor]:
        if isinstance(strategy, DeepSpeedStrategy) and is_partitioned(parameter):
            with gathered(parameter):
                yield parameter.detach()
        elif hasattr(parameter, "full_tensor"):
            yield parameter.full_tensor().detach()
        else:
            yield parameter.detach()

    return full


@torch.no_grad()
def blend_parameter(parameter: Any, full: Tensor, weight: float) -> None:
    """Moves a possibly sharded parameter towards a full tensor: `p = weight * full + (1 - weight) * p`. Collective."""
    if is_partitioned(parameter):
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


def local_shard(parameter: Any) -> Tensor:
    """What this rank holds of a possibly sharded parameter; writing to it writes to the parameter."""
    if is_partitioned(parameter):
        return local_part(parameter)
    return parameter.detach().to_local() if hasattr(parameter, "full_tensor") else parameter.detach()


def all_sum(strategy: Strategy, tensor: Tensor) -> Tensor:
    """Sum of a tensor over ranks, on every rank."""
    return _all_reduce(strategy, tensor, "sum")


def all_max(strategy: Strategy, tensor: Tensor) -> Tensor:
    """Maximum of a tensor over ranks, on every rank."""
    return _all_reduce(strategy, tensor, "max")


def _all_reduce(strategy: Strategy, tensor: Tensor, op: str) -> Tensor:
    if not has_process_group():
        return tensor
    if torch.distributed.get_world_size() == 1 or getattr(strategy, "world_size", 1) == 1:
        return tensor
    moved = tensor.detach().clone().to(strategy.root_device)
    torch.distributed.all_reduce(moved, op=getattr(torch.distributed.ReduceOp, op.upper()))
    return moved.to(tensor.device)


def gather_objects(own: Any, group: Any = None) -> list[Any]:
    """Every rank's object, in the order of the ranks. Collective over the process group, the default one where None."""
    if not has_process_group():
        return [own]
    objects: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(objects, own, group=group)
    return objects


def has_process_group() -> bool:
    """Whether ranks can exchange anything: false in a process of its own."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()

"""Differences between Lightning's strategies in manual optimization, and what ranks share: metrics and seeds.

The differences arise because one optimizer step has several backward passes. DDP must defer its reduction to the last
one, FSDP2 has a switch for it, and DeepSpeed ZeRO silently loses gradients unless the reduction is coalesced. Modules
call these functions, so they don't depend on strategies.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn

from lightrl.compat.lightning import tensor_parallel_size
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


def refuse_unsupported(strategy: Strategy, precision: str = "32-true") -> None:
    """Rejects strategies and precisions that would train incorrectly, before a model is loaded.

    Args:
        strategy: Strategy of the trainer.
        precision: Precision of the trainer, for modules with manual optimization. Lightning's own loop handles float16.

    Raises:
        ValueError: FSDP1 (its whole-module wrapping fails with manual optimization),
            tensor parallelism, float16 weights without DeepSpeed, or float16 autocast under FSDP2 (only one rank would
            detect an overflow).
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
    """Shards one model with FSDP2, one unit per transformer block. No effect under other strategies.

    Args:
        model: Wrapper that is always called through `forward`; becomes the FSDP2 root.
        layers: Transformer blocks of the model.
        module: LightningModule with the strategy's `device_mesh`.
    """
    if not isinstance(module.trainer.strategy, ModelParallelStrategy):
        return
    from torch.distributed.fsdp import fully_shard

    options = {"mesh": module.device_mesh["data_parallel"], **getattr(module.trainer.strategy, "shard_options", {})}
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, reshard_after_forward=True, **options)


def context_group(strategy: Strategy) -> Any:
    """Returns the process group whose ranks share one stream of tokens, or None. Collective if there are any."""
    return getattr(strategy, "context_group", None)


def shard_device(strategy: Strategy) -> torch.device:
    """Returns the device of a rank's shards."""
    offloaded = getattr(strategy, "cpu_offload", False)
    return torch.device("cpu") if offloaded else strategy.root_device


def optimizer_window(strategy: Strategy, models: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Context manager for all backward passes of one optimizer step through the trained `models`."""
    if isinstance(strategy, DeepSpeedStrategy) and _zero_stage(strategy) and not _zero_reduces_always(strategy, models):
        return strategy.deepspeed_engine.coalesce_grad_reduction()  # type: ignore[no-any-return]
    return nullcontext()


@contextmanager
def backward_scope(strategy: Strategy, models: Iterable[Any], *, last: bool) -> Iterator[None]:
    """Context manager for one micro-batch. Gradients are reduced over ranks only in the last one.

    Until then, every rank holds all gradients under FSDP2, ZeRO-2, and ZeRO-3, unless the strategy reduces in each.
    """
    if isinstance(strategy, DeepSpeedStrategy):  # checked first, since it is also a DDPStrategy
        if _zero_reduces_always(strategy, models):
            from lightrl.compat.deepspeed import begin_backward

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
"""Number of parameters above which each rank can't hold all gradients."""


def _reduces_always(strategy: Strategy, model: nn.Module) -> bool:
    asked: bool | None = getattr(strategy, "reduce_every_micro_batch", None)
    if asked is not None:
        return asked
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters()) > LARGE_MODEL  # ZeRO-3 empties p


def _zero_stage(strategy: DeepSpeedStrategy) -> int:
    return int((strategy.config or {}).get("zero_optimization", {}).get("stage", 0))


def _zero_reduces_always(strategy: DeepSpeedStrategy, models: Iterable[nn.Module]) -> bool:
    """Whether every backward pass reduces. DeepSpeed sees all models as one. ZeRO-1 doesn't shard gradients."""
    return _zero_stage(strategy) >= 2 and any(_reduces_always(strategy, model) for model in models)


def loss_scaler(precision: Precision) -> torch.amp.GradScaler | None:
    """Returns the scaler of losses that keeps float16 gradients from vanishing. None without one."""
    return precision.scaler if isinstance(precision, MixedPrecision) else None


def lower_scale(scaler: torch.amp.GradScaler) -> None:
    """Lowers the scale (by `backoff_factor`) after non-finite gradients, and resets the growth counter.

    `GradScaler.update` would do so only on ranks whose own gradients overflowed.
    """
    state = scaler.state_dict()
    scaler.load_state_dict({**state, "scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0})


def clip_gradients(
    strategy: Strategy, parameters: Iterable[nn.Parameter], max_norm: float | None, scale: float = 1.0
) -> Tensor | None:
    """Clips the joint gradient norm of all parameters.

    Args:
        strategy: Strategy of the trainer.
        parameters: Parameters with gradients.
        max_norm: Maximum norm. None disables clipping.
        scale: Loss scale. The gradients stay scaled until the step.

    Returns:
        Norm before clipping as a float32 scalar, the same on every rank. None under DeepSpeed, which clips inside
        `step` according to its own configuration.
    """
    if isinstance(strategy, DeepSpeedStrategy):
        return None
    norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm * scale)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).detach().float() / scale


def after_step(strategy: Strategy, norm: Tensor | None) -> tuple[Tensor | None, bool]:
    """Returns the gradient norm before clipping, and whether the step was skipped.

    DeepSpeed provides both only after the step. It skips steps with non-finite gradients on all ranks.
    """
    if not isinstance(strategy, DeepSpeedStrategy):
        return norm, False
    engine = strategy.deepspeed_engine
    known = engine.get_global_grad_norm()  # None without ZeRO
    norm = None if known is None else torch.as_tensor(float(known))
    return norm, bool(getattr(engine.optimizer, "overflow", False))


def discard_gradients(strategy: Strategy) -> None:
    """Discards gradients that DeepSpeed ZeRO has already reduced, which `zero_grad` doesn't."""
    if isinstance(strategy, DeepSpeedStrategy):
        from lightrl.compat.deepspeed import discard_reduced_gradients

        discard_reduced_gradients(strategy.deepspeed_engine.optimizer)


def set_gradient_clipping(strategy: Strategy, max_norm: float | None) -> None:
    """Passes the maximum gradient norm to DeepSpeed, which clips inside `step`. No effect under other strategies."""
    if isinstance(strategy, DeepSpeedStrategy) and strategy.config is not None:
        strategy.config["gradient_clipping"] = 0.0 if max_norm is None else max_norm


@contextmanager
def frozen_group(optimizer: Any, name: str) -> Iterator[None]:
    """Freezes one named parameter group during a step.

    Sets its learning rate to 0, which also stops decoupled weight decay, because DeepSpeed steps every parameter.
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
    """Returns a function that creates a context manager with the full tensor of a possibly sharded parameter.

    Collective under FSDP2 and ZeRO-3: every rank must gather the same parameters in the same order.
    """

    @contextmanager
    def full(parameter: Tensor) -> Iterator[Tensor]:
        if isinstance(strategy, DeepSpeedStrategy) and is_partitioned(parameter):
            from lightrl.compat.deepspeed import gathered

            with gathered(parameter):
                yield parameter.detach()
        elif hasattr(parameter, "full_tensor"):
            yield parameter.full_tensor().detach()
        else:
            yield parameter.detach()

    return full


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


def is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO-3 has partitioned the parameter."""
    if "deepspeed" not in sys.modules:
        return False
    from lightrl.compat import deepspeed

    return deepspeed.is_partitioned(parameter)


def is_sharded(parameter: Any) -> bool:
    """Whether ranks hold different parts of a parameter (FSDP2, ZeRO-3)."""
    return hasattr(parameter, "full_tensor") or is_partitioned(parameter)


def local_shard(parameter: Any) -> Tensor:
    """Returns this rank's part of a possibly sharded parameter, as a view."""
    if is_partitioned(parameter):
        from lightrl.compat.deepspeed import local_part

        return local_part(parameter)
    return parameter.detach().to_local() if hasattr(parameter, "full_tensor") else parameter.detach()


def all_sum(strategy: Strategy, tensor: Tensor) -> Tensor:
    """Sums a tensor over ranks, on every rank."""
    return _all_reduce(strategy, tensor, "sum")


def all_max(strategy: Strategy, tensor: Tensor) -> Tensor:
    """Returns the maximum of a tensor over ranks, on every rank."""
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
    """Returns every rank's object, in rank order. Collective over the process group; defaults to all ranks."""
    if not has_process_group():
        return [own]
    objects: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(objects, own, group=group)
    return objects


def has_process_group() -> bool:
    """Whether ranks can communicate. False in a single process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


# ---- metrics ----------------------------------------------------------------------------------------------------


class MetricSums:
    """Collects metrics as sums and counts, so that means don't depend on batch splits.

    Names ending in `_max` or `_min` are reduced by maximum or minimum, all others by mean.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, metrics: Mapping[str, Tensor | float], mask: Tensor | None = None) -> None:
        """Adds one micro-batch.

        Args:
            metrics: Metrics by name. (B, T) values are averaged over `mask`, other shapes over all elements.
            mask: (B, T) bool.
        """
        for name, value in metrics.items():
            values = torch.as_tensor(value, dtype=torch.float32).detach().double()
            chosen = mask if mask is not None and values.shape == mask.shape else torch.ones_like(values).bool()
            # No indexing by the mask: the size of the result is known only on the device, so it would synchronize.
            if name.endswith(("_max", "_min")):
                values = -values if name.endswith("_min") else values  # minima are maxima of negated values
                low = values.new_full((1,), -float("inf"))
                top = torch.cat([torch.where(chosen, values, low).reshape(-1), low]).max()
                self._maxima[name] = torch.maximum(self._maxima.get(name, top), top)
            else:
                total = torch.where(chosen, values, 0.0).sum()
                self._sums[name] = self._sums.get(name, torch.zeros_like(total)) + total
                self._counts[name] = self._counts.get(name, torch.zeros_like(total)) + chosen.sum()

    def reduce(
        self, all_sum: Callable[[Tensor], Tensor], all_max: Callable[[Tensor], Tensor], device: torch.device
    ) -> dict[str, float]:
        """Returns means and maxima over all ranks. Collective.

        Ranks may have added different names, such as a reward function that only some examples need. They first agree
        on the union of names.
        """
        known = gather_objects((sorted(self._sums), sorted(self._maxima)))
        out: dict[str, float] = {}
        zero, low = torch.zeros((), dtype=torch.float64), torch.full((), -float("inf"), dtype=torch.float64)
        names = sorted({name for sums, _ in known for name in sums})
        if names:
            pairs = [(self._sums.get(n, zero), self._counts.get(n, zero)) for n in names]
            stacked = torch.stack([torch.stack([total.to(device), count.to(device)]) for total, count in pairs])
            for name, (total, count) in zip(names, all_sum(stacked).tolist(), strict=True):
                if count:
                    out[name] = total / count
        names = sorted({name for _, maxima in known for name in maxima})
        if names:
            stacked = torch.stack([self._maxima.get(n, low).to(device) for n in names])
            tops = zip(names, all_max(stacked).tolist(), strict=True)
            signs = {name: -1.0 if name.endswith("_min") else 1.0 for name in names}
            out.update({name: signs[name] * top for name, top in tops if top > -float("inf")})
        return out


# ---- fingerprints and seeds --------------------------------------------------------------------------------------


@torch.no_grad()
def fingerprint(model: nn.Module | Iterable[nn.Parameter]) -> int:
    """Returns a number that changes with any parameter's value or position, from the bits that this rank holds.

    Unlike tensor version counters, it detects writes through `.data`. Each row's and column's sum is multiplied by its
    index, so swapped values also change it. Reading all weights costs less than copying half of them, and synchronizes
    once per device.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for number, parameter in enumerate(model.parameters() if isinstance(model, nn.Module) else model):
        own = local_shard(parameter).contiguous()
        if not own.numel():
            continue
        rows = own.view(len(own), -1) if own.ndim > 1 else own.view(1, -1)
        whole = rows.shape[1] * rows.element_size() % 8 == 0 and rows.data_ptr() % 8 == 0
        bits = rows.view(torch.int64 if whole else torch.uint8)
        value = sum(_weighed(bits.sum(dim, dtype=torch.int64)) for dim in (0, 1))
        sums.setdefault(own.device, []).append(value * (2 * number + 1))  # type: ignore[arg-type]
    return sum(int(torch.stack(parts).sum()) for parts in sums.values())


def _weighed(sums: Tensor) -> Tensor:
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()


def derived_seed(*numbers: int) -> int:
    """Derives a 56-bit seed from several numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")

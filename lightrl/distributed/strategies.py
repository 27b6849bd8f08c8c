"""What ranks share: gradients, sums, metrics, fingerprints, and seeds.

Strategies differ because one optimizer step has several backward passes. `Gradients` covers one device and DDP,
`sharded.py` FSDP2 and DeepSpeed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn


def check(strategy: Strategy, precision: str = "32-true") -> None:
    """Rejects strategies and, for manual optimization, precisions that would train incorrectly."""
    if not isinstance(strategy, SingleDeviceStrategy) or type(strategy.precision_plugin) is not Precision:
        from lightrl.distributed.precision import refuse_unsupported

        refuse_unsupported(strategy, precision)


def shards(strategy: Strategy) -> bool:
    """Whether the strategy is FSDP2 or DeepSpeed; see `sharded.py`."""
    return isinstance(strategy, ModelParallelStrategy | DeepSpeedStrategy)


class Gradients:
    """Gradients of one optimizer step of the trained models, which has several backward passes."""

    def __init__(self, strategy: Any, models: Iterable[nn.Module]) -> None:
        self.strategy = strategy
        self.models = list(models)

    def window(self) -> AbstractContextManager[None]:
        """Context manager for all backward passes."""
        return nullcontext()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Context manager for one backward pass. Gradients are reduced over ranks only in the last one."""
        if isinstance(self.strategy, DDPStrategy) and not last:
            return self.strategy.block_backward_sync()  # type: ignore[no-any-return]
        return nullcontext()

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float | None, scale: float = 1.0) -> Tensor | None:
        """Clips the joint gradient norm to `max_norm`; None disables clipping.

        Gradients stay multiplied by the loss scale until the step. Returns the norm before clipping as a float32
        scalar, the same on every rank, or None if it is known only after the step.
        """
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm * scale)
        return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).detach().float() / scale

    def after_step(self, norm: Tensor | None) -> tuple[Tensor | None, bool]:
        """Returns the gradient norm before clipping, and whether the strategy has skipped the step."""
        return norm, False

    def discard(self) -> None:
        """Discards gradients that `zero_grad` doesn't."""


@contextmanager
def gathered(parameter: Tensor) -> Iterator[Tensor]:
    """Context manager with the full tensor of a possibly sharded parameter.

    Collective under FSDP2 and ZeRO-3: every rank must gather the same parameters in the same order.
    """
    if is_partitioned(parameter):
        from lightrl.compat import deepspeed

        with deepspeed.gathered(parameter):
            yield parameter.detach()
    else:
        yield (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO-3 has partitioned the parameter."""
    if "deepspeed" not in sys.modules:
        return False
    from lightrl.compat import deepspeed

    return deepspeed.is_partitioned(parameter)


def local_shard(parameter: Any) -> Tensor:
    """Returns this rank's part of a possibly sharded parameter, as a view."""
    if is_partitioned(parameter):
        from lightrl.compat.deepspeed import local_part

        return local_part(parameter)
    return parameter.detach().to_local() if hasattr(parameter, "full_tensor") else parameter.detach()


def all_reduce(strategy: Strategy, tensor: Tensor, op: Literal["sum", "max"]) -> Tensor:
    """Returns the sum or maximum of a tensor over ranks, on every rank."""
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
    objects: list[Any] = [None] * torch.distributed.get_world_size(group)
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
        self._sums: dict[str, Tensor] = {}  # (2,) sum and count
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, metrics: Mapping[str, Tensor | float], mask: Tensor | None = None) -> None:
        """Adds one micro-batch: (B, T) values are averaged over a (B, T) bool mask, other shapes over all elements."""
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
                new = torch.stack([torch.where(chosen, values, 0.0).sum(), chosen.sum(dtype=torch.float64)])
                self._sums[name] = self._sums[name] + new if name in self._sums else new

    def reduce(
        self, all_sum: Callable[[Tensor], Tensor], all_max: Callable[[Tensor], Tensor], device: torch.device
    ) -> dict[str, float]:
        """Returns means and maxima over all ranks. Collective.

        Ranks may have added different names, such as a reward function that only some examples need. They first agree
        on the union of names.
        """
        names = sorted({name for known in gather_objects([*self._sums, *self._maxima]) for name in known})
        tops = [name for name in names if name.endswith(("_max", "_min"))]
        names = [name for name in names if name not in tops]
        out: dict[str, float] = {}
        zero, low = torch.zeros(2, dtype=torch.float64), torch.full((), -float("inf"), dtype=torch.float64)
        if names:
            stacked = torch.stack([self._sums.get(name, zero).to(device) for name in names])
            reduced = zip(names, all_sum(stacked).tolist(), strict=True)
            out |= {name: total / count for name, (total, count) in reduced if count}
        if tops:
            stacked = torch.stack([self._maxima.get(name, low).to(device) for name in tops])
            reduced = zip(tops, all_max(stacked).tolist(), strict=True)
            out |= {name: -top if name.endswith("_min") else top for name, top in reduced if top > -float("inf")}
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

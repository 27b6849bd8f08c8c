"""Private parts of DeepSpeed 0.19 that LightRL relies on; tests/compat/test_deepspeed.py fails when they change.

Importing this file does not import DeepSpeed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from torch import Tensor


@contextmanager
def whole_parameters() -> Iterator[None]:
    """Modules that are built within keep whole parameters, so that initializing them afterwards has an effect.

    Under ZeRO-3 Lightning builds models inside `deepspeed.zero.Init`, which partitions parameters as soon as a
    constructor returns: `nn.init.zeros_(head.bias)` would then write to an empty tensor. DeepSpeed partitions whole
    parameters when training starts. Does nothing elsewhere.
    """
    if "deepspeed" not in sys.modules:
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context

    shutdown_init_context()
    try:
        yield
    finally:
        restore_init_context()


def is_partitioned(parameter: Any) -> bool:
    """Whether ZeRO-3 has partitioned the parameter."""
    return hasattr(parameter, "ds_id")


def gathered(parameter: Any, *, write: bool = False) -> AbstractContextManager[Any]:
    """Within it a parameter of ZeRO-3 is whole; with `write`, what rank 0 writes to it stays, on all ranks."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if write else None)  # type: ignore[no-any-return]


def local_part(parameter: Any) -> Tensor:
    """What this rank holds of a parameter of ZeRO-3."""
    part: Tensor = parameter.ds_tensor.detach()
    return part


def begin_backward(engine: Any, *, last: bool) -> None:
    """Prepares one of several backward passes whose gradients ZeRO-2 or 3 reduces and adds up.

    DeepSpeed does this in its own forward, which a training step that calls the models itself has once only. `last`:
    the optimizer steps after this one.
    """
    engine.optimizer.clear_backward_seen_flag()
    engine.set_gradient_accumulation_boundary(last)


def discard_reduced_gradients(optimizer: Any) -> None:
    """Forgets the gradients that a ZeRO optimizer has reduced; `zero_grad` of Lightning's wrapper keeps them."""
    optimizer.zero_grad()
    optimizer.micro_step_id = 0 if hasattr(optimizer, "fp16_groups") else -1  # of ZeRO-3, and of ZeRO-1 and 2
    for name in ("averaged_gradients", "all_grad_tensors"):
        kept = getattr(optimizer, name, {})
        kept.update(dict.fromkeys(kept))
    if getattr(optimizer, "cpu_offload", False):  # ZeRO-1 and 2
        optimizer.reset_cpu_buffers()


def flat_groups(optimizer: Any, stage: int) -> list[tuple[list[Any], Tensor]]:
    """By parameter group of a ZeRO optimizer: the parameters, and the flat float32 vector of what this rank updates."""
    if stage == 3:
        return list(zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True))
    return list(zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True))


class FlatPart(NamedTuple):
    """Where a part of a parameter lies.

    Attributes:
        offset: in the flat vector.
        start: in the flattened parameter.
        length: number of elements; ZeRO-3 pads the last rank's beyond the parameter's end.
    """

    offset: int
    start: int
    length: int


def flat_part(optimizer: Any, stage: int, parameter: Any, rank: int) -> FlatPart | None:
    """The part of a parameter that this rank updates; None if all of it is other ranks'."""
    if stage == 3:
        _, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return FlatPart(offset, length * rank, length)
    if parameter._hp_mapping is None:
        return None
    ours, theirs = parameter._hp_mapping.get_hp_fragment_address(), parameter._hp_mapping.lp_fragment_address
    return FlatPart(ours.start, theirs.start, theirs.numel)

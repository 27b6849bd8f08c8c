"""Private parts of DeepSpeed 0.19; tests/compat/test_deepspeed.py fails if they change.

Importing this module doesn't import DeepSpeed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from torch import Tensor


@contextmanager
def whole_parameters() -> Iterator[None]:
    """Context manager in which modules are built with unpartitioned parameters, so that initialization works.

    Under ZeRO-3, Lightning builds models inside `deepspeed.zero.Init`, which partitions parameters as soon as a
    constructor returns. `nn.init.zeros_(head.bias)` would then write to an empty tensor. DeepSpeed partitions these
    parameters when training starts. No effect under other strategies.
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
    """Context manager with the full ZeRO-3 parameter. With `write`, rank 0's changes apply to all ranks."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if write else None)  # type: ignore[no-any-return]


def local_part(parameter: Any) -> Tensor:
    """Returns this rank's part of a ZeRO-3 parameter."""
    part: Tensor = parameter.ds_tensor.detach()
    return part


def begin_backward(engine: Any, *, last: bool) -> None:
    """Prepares one of several backward passes whose gradients ZeRO-2 or 3 reduces and accumulates.

    DeepSpeed does this in its own forward, which a training step that calls the models itself runs only once. Set
    `last` if the optimizer steps after this pass.
    """
    engine.optimizer.clear_backward_seen_flag()
    engine.set_gradient_accumulation_boundary(last)


def discard_reduced_gradients(optimizer: Any) -> None:
    """Discards gradients that a ZeRO optimizer has reduced, which `zero_grad` of Lightning's wrapper keeps."""
    optimizer.zero_grad()
    optimizer.micro_step_id = 0 if hasattr(optimizer, "fp16_groups") else -1  # ZeRO-3, else ZeRO-1 and 2
    for name in ("averaged_gradients", "all_grad_tensors"):
        kept = getattr(optimizer, name, {})
        kept.update(dict.fromkeys(kept))
    if getattr(optimizer, "cpu_offload", False):  # ZeRO-1 and 2
        optimizer.reset_cpu_buffers()


def flat_groups(optimizer: Any, stage: int) -> list[tuple[list[Any], Tensor]]:
    """Returns the parameters of each group of a ZeRO optimizer, and the flat float32 vector that this rank updates."""
    if stage == 3:
        return list(zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True))
    return list(zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True))


class FlatPart(NamedTuple):
    """Position of a part of a parameter.

    Attributes:
        offset: Position in the flat vector.
        start: Position in the flattened parameter.
        length: Number of elements. ZeRO-3 pads the last rank's beyond the parameter's end.
    """

    offset: int
    start: int
    length: int


def flat_part(optimizer: Any, stage: int, parameter: Any, rank: int) -> FlatPart | None:
    """Returns the part of a parameter that this rank updates; None if other ranks update all of it."""
    if stage == 3:
        _, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return FlatPart(offset, length * rank, length)
    if parameter._hp_mapping is None:
        return None
    ours, theirs = parameter._hp_mapping.get_hp_fragment_address(), parameter._hp_mapping.lp_fragment_address
    return FlatPart(ours.start, theirs.start, theirs.numel)

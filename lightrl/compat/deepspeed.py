"""Private parts of DeepSpeed 0.19; tests/compat/test_deepspeed.py fails if they change.

Importing this module doesn't import DeepSpeed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor


def skip_unused() -> None:
    """Keeps `save_pretrained` from importing DeepSpeed in runs without it: the import takes seconds and warns."""
    if other := sys.modules.get("accelerate.utils.other"):
        other.is_deepspeed_available = lambda: "deepspeed" in sys.modules  # type: ignore[attr-defined]


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
    """Discards gradients that a ZeRO optimizer has reduced, which `zero_grad` of Lightning's wrapper doesn't clear."""
    optimizer.zero_grad()
    optimizer.micro_step_id = 0 if hasattr(optimizer, "fp16_groups") else -1  # ZeRO-3, else ZeRO-1 and 2
    for name in ("averaged_gradients", "all_grad_tensors"):
        kept = getattr(optimizer, name, {})
        kept.update(dict.fromkeys(kept))
    if getattr(optimizer, "cpu_offload", False):  # ZeRO-1 and 2
        optimizer.reset_cpu_buffers()

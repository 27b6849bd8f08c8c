"""New parameters under DeepSpeed ZeRO-3."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["whole_parameters"]


@contextmanager
def whole_parameters() -> Iterator[None]:
    """Modules that are made within keep whole parameters, so that what initialises them afterwards has an effect.

    Under ZeRO-3 Lightning builds models inside `deepspeed.zero.Init`, which cuts a module's parameters up as soon as
    its constructor returns: `nn.init.zeros_(head.bias)` would then write to an empty tensor, without an error.
    DeepSpeed cuts up what it finds whole when training starts. Does nothing elsewhere.
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

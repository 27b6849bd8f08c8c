"""Strategies, collectives, gradient windows, sharding, random states, and metrics over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrl.distributed.fsdp2 import FSDP2Strategy, ZeROStrategy

__all__ = ["FSDP2Strategy", "ZeROStrategy"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from lightrl.distributed import fsdp2

        return getattr(fsdp2, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Strategies, collectives, gradient windows, sharding, random states, and metrics over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrl.distributed.fsdp2 import FSDP2Strategy

__all__ = ["FSDP2Strategy"]


def __getattr__(name: str) -> Any:
    if name == "FSDP2Strategy":
        from lightrl.distributed.fsdp2 import FSDP2Strategy

        return FSDP2Strategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

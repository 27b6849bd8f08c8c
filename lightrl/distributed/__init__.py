"""Strategies, collectives, gradient windows, sharding, random states, and metrics over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.compat.arguments import lazy_names

if TYPE_CHECKING:
    from lightrl.distributed.fsdp2 import FSDP2Strategy, ZeROStrategy

__all__ = ["FSDP2Strategy", "ZeROStrategy"]

__getattr__ = lazy_names(__name__, ("fsdp2",), __all__)

"""Ranks and strategies: collectives, gradient windows, sharding, random states, metrics over ranks."""

from lightrl.distributed.fsdp2 import FSDP2Strategy

__all__ = ["FSDP2Strategy"]

"""What a plan may be asked for: names that the command line shows before anything heavy loads."""

from __future__ import annotations

from typing import Literal

Precision = Literal["32-true", "bf16-mixed", "bf16-true"]

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
GIB = float(1 << 30)
USABLE = 0.9
"""Share of a GPU's memory that a plan may fill: CUDA's context, NCCL's buffers and fragmentation take the rest."""

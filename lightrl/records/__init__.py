"""Data records exchanged between LightRL's packages.

P prompts have G completions each (a *group*), stored as B rows of at most T tokens. A *trajectory* is the prompt
followed by alternating policy and environment tokens. It is one row, unless its history was rewritten. Then it has
several rows, and each sampled token is trained in exactly one of them. With one turn per prompt, B = P * G.

Users see rectangular `(B, T)` tensors, right-padded and aligned with `token_ids`: entry `t` belongs to token `t`.
Entries without meaning (prompt, padding, log-prob of the first token) are 0, and the mask is False.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrl.records.rollouts import (
    Advantages,
    Experience,
    MicroBatch,
    ModelOutputs,
    Rollouts,
    RowBatch,
    Scores,
    Trajectory,
    TrajectoryRow,
    pad_rows,
    per_row,
    per_token,
)
from lightrl.records.sampling import (
    Completion,
    CompletionGroup,
    EngineContext,
    GenerationRequest,
    Media,
    Prompts,
    SamplingParams,
    StopReason,
)

if TYPE_CHECKING:
    from lightrl.records.conditions import Routes, Support

__all__ = [
    "Advantages",
    "Completion",
    "CompletionGroup",
    "EngineContext",
    "Experience",
    "GenerationRequest",
    "Media",
    "MicroBatch",
    "ModelOutputs",
    "Prompts",
    "Rollouts",
    "Routes",
    "RowBatch",
    "SamplingParams",
    "Scores",
    "StopReason",
    "Support",
    "Trajectory",
    "TrajectoryRow",
    "pad_rows",
    "per_row",
    "per_token",
]


def __getattr__(name: str) -> Any:
    if name in ("Routes", "Support"):  # few runs need them
        from lightrl.records import conditions

        return getattr(conditions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The records that cross LightRL's rooms.

P prompts have G attempts each (a *group*), laid out as B rows of at most T tokens. An attempt is a *trajectory*: the
prompt, then by turns what the policy sampled and what the environment said. It is one row, unless history was rewritten
on the way; then several, each sampled token trained in exactly one of them. With one turn per prompt B = P * G.

Everything a user sees is rectangular: `(B, T)` tensors, right-padded, aligned with `token_ids`. Entry `t` of a
`(B, T)` tensor belongs to token `t`; where it means nothing (prompt, padding, log-prob of the first token) it is 0
and the matching mask is False.
"""

from __future__ import annotations

from lightrl.records.experience import Advantages, Experience, MicroBatch, ModelOutputs
from lightrl.records.rollouts import (
    HostRows,
    Rollouts,
    RowBatch,
    Scores,
    SupervisedBatch,
    Trajectory,
    TrajectoryRow,
    per_row,
    per_token,
)
from lightrl.records.sampling import (
    Completion,
    CompletionGroup,
    EngineContext,
    GenerationRequest,
    ImageInputs,
    Media,
    Prompts,
    Routes,
    SamplingParams,
    StopReason,
    Support,
    TopTokens,
)

__all__ = [
    "Advantages",
    "Completion",
    "CompletionGroup",
    "EngineContext",
    "Experience",
    "GenerationRequest",
    "HostRows",
    "ImageInputs",
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
    "SupervisedBatch",
    "Support",
    "TopTokens",
    "Trajectory",
    "TrajectoryRow",
    "per_row",
    "per_token",
]

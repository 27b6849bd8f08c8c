"""Rows of unequal length as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_rows(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
    """Right-pads rows of unequal length to a (B, T) tensor, T being that of the longest.

    Args:
        rows: B sequences of numbers.
        value: what to fill with.
        dtype: of the result.
    """
    length = max((len(row) for row in rows), default=0)
    out = torch.full((len(rows), length), value, dtype=dtype)
    for i, row in enumerate(rows):
        if len(row):
            out[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return out

"""Supervised examples for an auxiliary SFT loss during RL (`ptx_coef` of the module)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightrl.data.sft import SFTSource
from lightrl.data.sft_loader import SFTLoader


@dataclass
class PTXSource(SFTSource):
    """Supervised examples for an auxiliary SFT loss. Accepts the arguments of `SFTSource` and the following.

    Args:
        batch_size: Number of examples per rollout and rank, shared by the rollout's mini-batches.
    """

    batch_size: int = 32

    def loader(self, tokenizer: Any, processor: Any, **order: Any) -> SFTLoader:
        """Returns a loader of the examples. `order` contains `seed`, `rank`, and `world_size` (see `SFTLoader`)."""
        rows = self.tokenized(tokenizer, processor)
        return SFTLoader(rows, self.batch_size, tokenizer.pad_token_id, **order)

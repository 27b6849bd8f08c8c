"""FIRE sampling in vLLM's workers. Written for vLLM 0.32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class FireProcessor(LogitsProcessor):
    """FIRE sampling: a separate temperature for the first token.

    Runs after the temperature and before top-k and top-p. It multiplies logits by `temperature / fire_temperature`, so
    the reported log-probs (`processed_logprobs`) follow the sampling distribution.

    Source: https://arxiv.org/abs/2410.21236, without the variants that change later positions.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.first: dict[int, tuple[float, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """True: scaling doesn't change greedy choices."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Tracks the batch; removes requests that have their first token."""
        process_dict_updates(self.first, batch_update, self._entry)
        self.first = {row: entry for row, entry in self.first.items() if not entry[1]}

    @staticmethod
    def _entry(params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> tuple[float, list[int]] | None:
        fire = (params.extra_args or {}).get("fire_temperature")
        return None if fire is None or params.temperature == 0 else (params.temperature / fire, output_ids)

    def apply(self, logits: Tensor) -> Tensor:
        """Scales logits, (rows of the batch, vocabulary), already divided by each row's temperature."""
        for row, (scale, _) in self.first.items():
            logits[row].mul_(scale)
        return logits

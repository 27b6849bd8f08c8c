"""A sequence-classification model as a reward function, for the scoring server.

In a run, reward models are submodules of the Lightning module instead, on the strategy's devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightrl.rewards.base import Reward

__all__ = ["ModelReward"]


class ModelReward(Reward):
    """Scores prompt + completion with a model that has one output: r = that output (a logit, not squashed).

    Args:
        path: folder or hub name of the model and its tokenizer.
        device: where it runs, for example "cpu" or "cuda:0".
        dtype: parameter type, for example "float32" or "bfloat16".
        batch_size: most sequences per forward pass, at least 1.
        max_length: longer texts lose tokens at their start, so that the completion stays; None is the tokenizer's own
            limit.

    Raises:
        ValueError: no such folder, or a model with more than one output.
    """

    max_concurrency = 1

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 16,
        max_length: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"ModelReward: batch_size={batch_size}; must be at least 1.")
        if Path(path).is_absolute() and not Path(path).is_dir():
            raise ValueError(f"ModelReward: path={path!r}: there is no such folder.")
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=getattr(torch, dtype))
        if self.model.config.num_labels != 1:
            raise ValueError(f"ModelReward: {path!r} has {self.model.config.num_labels} outputs; a reward needs one.")
        self.model.to(device).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, truncation_side="left", padding_side="right")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id  # the model reads its score before the padding
        self.batch_size, self.max_length = batch_size, max_length

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        values: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            batch = self.tokenizer(
                texts[start : start + self.batch_size],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_tensors="pt",
            )
            ids, mask = batch["input_ids"].to(self.model.device), batch["attention_mask"].to(self.model.device)
            values += self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
        return values

"""A sequence-classification model as a reward function, for the scoring server.

In a run, reward models are submodules of the Lightning module instead, on the strategy's devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightrl.compat.arguments import at_least, require_model_folder
from lightrl.rewards.base import Reward


class ModelReward(Reward):
    """Scores prompt and completion with a model that has one output: r = that output (a logit, not squashed).

    A row whose texts have no tokens is not applicable (None).

    Args:
        path: folder or hub name of the model and its tokenizer.
        device: where it runs, for example "cpu" or "cuda:0".
        dtype: of the weights; None is float32, "bfloat16" halves the memory.
        chat_template: Jinja text, or a file of it, that the tokenizer renders [user: prompt, assistant: completion]
            with; "default" is the tokenizer's own; None scores prompt + completion as plain text.
        max_length: longest text in tokens; longer ones lose their beginning. None is the model's limit.
        batch_tokens: most tokens per forward pass, above 0.

    Raises:
        ValueError: no such folder, a model with more than one output or without weights for it (a language model), or
            a number out of range.
    """

    max_concurrency = 1  # one device: several calls at once would only share its memory

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        dtype: str | None = None,
        chat_template: str | None = None,
        max_length: int | None = None,
        batch_tokens: int = 16384,
    ) -> None:
        at_least("ModelReward.max_length", max_length, 1, or_none="for no limit")
        require_model_folder(path)
        from lightrl.models.reward import RewardModel
        from lightrl.models.spec import RewardModelSpec

        spec = RewardModelSpec("model", path, dtype=dtype, chat_template=chat_template, max_length=max_length)
        self.model = RewardModel.from_spec(spec).to(device).eval()
        self.batch_tokens = at_least("ModelReward.batch_tokens", batch_tokens, 1)

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
        scores: list[float] = self.model.score_texts(prompts, completions, self.batch_tokens).tolist()
        rows = zip(scores, prompts, completions, strict=True)
        return [None if math.isnan(score) and not self.model.encode(*texts) else score for score, *texts in rows]

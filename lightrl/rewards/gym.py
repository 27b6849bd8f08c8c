"""Scores answers to reasoning-gym tasks in child processes."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from lightrl.compat.arguments import require_packages
from lightrl.rewards.answers import EXTRACTORS, Extract
from lightrl.rewards.base import Reward
from lightrl.rewards.workers import Workers


class ReasoningGymReward(Reward):
    """Scores the answer with the example's reasoning-gym generator, in [0, 1]; 0 if the completion has no answer.

    Use it with `ReasoningGymRows`. Generators may give partial credit, so the mean reward is not an
    accuracy. The metric `reward/ReasoningGymReward/solved` is: the fraction of completions with a score of 1.

    Some generators evaluate the answer as Python or as a formula. They run in a child process that can't start
    programs, write files, or open connections. A completion is unscored if its score takes too long or too much memory,
    or if its generator raises an error. `timeouts` is the fraction of these completions.

    Args:
        extract: How to find the answer in the completion: "tags" (last `<answer>` tags, as in reasoning-gym's system
            prompts), "boxed" (last `\\boxed{}`), "number" (last number), "last_line", or "text" (entire text).
        timeout: Time limit per completion in seconds. Excludes the startup of a process.
        num_workers: Maximum number of processes.

    Raises:
        ValueError: reasoning-gym is not installed.

    Source: https://github.com/open-thought/reasoning-gym (`score_answer`). Unlike its training scripts, adds no format
        bonus; use `RegexFormat` for that.
    """

    needed_columns = ("gym",)

    def __init__(self, extract: Extract = "tags", timeout: float = 10.0, num_workers: int = 1) -> None:
        require_packages("ReasoningGymReward", "reasoning-gym", "reasoning_gym")
        self.extract = extract
        self.timeout = timeout
        self.max_concurrency = num_workers
        self._workers = Workers("gym", num_workers)

    def __call__(
        self,
        completions: Sequence[str],
        gym: Sequence[str],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        found = self._workers.ask([self._question(text, made) for text, made in zip(completions, gym, strict=True)])
        scores = [0.0 if score is None else None if score == "timeout" else float(score) for score in found]
        if log_metric is not None and scores:
            log_metric("solved", scores.count(1.0) / len(scores))
            log_metric("timeouts", scores.count(None) / len(scores))
        return scores

    def extract_answer(self, completion: str) -> str | None:
        return EXTRACTORS[self.extract](completion)

    def _question(self, completion: str, made: str) -> dict[str, Any] | None:
        answer, row = self.extract_answer(completion), json.loads(made)
        if answer is None:
            return None
        items = gym_dataset(row["name"], json.dumps(row["settings"], sort_keys=True), row["seed"], row["size"])
        item = pickle.dumps(items[row["index"]])  # some generators make other items in another process
        return {**row, "item": base64.b64encode(item).decode(), "text": answer, "timeout": self.timeout}

    def close(self) -> None:
        """Stops the worker processes."""
        self._workers.close()


@lru_cache(maxsize=64)
def gym_dataset(name: str, settings: str, seed: int, size: int) -> Any:
    """Returns the lazy dataset of a reasoning-gym generator. `settings` is JSON.

    Raises:
        ValueError: If `reasoning-gym` is not installed or has no such generator.
    """
    require_packages("ReasoningGymRows", "reasoning-gym", "reasoning_gym")
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(settings))

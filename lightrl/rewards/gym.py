"""Generates reasoning-gym tasks and scores their answers in a child process.

Scorers evaluate answers as Python code. Some generators use the process-wide random generators or the order of a set of
strings, so an item is equal everywhere only if a process with a fixed hash seed generates it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from lightrl.compat.arguments import require_packages
from lightrl.rewards.answers import EXTRACTORS, Extract
from lightrl.rewards.base import Reward
from lightrl.rewards.workers import START_SECONDS, Workers

WORKERS = Workers("gym", 1)
"""Process of all rows and rewards."""


class ReasoningGymReward(Reward):
    """Scores the answer with the example's reasoning-gym generator, in [0, 1]; 0 if the completion has no answer.

    Use it with `ReasoningGymRows`. Generators may give partial credit, so the mean reward is not an
    accuracy. The metric `reward/ReasoningGymReward/solved` is: the fraction of completions with a score of 1.

    Some generators evaluate the answer as Python or as a formula. They run in a child process that can't start
    programs, write files, or open connections. An answer that the generator can't read scores 0. A completion is
    unscored if its score takes too long or too much memory. `timeouts` is the fraction of these completions.

    Args:
        extract: How to find the answer in the completion: "tags" (last `<answer>` tags, as in reasoning-gym's system
            prompts), "boxed" (last `\\boxed{}`), "number" (last number), "last_line", or "text" (entire text).
        timeout: Time limit per completion in seconds. Excludes the startup of the process.

    Raises:
        ValueError: reasoning-gym is not installed.

    Source: https://github.com/open-thought/reasoning-gym (`score_answer`). Unlike its training scripts, adds no format
        bonus; use `RegexFormat` for that.
    """

    max_concurrency = 1
    needed_columns = ("gym",)

    def __init__(self, extract: Extract = "tags", timeout: float = 10.0) -> None:
        require_packages("ReasoningGymReward", "reasoning-gym", "reasoning_gym")
        self.extract = extract
        self.timeout = timeout

    def __call__(
        self,
        completions: Sequence[str],
        gym: Sequence[str],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        scores = [self._score(text, made) for text, made in zip(completions, gym, strict=True)]
        if log_metric is not None and scores:
            log_metric("solved", scores.count(1.0) / len(scores))
            log_metric("timeouts", scores.count(None) / len(scores))
        return scores

    def extract_answer(self, completion: str) -> str | None:
        return EXTRACTORS[self.extract](completion)

    def _score(self, completion: str, made: str) -> float | None:
        answer = self.extract_answer(completion)
        if answer is None:
            return 0.0
        gym_item(made)  # its generation doesn't count toward the time limit
        (score,) = WORKERS.ask([{"gym": made, "text": answer, "timeout": self.timeout}])
        return None if score == "timeout" else float(score)

    def close(self) -> None:
        WORKERS.close()


def gym_item(made: str) -> tuple[str, str | None]:
    """The question and the reference answer, if any, of an item. Raises a ValueError if it can't be generated."""
    (found,) = WORKERS.ask([{"gym": made, "timeout": START_SECONDS}])
    if isinstance(found, str):
        raise ValueError(f"reasoning-gym: {json.loads(made)['name']!r} can't generate an item ({found}). Check tasks.")
    return found[0], found[1]

"""Generated examples of `reasoning-gym` tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Any, Literal

from datasets import Dataset

from lightrl.compat.arguments import require_packages
from lightrl.data.rows import with_progress
from lightrl.rewards.gym import gym_item

ATTEMPTS = 20
"""Maximum number of generated items per training example, since evaluation questions are skipped."""


@dataclass(frozen=True)
class ReasoningGymTask:
    """A task generator of a mixture.

    Args:
        name: Name of the generator, such as "chain_sum".
        settings: Settings, such as `{min_terms: 2, max_terms: 3}`. Defaults to the generator's defaults.
        weight: Relative weight in the mixture.
        level: Value of the column `level`, for the classes of a `PromptCurriculum`. Defaults to the name.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    level: str | None = None


class ReasoningGymRows:
    """Generated reasoning problems, for `rows` of a `PromptSource`. Use `ReasoningGymReward` as the reward function.

    Training examples exclude all evaluation questions. The evaluation set has the difficulty of the task.

    Columns: `prompt` (the question), `answer` (the reference as text, or None if the generator has none), `task` (the
    generator's name), `level`, and `gym` (JSON from which `ReasoningGymReward` recreates the item).

    Args:
        tasks: Name of a generator, a dictionary of names and settings, or a list of `ReasoningGymTask`. Several tasks
            are mixed in random order.
        size: Number of training examples across all tasks.
        seed: Random seed for the questions and their order. Use the same value for training and evaluation.
        split: "train" or "eval".
        num_eval: Number of held-out evaluation examples across all tasks.

    Raises:
        ValueError: On call, if `reasoning-gym` is not installed, a generator doesn't exist, or it has too few distinct
            questions.

    Source: https://github.com/open-thought/reasoning-gym (Apache-2.0).
    """

    def __init__(
        self,
        tasks: str | dict[str, dict[str, Any]] | list[ReasoningGymTask],
        size: int = 1000,
        seed: int = 0,
        split: Literal["train", "eval"] = "train",
        num_eval: int = 128,
    ) -> None:
        if isinstance(tasks, str):
            tasks = {tasks: {}}
        if isinstance(tasks, Mapping):
            tasks = [ReasoningGymTask(name, dict(settings or {})) for name, settings in tasks.items()]
        self.tasks: Sequence[ReasoningGymTask] = list(tasks)
        self.size = size
        self.seed = seed
        self.split = split
        self.num_eval = num_eval

    def __call__(self) -> Dataset:
        """Generates the examples, the same ones at each call and in each process."""
        require_packages("ReasoningGymRows", "reasoning-gym", "reasoning_gym")
        seed = int(_digest(f"{self.seed}/eval"), 16) % 2**31  # generators seed item i with seed + i
        rows = [_row(task, seed, n, i) for task, n in self._shares(self.num_eval) for i in range(n)]
        if self.split == "train":
            questions = {row["prompt"] for row in rows}
            rows = [row for task, n in self._shares(self.size) for row in self._new(task, n, questions)]
        order = sorted(range(len(rows)), key=lambda i: _digest(f"{self.seed}/{i}"))
        return Dataset.from_list([rows[i] for i in order])

    def _shares(self, size: int) -> list[tuple[ReasoningGymTask, int]]:
        passed = list(accumulate(task.weight for task in self.tasks))
        bounds = [0, *(round(size * weight / passed[-1]) for weight in passed)]
        return [(task, end - start) for task, (start, end) in zip(self.tasks, pairwise(bounds), strict=True)]

    def _new(self, task: ReasoningGymTask, count: int, held_out: set[str]) -> list[dict[str, Any]]:
        """Returns examples whose questions are not held out."""
        size = ATTEMPTS * count  # items are generated lazily, so a large bound has no cost
        found = (row for i in range(size) if (row := _row(task, self.seed, size, i))["prompt"] not in held_out)
        rows = list(with_progress(islice(found, count), count, task.name))  # some generators take seconds per item
        if len(rows) < count:
            raise ValueError(
                f"num_eval={self.num_eval}: {task.name} with {task.settings} has too few distinct questions left for "
                f"size={self.size}. Lower num_eval, or widen the settings."
            )
        return rows


def _row(task: ReasoningGymTask, seed: int, size: int, number: int) -> dict[str, Any]:
    made = {"name": task.name, "settings": task.settings, "seed": seed, "size": size, "index": number}
    gym = json.dumps(made, sort_keys=True)
    question, answer = gym_item(gym)
    return {"prompt": question, "answer": answer, "task": task.name, "level": task.level or task.name, "gym": gym}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

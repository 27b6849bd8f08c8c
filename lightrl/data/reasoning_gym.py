"""Rows from the task generators of `reasoning-gym`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from datasets import Dataset

from lightrl.compat.arguments import install_command

EVAL_SHARE = 10
"""One question of so many belongs to the evaluation split."""


@dataclass(frozen=True)
class ReasoningGymTask:
    """One generator of a mixture.

    Args:
        name: Name of the generator, such as "chain_sum".
        settings: Its settings, such as `{min_terms: 2, max_terms: 3}`; defaults to the generator's own.
        weight: Share of the rows, relative to the other tasks' weights.
        level: Value of the column `level`, for the classes of a `PromptCurriculum`; defaults to the name.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    level: str | None = None


class ReasoningGymRows:
    """Rows of reasoning tasks, for `rows` of a `PromptSource`. Use `ReasoningGymReward` as the reward function.

    A question belongs to exactly one of the two splits, which a hash of its text decides: no evaluation question is
    ever a training question, whatever the seeds and sizes.

    Columns: `prompt` (the question), `answer` (the reference as text), `task` (the generator's name), `level`, and
    `gym` (JSON from which `ReasoningGymReward` makes the item again).

    Args:
        tasks: A generator's name, a dictionary of names and settings, or a list of `ReasoningGymTask`. Several are
            mixed in an order that depends on `seed`.
        size: Number of rows of all tasks together.
        seed: Seed of the questions and of their order.
        split: "train" or "eval".

    Raises:
        ValueError: when called: `reasoning-gym` is not installed, it has no such generator, or a generator has too few
            different questions for its share of the rows.

    Source: https://github.com/open-thought/reasoning-gym (Apache-2.0).
    """

    def __init__(
        self,
        tasks: str | dict[str, dict[str, Any]] | list[ReasoningGymTask],
        size: int = 1000,
        seed: int = 0,
        split: Literal["train", "eval"] = "train",
    ) -> None:
        if isinstance(tasks, str):
            tasks = {tasks: {}}
        if isinstance(tasks, Mapping):
            tasks = [ReasoningGymTask(name, dict(settings or {})) for name, settings in tasks.items()]
        if not tasks:
            raise ValueError("tasks=[]: there is nothing to generate. Name at least one generator.")
        if split not in ("train", "eval"):
            raise ValueError(f"split={split!r}: must be 'train' or 'eval'.")
        self.tasks: Sequence[ReasoningGymTask] = list(tasks)
        self.size = size
        self.seed = seed
        self.split = split

    def __call__(self) -> Dataset:
        """Generates the rows, the same ones at each call."""
        total = sum(task.weight for task in self.tasks)
        bounds, passed = [0], 0.0
        for task in self.tasks:
            passed += task.weight
            bounds.append(round(self.size * passed / total))
        rows = [row for i, task in enumerate(self.tasks) for row in self._rows(task, bounds[i + 1] - bounds[i])]
        order = sorted(range(len(rows)), key=lambda i: _digest(f"{self.seed}/{i}"))
        return Dataset.from_list([rows[i] for i in order])

    def _rows(self, task: ReasoningGymTask, count: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        size = 20 * EVAL_SHARE * count  # items are made one by one, so that a large bound costs nothing
        items = gym_dataset(task.name, task.settings, self.seed, size)
        for number in range(size):
            item = items[number]
            held_out = int(_digest(item["question"]), 16) % EVAL_SHARE == 0
            if held_out != (self.split == "eval"):
                continue
            made = {"name": task.name, "settings": task.settings, "seed": self.seed, "size": size, "index": number}
            rows.append(
                {
                    "prompt": item["question"],
                    "answer": str(item["answer"]),
                    "task": task.name,
                    "level": task.level or task.name,
                    "gym": json.dumps(made, sort_keys=True),
                }
            )
            if len(rows) == count:
                return rows
        if len(rows) < count:
            raise ValueError(
                f"size={self.size}: {task.name} with {task.settings} has too few questions in split={self.split!r} "
                f"({len(rows)} of {count}). Lower the size, or widen the settings."
            )
        return rows


def gym_dataset(name: str, settings: Mapping[str, Any], seed: int, size: int) -> Any:
    """A generator's dataset; its items are made when they are asked for.

    Args:
        name: Name of the generator.
        settings: Its settings.
        seed: Seed of the items.
        size: Number of items.

    Raises:
        ValueError: `reasoning-gym` is not installed or has no such generator.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(
            f"ReasoningGymRows: the package reasoning-gym is missing: {install_command('reasoning-gym')}."
        ) from error
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(f"tasks={name!r}: reasoning-gym has no such generator; it has {', '.join(sorted(DATASETS))}.")
    return reasoning_gym.create_dataset(name, seed=seed, size=max(size, 1), **settings)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

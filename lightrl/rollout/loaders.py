"""Dataloaders of training rollouts and evaluation prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightrl.compat.arguments import imported
from lightrl.data.prompts import PromptMixture, PromptSet, PromptSource, prompt_source, rendered_like
from lightrl.records import Rollouts, SamplingParams


class RolloutLoader:
    """Train dataloader that samples each rollout when Lightning requests it.

    It has a length because Lightning prefetches from loaders without one, which would make each rollout one update
    stale.

    Args:
        make: Function that returns the next rollout, given the number of rollouts remaining after it.
        num_rollouts: Number of rollouts per epoch.
        trainer: The trainer, for its epoch and batch limits.
    """

    def __init__(self, make: Callable[[int], Rollouts], num_rollouts: int, trainer: Trainer) -> None:
        self.num_rollouts = num_rollouts
        self.position = 0
        self._make = make
        self._trainer = trainer
        self._resumed = False

    def __len__(self) -> int:
        return self.num_rollouts

    def __iter__(self) -> Iterator[Rollouts]:
        if not self._resumed:  # also after an epoch shortened by `limit_train_batches`
            self.position = 0
        self._resumed = False
        while self.position < self.num_rollouts:
            rollouts = self._make(self._left())
            self.position += 1
            yield rollouts

    def _left(self) -> int:
        """Number of rollouts after the next one in the last epoch; unlimited in earlier epochs."""
        trainer = self._trainer
        last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
        return max(self._of_epoch() - self.position - 1, 0) if last_epoch else sys.maxsize

    def _of_epoch(self) -> int:
        """Number of rollouts that Lightning requests per epoch."""
        return int(min(self.num_rollouts, max(self._trainer.fit_loop.max_batches, 1)))

    def state_dict(self) -> dict[str, int]:
        """Returns the position in the epoch."""
        return {"position": self.position % self._of_epoch()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resumes within the epoch."""
        self.position, self._resumed = state_dict["position"], True


@dataclass(frozen=True)
class Evaluation:
    """Prompts and settings for validation, test, and prediction.

    Args:
        prompts: Prompts for validation and test, in any form that the data module's `prompts` accepts. None disables
            evaluation. Pass a dictionary, {math: {path: ...}, code: {path: ...}}, for several sets, logged as
            `eval/<name>/...`. `system_prompt`, `chat_template`, and `template_kwargs` default to those of the training
            prompts.
        sampling: Sampling settings. Defaults to the training settings without `fire_temperature`.
        group_size: Number of completions per prompt. Values above 1 enable pass@k and maj@n.
        batch_size: Number of prompts per batch and rank.
        answer: Function, or its import path, that extracts the answer from a completion for `eval/maj@n`. Defaults to
            the reward functions' `extract_answer`, then the last `\\boxed{}` or `####`, then the whole text.
        predict_prompts: Prompts for `lightrl predict`, rendered like `prompts`. Defaults to `prompts`.
        success_reward: Minimum reward of a solved prompt in pass@k and maj@n.
    """

    prompts: (
        PromptSource | PromptMixture | dict[str, PromptSource | PromptMixture] | list[dict[str, Any]] | str | None
    ) = None
    sampling: SamplingParams | None = None
    group_size: int = 1
    batch_size: int = 64
    answer: Callable[[str], str | None] | str | None = None
    predict_prompts: PromptSource | PromptMixture | list[dict[str, Any]] | str | None = None
    success_reward: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.answer, str):
            object.__setattr__(self, "answer", imported("evaluation.answer", self.answer))

    def sources(self, training: Any) -> dict[str, PromptSource | PromptMixture]:
        """Returns the prompts by argument name, such as `evaluation.prompts.math`."""
        sets = self.prompts if isinstance(self.prompts, dict) else {"": self.prompts}
        named = {f"evaluation.prompts.{name}".rstrip("."): prompts for name, prompts in sets.items()}
        named["evaluation.predict_prompts"] = self.predict_prompts
        return {
            name: rendered_like(prompt_source(prompts), training)
            for name, prompts in named.items()
            if prompts is not None
        }


class EvalLoader:
    """Iterates once over a set of evaluation prompts. All ranks get the same number of batches.

    Args:
        data: The `RolloutDataModule`, which samples and scores each batch on request.
        name: Name of the set, or "" for a single one.
        prompts: The prompts of all ranks.
    """

    def __init__(self, data: Any, name: str, prompts: PromptSet) -> None:
        self.prompts = prompts
        self._data = data
        self._name = name
        self._count = data.evaluation.batch_size * data.world_size

    def __len__(self) -> int:
        return -(-len(self.prompts) // self._count)

    def __iter__(self) -> Iterator[Rollouts]:
        for first in range(0, len(self.prompts), self._count):
            end = min(first + self._count, len(self.prompts))
            rows = list(range(first, end)[self._data.rank :: self._data.world_size])
            # A rank without prompts repeats one, because evaluation is collective.
            yield self._data.evaluate(self._name, self.prompts.rows(rows or [first]), first, filler=not rows)

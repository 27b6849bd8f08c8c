"""What Lightning iterates over: training rollouts, and evaluation prompts once each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightrl.compat.arguments import at_least, imported
from lightrl.data.prompt_sets import PromptSet
from lightrl.data.prompts import PromptMixture, PromptSource, prompt_source, rendered_like
from lightrl.records import Prompts, Rollouts, SamplingParams
from lightrl.rewards.scorer import RewardScorer


class RolloutLoader:
    """Lightning's train dataloader: sized, and a generator, so that each rollout is made when it is asked for.

    Lightning prefetches loaders without a length, which would make every rollout one update stale.

    Args:
        make: (number of rollouts that are asked for after this one) makes the next rollout.
        num_rollouts: Rollouts in an epoch.
        trainer: Knows how many epochs there are, and where they are cut short.
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
        if not self._resumed:  # also after an epoch that Lightning cut short (`limit_train_batches`)
            self.position = 0
        self._resumed = False
        while self.position < self.num_rollouts:
            rollouts = self._make(self._left())
            self.position += 1
            yield rollouts

    def _left(self) -> int:
        """Rollouts that come after the next one: in this epoch, or as many as may be wanted if another follows."""
        trainer = self._trainer
        last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
        return max(self._of_epoch() - self.position - 1, 0) if last_epoch else sys.maxsize

    def _of_epoch(self) -> int:
        """Rollouts that Lightning takes of an epoch."""
        return int(min(self.num_rollouts, max(self._trainer.fit_loop.max_batches, 1)))

    def state_dict(self) -> dict[str, int]:
        """Rollouts handed out in this epoch; at its end that is the start of the next."""
        return {"position": self.position % self._of_epoch()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues within the epoch."""
        self.position, self._resumed = state_dict["position"], True


@dataclass(frozen=True)
class Evaluation:
    """What validation, test, and prediction sample.

    Args:
        prompts: Prompts for validation and test, in every form that the data module's `prompts` takes. None evaluates
            nothing. Several sets by name, {math: {path: ...}, code: {path: ...}}, are logged as `eval/<name>/...`. They
            render like the training prompts: `system_prompt`, `chat_template`, and variables in `template_kwargs` that
            they don't set themselves are the training prompts'. The same holds for `predict_prompts`.
        sampling: How completions are sampled. Defaults to the training settings without `fire_temperature`.
        group_size: Completions per prompt. More than 1 gives pass@k and maj@n.
        batch_size: Prompts per batch and rank.
        answer: Function or import path that finds the answer in a completion, for `eval/maj@n`. Defaults to the reward
            functions' `extract_answer`, then the last `\\boxed{}` or `####`, then the whole text.
        predict_prompts: Prompts for `lightrl predict`. Defaults to `prompts`.
        success_reward: Reward from which a completion counts as solved in pass@k and maj@n.
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
        at_least("evaluation.group_size", self.group_size, 1)
        at_least("evaluation.batch_size", self.batch_size, 1)
        if isinstance(self.answer, str):
            object.__setattr__(self, "answer", imported("evaluation.answer", self.answer))

    def sources(self, training: Any) -> dict[str, PromptSource | PromptMixture]:
        """The prompts by argument, such as `evaluation.prompts.math`, rendered like the training prompts."""
        sets = self.prompts if isinstance(self.prompts, dict) else {"": self.prompts}
        named = {f"evaluation.prompts.{name}".rstrip("."): prompts for name, prompts in sets.items()}
        named["evaluation.predict_prompts"] = self.predict_prompts
        return {
            name: rendered_like(prompt_source(prompts, name), training)
            for name, prompts in named.items()
            if prompts is not None
        }

    def answers(self, rollouts: Rollouts, scorer: RewardScorer | None) -> list[str]:
        """The answer that each of B completions votes for, or its whole text if none is found."""
        from lightrl.rewards.answers import extract_boxed, extract_gsm8k

        labels: list[Any] = [None] * len(rollouts)
        ways: list[Callable[[str, Any], str | None]] = [lambda text, label: extract_boxed(text) or extract_gsm8k(text)]
        if scorer is not None:
            labels = rollouts.columns.get(scorer.label_column, labels)
            ways.insert(0, scorer.extract_answer)
        if callable(own := self.answer):
            ways.insert(0, lambda text, label: own(text))
        return [
            next((answer for way in ways if (answer := way(text, label)) is not None), text.strip())
            for text, label in zip(rollouts.completions, labels, strict=True)
        ]


class EvalLoader:
    """All evaluation prompts once, as scored rollouts that are sampled when asked for. Every rank gets as many batches.

    Args:
        make: (this rank's prompts, number of the batch's first prompt over all ranks, whether they only fill up the
            batch of a rank without any) samples and scores them.
        prompts: All of them.
        batch_size: Prompts per batch and rank.
        rank: Rank of this process.
        world_size: Number of processes.
    """

    def __init__(
        self,
        make: Callable[[Prompts, int, bool], Rollouts],
        prompts: PromptSet,
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.prompts = prompts
        self.batch_size = batch_size
        self._make = make
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return -(-len(self.prompts) // (self.batch_size * self._world_size))

    def __iter__(self) -> Iterator[Rollouts]:
        count = self.batch_size * self._world_size
        for first in range(0, len(self.prompts), count):
            rows = list(range(first, min(first + count, len(self.prompts)))[self._rank :: self._world_size])
            # A rank without rows repeats one: it must take part.
            yield self._make(self.prompts.rows(rows or [first]), first, not rows)

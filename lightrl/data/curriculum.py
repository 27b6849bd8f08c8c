"""A prompt curriculum, which selects prompts by their success rates.

Prompt k depends on the dataset, the seed, and the success rates so far, which are equal on all ranks and stored in
checkpoints. A resumed run is therefore identical to an uninterrupted one, on any number of ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightrl.data.processing import OpenSource, Reading, open_source
from lightrl.data.prompts import PromptSet, PromptSource
from lightrl.distributed.strategies import gather_objects
from lightrl.records import Prompts

_STATE = ("visits", "last", "open", "recent", "base", "seen")


@dataclass
class PromptCurriculum:
    """Prompt source that samples prompts by their success rates.

    A prompt's success rate is the fraction of its trajectories in the last `window` visits with a reward of at least
    `success_reward`. Prompts at or below `low` are hard, and prompts at or above `high` are solved. Neither provides a
    learning signal within a group, so their weight is `rest_weight`. All other prompts, including new ones, have weight
    1. Each rollout samples prompts without replacement in proportion to their weights. In addition, a fraction `replay`
    of each rollout consists of hard prompts, least recently seen first.

    With `class_column`, only prompts of the first class are sampled at first. The next class is added once the success
    rate over the last `class_window` prompts of the hardest open class reaches `advance_at`.

    Args:
        source: Dataset of prompts. Must not be a stream.
        success_reward: Minimum reward of a successful trajectory.
        window: Number of recent visits in the success rate, at least 1.
        low: Maximum success rate of a hard prompt, in [0, 1).
        high: Minimum success rate of a solved prompt, in (low, 1].
        rest_weight: Sampling weight of hard and solved prompts, in (0, 1]. 1 samples all prompts equally.
        replay: Fraction of each rollout reserved for hard prompts, in [0, 1).
        class_column: Column with the difficulty class. None disables classes.
        classes: Values of `class_column`, easiest first.
        advance_at: Success rate of the hardest open class at which the next one opens, in (0, 1].
        class_window: Number of prompts in that success rate, at least 1.

    Raises:
        ValueError: If only one of `class_column` and `classes` is set, or `load` finds a stream or other classes.

    Source: https://arxiv.org/abs/2502.06563 (SFL), https://arxiv.org/abs/2504.03380 (online difficulty filtering).
        `dynamic_sampling_rounds` drops groups without reward spread after sampling; this avoids sampling most of them.
    """

    source: PromptSource
    success_reward: float = 1.0
    window: int = 4
    low: float = 0.0
    high: float = 1.0
    rest_weight: float = 0.1
    replay: float = 0.0
    class_column: str | None = None
    classes: list[str] | None = None
    advance_at: float = 0.7
    class_window: int = 64

    def __post_init__(self) -> None:
        if (self.class_column is None) != (self.classes is None) or self.classes == []:
            raise ValueError(
                f"PromptCurriculum.class_column={self.class_column!r} with classes={self.classes}: each requires the "
                "other. Set both (classes from easiest to hardest) or neither."
            )

    def load(self, tokenizer: PreTrainedTokenizerBase, **options: Any) -> CurriculumSet:
        """Loads the prompts. See `Reading` for the arguments.

        Raises:
            ValueError: If the source is a stream, or the values of `class_column` and `classes` differ.
        """
        reading = Reading(tokenizer, **options)
        opened = open_source(self.source, reading)
        of_row = np.zeros(len(opened), dtype=np.int64)
        if self.class_column is not None and self.classes is not None:
            names = [str(name) for name in opened.values(self.class_column)]
            if {*names} != {*self.classes}:  # an empty class would never let the next one open
                raise ValueError(
                    f"class_column={self.class_column!r}: the values in {self.source.label} are "
                    f"{', '.join(sorted({*names}))}, but classes={self.classes}. They must be the same."
                )
            of_row = np.array([self.classes.index(name) for name in names])
        return CurriculumSet(self, opened, of_row, seed=reading.seed)


class CurriculumSet(PromptSet):
    """Prompts of a `PromptCurriculum` with their success rates. `of_row` contains their (N,) class indices."""

    def __init__(self, spec: PromptCurriculum, source: OpenSource, of_row: np.ndarray[Any, Any], *, seed: int) -> None:
        super().__init__([source], [1.0], seed=seed)
        self.spec = spec
        self._of_row = of_row
        self._numbers = {index: number for number, index in enumerate(source.kept)}
        self._visits: dict[int, list[float]] = {}  # prompt -> success rates of its last visits
        self._last: dict[int, int] = {}  # prompt -> index of the rollout of its last visit
        self._open = 1  # number of open classes
        self._recent: list[float] = []  # last success rates in the hardest open class
        self._base = 0  # index of the first prompt sampled with the current success rates
        self._seen = 0  # number of observed rollouts
        self._order: tuple[int, list[int]] = (-1, [])

    def batch(self, cursor: int, count: int, *, rank: int = 0, world_size: int = 1) -> Prompts:
        """See `PromptSet.batch`. Supports only prompts after the last `observe`."""
        return self.rows([self._number(k) for k in range(cursor + rank, cursor + count, world_size)])

    def observe(self, rewards: Sequence[tuple[int, Sequence[float]]], cursor: int) -> dict[str, float]:
        """Records the success rates of a rollout's groups, except those without a scored trajectory. Collective.

        `rewards` are (dataset index, rewards, NaN if not scored) of this rank's groups. `cursor` is the index of the
        next rollout's first prompt. Returns fractions of unseen, hard, and solved prompts, and the number of open
        classes.
        """
        scored = [(index, [reward for reward in of if not math.isnan(reward)]) for index, of in rewards]
        own = [(index, float(np.mean(np.array(of) >= self.spec.success_reward))) for index, of in scored if of]
        for index, rate in sorted(chain(*gather_objects(own))):  # independent of the number of ranks
            number = self._numbers[index]
            self._visits[number] = [*self._visits.get(number, []), rate][-self.spec.window :]
            self._last[number] = self._seen
            if self._of_row[number] == self._open - 1:
                self._recent = [*self._recent, rate][-self.spec.class_window :]
        self._base, self._seen, self._order = cursor, self._seen + 1, (-1, [])
        full = len(self._recent) == self.spec.class_window and self._open < len(self.spec.classes or [""])
        if full and float(np.mean(self._recent)) >= self.spec.advance_at:
            self._open, self._recent = self._open + 1, []
        rates, total = [self._rate(number) for number in self._visits], len(self)
        return {
            "rollout/rows_unseen": 1.0 - len(rates) / total,
            "rollout/rows_hard": sum(rate <= self.spec.low for rate in rates) / total,
            "rollout/rows_solved": sum(rate >= self.spec.high for rate in rates) / total,
            "rollout/classes_open": float(self._open),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the success rates, equal on all ranks."""
        return {"rows": len(self), **{name: copy.deepcopy(getattr(self, f"_{name}")) for name in _STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the success rates. Raises a ValueError if the dataset has a different number of examples."""
        if state["rows"] != len(self):
            raise ValueError(
                f"The checkpoint's curriculum has {state['rows']} examples, but the dataset has {len(self)}. Resume "
                "with the original dataset, or start a new run from the checkpoint's model."
            )
        for name in _STATE:
            setattr(self, f"_{name}", copy.deepcopy(state[name]))
        self._order = (-1, [])

    def _rate(self, number: int) -> float:
        return float(np.mean(self._visits[number]))

    def _number(self, k: int) -> int:
        """Returns the dataset position of prompt k."""
        assert k >= self._base, "prompts are sampled after the last observation"
        size = int((self._of_row < self._open).sum())
        passed, position = divmod(k - self._base, size)
        if self._order[0] != passed:
            self._order = (passed, self._drawn(passed))
        return self._order[1][position]

    def _drawn(self, passed: int) -> list[int]:
        """Returns all prompts of the open classes in the order of this pass, with hard ones interleaved.

        Sorting by exponential variables divided by weights is weighted sampling without replacement.
        """
        spec, numbers = self.spec, np.nonzero(self._of_row < self._open)[0].tolist()
        rates = {number: self._rate(number) for number in numbers if number in self._visits}
        rests = {number for number, rate in rates.items() if rate <= spec.low or rate >= spec.high}
        random = np.random.default_rng([self._seed, self._base, passed]).exponential(size=len(self))
        by_weight = sorted(numbers, key=lambda n: (random[n] / (spec.rest_weight if n in rests else 1.0), n))
        hard = sorted((n for n, rate in rates.items() if rate <= spec.low), key=lambda n: (self._last[n], n))
        share = Fraction(str(spec.replay))  # 100 * 0.29 is below 29
        order: dict[int, None] = {}
        fresh, again = iter(by_weight), iter(hard if spec.replay else [])
        for place in range(len(numbers)):
            due = math.floor((place + 1) * share) > math.floor(place * share)
            number = next((n for n in again if n not in order), None) if due else None
            order[next(n for n in fresh if n not in order) if number is None else number] = None
        return list(order)

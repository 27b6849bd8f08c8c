"""A curriculum: the next prompts are chosen by the success rates of their earlier attempts.

Between two rollouts, prompt number k depends on the rows, the seed, and the success rates so far, which every rank
knows and a checkpoint holds. A resumed run equals an uninterrupted one, on any number of ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from datasets import IterableDataset
from transformers import PreTrainedTokenizerBase

from lightrl.compat.arguments import at_least, fraction
from lightrl.data.opened_sources import OpenSource, Reading, open_source
from lightrl.data.prompt_sets import PromptSet
from lightrl.data.prompts import PromptSource
from lightrl.records import Prompts


@dataclass
class PromptCurriculum:
    """A source whose prompts are chosen by the success rates of their earlier attempts.

    A row's success rate is the share of its attempts in its last `window` visits whose reward was `success_reward` or
    more. Rows at `low` or below are hard, rows at `high` or above are solved; from neither does a comparison within a
    group learn. They weigh `rest_weight`, all others and those not seen yet 1, and each rollout draws rows without
    replacement in proportion to their weights. Beside that, `replay` of each rollout are hard rows, those not seen for
    longest first. With `class_column` only rows of the first class are drawn until `advance_at` of the attempts at its
    last `class_window` prompts have succeeded; then the next class joins, and so on.

    Args:
        source: the rows; not a stream.
        success_reward: reward from which on an attempt has succeeded.
        window: visits that count, at least 1.
        low: success rate at or below which a row is hard, in [0, 1).
        high: success rate at or above which a row is solved, in (low, 1].
        rest_weight: weight of hard and solved rows, in (0, 1]; 1 draws all rows alike.
        replay: share of a rollout that is hard rows again, in [0, 1).
        class_column: column that names each row's difficulty; None has no classes.
        classes: its values, the easiest first.
        advance_at: success rate of the hardest open class at which the next one opens, in (0, 1].
        class_window: prompts over which that rate is taken, at least 1.

    Raises:
        ValueError: an argument is out of range; on loading, a stream, or a row of no class.

    Source: success rates in place of difficulty labels: https://arxiv.org/abs/2502.06563 (SFL),
        https://arxiv.org/abs/2504.03380 (online difficulty filtering). `dynamic_sampling_rounds` drops groups without
        a spread
        after they were sampled; this is to not sample most of them.
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
        at_least("PromptCurriculum.success_reward", self.success_reward, float("-inf"))
        at_least("PromptCurriculum.window", self.window, 1)
        fraction("PromptCurriculum.low", self.low, "[0, 1)")
        if not self.low < self.high <= 1:
            raise ValueError(f"PromptCurriculum.high={self.high}: must be in (low, 1], low being {self.low}.")
        fraction("PromptCurriculum.rest_weight", self.rest_weight, "(0, 1]")
        fraction("PromptCurriculum.replay", self.replay, "[0, 1)")
        fraction("PromptCurriculum.advance_at", self.advance_at, "(0, 1]")
        at_least("PromptCurriculum.class_window", self.class_window, 1)
        if (self.class_column is None) != (self.classes is None) or self.classes == []:
            raise ValueError(
                f"PromptCurriculum.class_column={self.class_column!r} with classes={self.classes}: give both, the "
                "classes from the easiest to the hardest, or neither."
            )

    def load(self, tokenizer: PreTrainedTokenizerBase, **options: Any) -> CurriculumSet:
        """Reads the rows; the arguments are those of `PromptSource.load`.

        Raises:
            ValueError: `shuffle=False`, a stream, or a row of no class.
        """
        reading = Reading(tokenizer, **options)
        if not (reading.shuffle and self.source.shuffle):
            raise ValueError(
                "shuffle=False with PromptCurriculum: it draws the order. Remove shuffle or the curriculum."
            )
        data = self.source.read()
        if isinstance(data, IterableDataset):
            raise ValueError(
                f"PromptCurriculum with {self.source.label}: a stream is only read forwards, so no row can be picked. "
                "Set streaming: false."
            )
        opened = open_source(self.source, reading)
        numbers = range(len(opened))
        of_row = np.zeros(len(opened), dtype=np.int64)
        if self.class_column is not None and self.classes is not None:
            if self.class_column not in opened.columns:
                raise ValueError(
                    f"PromptCurriculum.class_column={self.class_column!r}: the data has the columns {opened.columns}."
                )
            named = [str(data[opened.index(number)].get(self.class_column)) for number in numbers]
            unknown = sorted(set(named) - set(self.classes))
            if unknown:
                raise ValueError(
                    f"PromptCurriculum.classes={self.classes}: column {self.class_column!r} has {unknown[0]!r}, too. "
                    "Name every class, or leave such rows out of the data."
                )
            of_row = np.array([self.classes.index(name) for name in named])
            if not (of_row == 0).any():
                raise ValueError(
                    f"PromptCurriculum.classes={self.classes}: no row is of the first, {self.classes[0]!r}."
                )
        return CurriculumSet(self, opened, of_row, seed=reading.seed)


class CurriculumSet(PromptSet):
    """The rows of a `PromptCurriculum` and their success rates so far.

    Args:
        spec: the curriculum.
        source: its opened source.
        of_row: (N,) class of each of the N rows.
        seed: of the draws.
    """

    def __init__(self, spec: PromptCurriculum, source: OpenSource, of_row: np.ndarray[Any, Any], *, seed: int) -> None:
        super().__init__([source], [1.0], seed=seed)
        self.spec = spec
        self.success_reward = spec.success_reward
        self._of_row = of_row
        self._numbers = {source.index(number): number for number in range(len(source))}
        self._visits: dict[int, list[float]] = {}  # row -> success rates of its last visits
        self._last: dict[int, int] = {}  # row -> number of the rollout that it was seen in last
        self._open = 1  # classes that are drawn from
        self._recent: deque[float] = deque(maxlen=spec.class_window)  # of the hardest open class
        self._base = 0  # number of the prompt from which on what was seen counts
        self._seen = 0  # rollouts
        self._order: tuple[int, list[int]] = (-1, [])

    def batch(self, cursor: int, count: int, *, rank: int = 0, world_size: int = 1) -> Prompts:
        """See `PromptSet.batch`; for prompts that come after the last `observe`."""
        if count % world_size:
            raise ValueError(f"count={count}: {world_size} ranks cannot share it; take a multiple of {world_size}.")
        return self.rows([self._number(k) for k in range(cursor + rank, cursor + count, world_size)])

    def observe(self, visits: Sequence[tuple[int, float]], cursor: int) -> dict[str, float]:
        """Records the success rates of a rollout's groups.

        Args:
            visits: (data-set row, share of attempts that succeeded) of every group of every rank, in any order.
            cursor: number of the prompt with which the next rollout begins.

        Returns:
            shares of rows not seen yet, hard and solved, and the number of open classes.
        """
        for index, rate in sorted(visits):  # the same on any number of ranks
            number = self._numbers[index]
            self._visits[number] = [*self._visits.get(number, []), rate][-self.spec.window :]
            self._last[number] = self._seen
            if self._of_row[number] == self._open - 1:
                self._recent.append(rate)
        self._base, self._seen, self._order = cursor, self._seen + 1, (-1, [])
        full = len(self._recent) == self.spec.class_window
        if (
            full
            and float(np.mean(self._recent)) >= self.spec.advance_at
            and self._open < len(self.spec.classes or [""])
        ):
            self._open += 1
            self._recent.clear()
        rates, total = [self._rate(number) for number in self._visits], len(self)
        return {
            "rollout/rows_unseen": 1.0 - len(rates) / total,
            "rollout/rows_hard": sum(rate <= self.spec.low for rate in rates) / total,
            "rollout/rows_solved": sum(rate >= self.spec.high for rate in rates) / total,
            "rollout/classes_open": float(self._open),
        }

    def state_dict(self) -> dict[str, Any]:
        """The success rates so far, the same on every rank."""
        return {
            "visits": {number: list(rates) for number, rates in self._visits.items()},
            "last": dict(self._last),
            "open": self._open,
            "recent": list(self._recent),
            "base": self._base,
            "seen": self._seen,
            "rows": len(self),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the success rates.

        Raises:
            ValueError: The state is of a dataset with another number of rows.
        """
        if state["rows"] != len(self):
            raise ValueError(
                f"The checkpoint's curriculum has {state['rows']} rows, the data {len(self)}: success rates belong to "
                "rows by number. Resume with the data of the run, or start a new run from its model."
            )
        self._visits = {number: list(rates) for number, rates in state["visits"].items()}
        self._last = dict(state["last"])
        self._open = state["open"]
        self._recent = deque(state["recent"], maxlen=self.spec.class_window)
        self._base = state["base"]
        self._seen = state["seen"]
        self._order = (-1, [])

    def _rate(self, number: int) -> float:
        return float(np.mean(self._visits[number]))

    def _number(self, k: int) -> int:
        """The row of prompt k."""
        assert k >= self._base, "prompts are drawn after what was seen"
        size = int((self._of_row < self._open).sum())
        passed, position = divmod(k - self._base, size)
        if self._order[0] != passed:
            self._order = (passed, self._drawn(passed))
        return self._order[1][position]

    def _drawn(self, passed: int) -> list[int]:
        """All rows of the open classes, in the order of this pass: by weight, with hard ones replayed in between.

        Ordered by exponential variables divided by weights, each next row is drawn from those that are left in
        proportion to their weights.
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

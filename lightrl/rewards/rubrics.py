"""Rewards from several named criteria."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.engines.background import all_of
from lightrl.rewards.base import RewardSpec
from lightrl.rewards.chat import GUARD, ChatJudge, object_schema, quoted, read_json, read_score, rows_to_judge
from lightrl.rewards.rules import NestedReward, log_values


@dataclass
class Criterion:
    """One criterion of a `Rubric`: a question for the judge, or a reward function.

    Args:
        question: Question that the judge scores in [0, 1], such as "Does the answer cite its sources?".
        reward: A `Reward`, an import path, or in Python any function. May use a different judge.
        weight: Weight in the sum. 0 only logs the criterion.
    """

    question: str | None = None
    reward: RewardSpec | None = None
    weight: float = 1.0


class Rubric(NestedReward):
    """Weighted sum of named criteria. Each criterion is a question for a judge or a reward function.

        r = sum_c weight_c * r_c

    Each request contains one completion and all questions. The judge gives each question a reason and an integer score
    from 0 to `scale`; r_c = score / `scale`. A completion is unscored if any criterion with a non-zero weight has no
    value; `reward/Rubric/missing` is the fraction of such completions. Logs the mean of each criterion as
    `reward/Rubric/<criterion>` and shows its values with the completions. The judge sees all turns of a trajectory.

    Args:
        criteria: Name -> criterion.
        url: URL of an OpenAI-compatible server (see `ChatJudge`). Only required for questions.
        model: Model name on the server.
        scale: Maximum score of a question. 1 makes them yes/no questions.
        columns: Dataset columns to show to the judge, such as a reference answer.
        judge: Other arguments of `ChatJudge`.

    Raises:
        ValueError: A criterion doesn't have exactly one of `question` and `reward`, or a question lacks a judge.

    Source: Rubrics as Rewards, explicit aggregation, https://arxiv.org/abs/2507.17746. The paper divides the sum by the
        sum of weights.
    """

    def __init__(
        self,
        criteria: dict[str, Criterion],
        url: str | None = None,
        model: str | None = None,
        scale: int = 10,
        columns: list[str] | None = None,
        **judge: Any,
    ) -> None:
        for name, criterion in criteria.items():
            if (criterion.question is None) == (criterion.reward is None):
                raise ValueError(f"Rubric.criteria[{name!r}]: must have either a question or a reward. Set one.")
        super().__init__({name: one.reward for name, one in criteria.items() if one.reward is not None})
        self.weights = {name: criterion.weight for name, criterion in criteria.items()}
        self.questions = {name: one.question for name, one in criteria.items() if one.question is not None}
        self.judge: ChatJudge | None = None
        if self.questions:
            if url is None or model is None:
                raise ValueError(f"Rubric.url={url!r}, model={model!r}: questions require a judge. Set both.")
            self.judge = ChatJudge(url, model, **judge)
        self.scale = scale
        self.columns = list(columns or [])
        self.needed_columns = (*self.needed_columns, *self.columns)
        listed = json.dumps(self.questions, ensure_ascii=False, indent=1)
        form = ", ".join(
            f'{json.dumps(name, ensure_ascii=False)}: {{"reason": "...", "score": N}}' for name in self.questions
        )
        self.instruction = (
            f"You grade one answer of a language model, which is part of its training.\n{GUARD}\n\n"
            f"Criteria:\n{listed}\n\nJudge each criterion separately: a reason of one or two sentences, then N, an "
            f"integer from 0 (not met) to {scale} (fully met). Reply with one JSON object: {{{form}}}"
        )

    async def __call__(
        self,
        completions: Sequence[str],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        **rows: Any,
    ) -> list[float | None]:
        given = {"images": images, "videos": videos, "audios": audios, "completions": completions}
        offered = {**rows, **{name: values for name, values in given.items() if len(values)}}
        graded, values = await all_of(
            [
                self._graded(offered, images, log_metric, log_extra),
                self.run_parts(offered, log_metric, log_extra),
            ]
        )
        found = dict(zip([*self.questions, *(part.name for part in self.parts)], [*graded, *values], strict=True))
        for name in self.questions:
            log_values(name, found[name], log_metric, log_extra)
        totals = [self._total({name: values[row] for name, values in found.items()}) for row in range(len(completions))]
        log_metric("missing", sum(total is None for total in totals) / max(1, len(totals)))
        return totals

    async def close(self) -> None:
        await super().close()
        if self.judge is not None:
            await self.judge.close()

    async def _graded(
        self,
        rows: Mapping[str, Sequence[Any]],
        images: Sequence[Any],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
    ) -> list[list[float | None]]:
        """Returns the values of each question. Sends all questions about one completion in one request."""
        if (judge := self.judge) is None:
            return []
        shown = rows_to_judge(rows["completions"], judge.prompt_column, self.columns, rows)
        entry = object_schema(reason={"type": "string"}, score={"type": "integer", "enum": list(range(self.scale + 1))})
        schema = object_schema(**dict.fromkeys(self.questions, entry))
        judged = await all_of(
            judge.ask(self.instruction, quoted(row), pictures, self._scores, schema)
            for row, pictures in zip(shown, judge.pictures(images, len(shown)), strict=True)
        )
        judge.report(
            judged,
            range(len(shown)),
            lambda name, value: log_metric(f"judge/{name}", value),
            lambda name, values: log_extra(f"judge/{name}", values),
        )
        return [[None if one.value is None else one.value[name] for one in judged] for name in self.questions]

    def _scores(self, said: str) -> dict[str, float]:
        entries = read_json(said)
        if set(entries) != set(self.questions):
            raise ValueError(f"Its keys must be {', '.join(self.questions)}.")
        return {name: read_score(entry, self.scale) / self.scale for name, entry in entries.items()}

    def _total(self, values: Mapping[str, float | None]) -> float | None:
        """The weighted sum; None if a value with a non-zero weight is missing."""
        weighed = [(weight, values[name]) for name, weight in self.weights.items() if weight]
        known = [weight * value for weight, value in weighed if value is not None]
        return math.fsum(known) if len(known) == len(weighed) else None

"""Rewards from several named criteria."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.compat.arguments import at_least
from lightrl.engines.background import all_of
from lightrl.rewards.base import Reward, RewardFunction, RewardSpec, extracted_answer, load_reward, mean
from lightrl.rewards.chat import GUARD, ChatJudge, object_schema, quoted, read_json, read_score, rows_to_judge

_OFFERED = {"prompts", "completions", "completion_ids", "group_ids", "training_progress", "messages"}
_OFFERED |= {"images", "videos", "audios", "log_metric", "log_extra"}


@dataclass
class Criterion:
    """One criterion of a `Rubric`: a question for the judge, or a reward function.

    Args:
        question: Question that the judge scores in [0, 1], such as "Does the answer cite its sources?".
        reward: A `Reward`, an import path, or in Python any function. May use another judge.
        weight: Weight in the sum. 0 only logs the criterion.
    """

    question: str | None = None
    reward: RewardSpec | None = None
    weight: float = 1.0


class Rubric(Reward):
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
        ValueError: `criteria` is empty, a criterion doesn't have exactly one of `question` and `reward`, weights are
            not finite or all 0, questions lack `url` and `model`, or an argument is out of range.

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
        self.weights = {name: float(criterion.weight) for name, criterion in criteria.items()}
        if not all(map(math.isfinite, self.weights.values())) or not any(self.weights.values()):
            raise ValueError(f"Rubric.criteria: the weights {self.weights} must be finite and not all 0. Fix them.")
        questions = {name: one.question for name, one in criteria.items() if one.question is not None}
        self.parts = [
            RewardFunction(name, load_reward(one.reward)) for name, one in criteria.items() if one.reward is not None
        ]
        if questions and (url is None or model is None):
            raise ValueError(f"Rubric.url={url!r}, model={model!r}: {', '.join(questions)} require a judge. Set both.")
        self.judge = RubricJudge(str(url), str(model), questions, scale, columns, **judge) if questions else None
        needed = {name for part in self.parts for name in (*part.needed_columns, *(part.needs - _OFFERED))}
        self.needed_columns = tuple(sorted(needed | {*(columns or [])}))
        self.max_concurrency = min((p.max_concurrency for p in self.parts if p.max_concurrency), default=None)

    async def __call__(
        self,
        completions: Sequence[str],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        training_progress: Sequence[float] = (),
        **rows: Any,
    ) -> list[float | None]:
        given = {"images": images, "videos": videos, "audios": audios, "training_progress": training_progress}
        offered = {
            **rows,
            **{name: values for name, values in given.items() if len(values)},
            "completions": completions,
        }

        async def graded() -> dict[str, Sequence[float | None]]:
            if self.judge is None:
                return {}
            return await self.judge(
                log_metric=lambda name, value: log_metric(f"judge/{name}", value),
                log_extra=lambda name, values: log_extra(f"judge/{name}", values),
                **offered,
            )

        async def ran(part: RewardFunction) -> dict[str, Sequence[float | None]]:
            values, logged = await part.run(offered, timeout=None)
            for name, numbers in logged.metrics.items():
                log_metric(name.removeprefix("reward/"), mean(numbers))
            for name, shown in logged.extra.items():
                log_extra(name, shown)
            return {part.name: [None if math.isnan(value) else value for value in values]}

        found: dict[str, Sequence[float | None]] = {}
        for values in await all_of([graded(), *map(ran, self.parts)]):
            found |= values
        for name in self.weights:
            log_extra(name, found[name])
            if scored := [value for value in found[name] if value is not None]:
                log_metric(name, math.fsum(scored) / len(scored))
        totals = [self._total({name: values[row] for name, values in found.items()}) for row in range(len(completions))]
        log_metric("missing", sum(total is None for total in totals) / max(1, len(totals)))
        return totals

    def extract_answer(self, completion: str) -> str | None:
        found = (extracted_answer(part.function, completion) for part in self.parts)
        return next((answer for answer in found if answer is not None), None)

    async def close(self) -> None:  # type: ignore[override]
        for part in self.parts:
            await part.close()
        if self.judge is not None:
            await self.judge.close()

    def _total(self, values: Mapping[str, float | None]) -> float | None:
        """The weighted sum; None if a value with a non-zero weight is missing."""
        weighed = [(weight, values[name]) for name, weight in self.weights.items() if weight]
        known = [weight * value for weight, value in weighed if value is not None]
        return math.fsum(known) if len(known) == len(weighed) else None


class RubricJudge(ChatJudge):
    """The judge of a `Rubric`. Asks all questions about one completion in one request.

    Args:
        url: URL of an OpenAI-compatible server (see `ChatJudge`).
        model: Model name on the server.
        questions: Name -> question.
        scale: Maximum score.
        columns: Dataset columns to show to the judge.
        judge: Other arguments of `ChatJudge`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        questions: dict[str, str],
        scale: int = 10,
        columns: list[str] | None = None,
        **judge: Any,
    ) -> None:
        super().__init__(url, model, **judge)
        self.questions = questions
        self.scale = at_least("Rubric.scale", scale, 1)
        self.columns = list(columns or [])
        listed = json.dumps(questions, ensure_ascii=False, indent=1)
        form = ", ".join(
            f'{json.dumps(name, ensure_ascii=False)}: {{"reason": "...", "score": N}}' for name in questions
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
        **columns: Any,
    ) -> dict[str, Sequence[float | None]]:
        rows = rows_to_judge(completions, self.prompt_column, self.columns, columns)
        entry = object_schema(reason={"type": "string"}, score={"type": "integer", "enum": list(range(self.scale + 1))})
        schema = object_schema(**dict.fromkeys(self.questions, entry))
        judged = await all_of(
            self.ask(
                [
                    {"role": "system", "content": self.instruction},
                    {"role": "user", "content": [*pictures, {"type": "text", "text": quoted(row)}]},
                ],
                self._scores,
                schema,
            )
            for row, pictures in zip(rows, self.pictures(images, videos, len(rows)), strict=True)
        )
        self.report(judged, range(len(rows)), log_metric, log_extra)
        return {name: [None if one.value is None else one.value[name] for one in judged] for name in self.questions}

    def _scores(self, said: str) -> dict[str, float]:
        entries = read_json(said)
        if set(entries) != set(self.questions):
            raise ValueError(f"Its keys must be {', '.join(self.questions)}.")
        return {name: read_score(entry, self.scale) / self.scale for name, entry in entries.items()}

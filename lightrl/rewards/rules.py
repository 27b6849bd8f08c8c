"""Rule-based rewards. They don't read the prompt, so a format shown in the prompt never counts as an answer.

|y| is a completion's length in sampled tokens, including the end-of-sequence token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context
from typing import Any, Literal

from lightrl.engines.background import all_of
from lightrl.rewards.answers import EXTRACTORS, Extract, TimedPattern, to_number
from lightrl.rewards.base import (
    OFFERED,
    Reward,
    RewardError,
    RewardFunction,
    RewardSpec,
    extracted_answer,
    load_reward,
)

_CONTEXT = Context(Emax=MAX_EMAX, Emin=MIN_EMIN)  # numbers of any size


class ExactAnswer(Reward):
    r"""1 if the extracted answer equals the reference, 0 if it differs or is missing.

    If the reference is None or `pattern` takes more than one second, the completion is unscored. Logs `timeouts`, the
    fraction of completions on which `pattern` timed out.

    Args:
        column: Dataset column with the reference. References are compared as text.
        extract: How to find the answer in the completion: "text" (entire text), "gsm8k" (number after the last
            `####`), "boxed" (last `\boxed{}`), "number" (last number), "tags" (last `<answer>` tags), or "last_line".
        reference_extract: How to find the answer in the reference. The `answer` column of GSM8K requires "gsm8k".
        pattern: Regular expression that finds the answer instead of `extract`. The answer is the first group of the
            last match in the completion, or the whole match if the pattern has no groups.
        ignore_case: Compare case-insensitively.
        numeric: Compare by value if both answers are numbers: 42 = 42.0, 1,000 = 1000.

    Raises:
        RewardError: When called, if the column is missing or a reference contains no answer.
    """

    def __init__(
        self,
        column: str = "answer",
        extract: Extract = "text",
        reference_extract: Extract = "text",
        pattern: str | None = None,
        ignore_case: bool = False,
        numeric: bool = False,
    ) -> None:
        self.column = column
        self.needed_columns = (column,)
        self.extract = extract
        self.reference_extract = reference_extract
        self.pattern = None if pattern is None else TimedPattern(pattern)
        self.ignore_case = ignore_case
        self.numeric = numeric

    def __call__(
        self, completions: Sequence[str], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        column = column_of(columns, self.column)
        references = [None if reference is None else self._reference(reference) for reference in column]

        def equal(row: int) -> float | None:
            reference = references[row]
            return None if reference is None else float(self._equal(completions[row], reference))

        return _timed(equal, len(completions), log_metric)

    def extract_answer(self, completion: str) -> str | None:
        try:
            found = self._answer(completion)
        except TimeoutError:
            return None
        number = to_number(found) if self.numeric and found is not None else None
        if number is not None:
            return str(number.normalize(_CONTEXT))  # "1E+9": the digits of 1e999999999 would fill the memory
        return None if found is None else self._normal(found)

    def _reference(self, reference: Any) -> str:
        found = EXTRACTORS[self.reference_extract](str(reference))
        if found is None:
            raise RewardError(
                f"reference_extract={self.reference_extract!r}: finds no answer in {str(reference)[:80]!r} (column "
                f"{self.column!r}). Use a different reference_extract or fix the data."
            )
        return found

    def _answer(self, completion: str) -> str | None:
        return EXTRACTORS[self.extract](completion) if self.pattern is None else self.pattern.last(completion)

    def _equal(self, completion: str, reference: str) -> bool:
        answer = self._answer(completion)
        if answer is None:
            return False
        numbers = (to_number(answer), to_number(reference)) if self.numeric else (None, None)
        return numbers[0] == numbers[1] if None not in numbers else self._normal(answer) == self._normal(reference)

    def _normal(self, text: str) -> str:
        text = " ".join(text.split())  # whitespace makes no difference
        return text.casefold() if self.ignore_case else text


class RegexFormat(Reward):
    """1 if the completion matches a regular expression, 0 otherwise. Doesn't read the prompt.

    A completion on which the pattern takes more than one second is unscored. Logs the fraction of `timeouts`.

    Args:
        pattern: Python regular expression with inline flags, such as `(?s)<think>.*</think>\\s*<answer>.*</answer>`,
            in which `.` also matches newlines.
        match: "full" (match the entire completion, ignoring leading and trailing whitespace) or "search" (match
            anywhere).

    Source: the format reward of DeepSeek-R1, https://arxiv.org/abs/2501.12948.
    """

    def __init__(self, pattern: str, match: Literal["full", "search"] = "full") -> None:
        self.pattern = TimedPattern(pattern)
        self.match = match

    def __call__(
        self, completions: Sequence[str], log_metric: Callable[[str, float], None] | None = None
    ) -> list[float | None]:
        def matches(row: int) -> float | None:
            text = completions[row]
            return float(self.pattern.fullmatch(text.strip()) if self.match == "full" else self.pattern.search(text))

        return _timed(matches, len(completions), log_metric)


class LengthReward(Reward):
    """Penalizes the distance from a target length: `r = -alpha * | |y| - target |`.

    Args:
        target: Target length in tokens.
        column: Dataset column with the target of each example. Set either `target` or `column`.
        alpha: Penalty per token.

    Source: the length term of L1-Exact, https://arxiv.org/abs/2503.04697, eq. 1 (alpha = 0.0003). Use another reward
        function for the correctness term.
    """

    def __init__(self, target: int | None = None, column: str | None = None, alpha: float = 0.0003) -> None:
        if (target is None) == (column is None):
            raise ValueError(f"LengthReward.target={target}, column={column!r}: set exactly one of them.")
        self.target = target
        self.column = column
        self.needed_columns = () if column is None else (column,)
        self.alpha = alpha

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        targets = [self.target] * len(completion_ids) if self.column is None else column_of(columns, self.column)
        return [
            None if target is None else -self.alpha * abs(len(ids) - target)
            for ids, target in zip(completion_ids, targets, strict=True)
        ]


class RepetitionPenalty(Reward):
    """Penalizes repeated n-grams: `r = -max_penalty * (1 - #distinct n-grams / #n-grams)`, 0 for fewer than n items.

    Args:
        n: Number of items per n-gram.
        max_penalty: Maximum penalty, approached if a single n-gram repeats throughout.
        unit: "words" (lowercase, split at whitespace) or "tokens" (for text without spaces).

    Source: `get_repetition_penalty_reward` of https://github.com/huggingface/open-r1, after
    https://arxiv.org/abs/2502.03373. The formula is the same; open-r1 uses a negative `max_penalty` and only words.
    """

    def __init__(self, n: int = 3, max_penalty: float = 1.0, unit: Literal["words", "tokens"] = "words") -> None:
        self.n = n
        self.max_penalty = max_penalty
        self.unit = unit

    def __call__(self, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> list[float]:
        if self.unit == "tokens":
            return [self._penalty(ids) for ids in completion_ids]
        return [self._penalty(text.lower().split()) for text in completions]

    def _penalty(self, items: Sequence[Any]) -> float:
        ngrams = [tuple(items[i : i + self.n]) for i in range(len(items) - self.n + 1)]
        return self.max_penalty * (len(set(ngrams)) / len(ngrams) - 1) if ngrams else 0.0


class SoftOverlong(Reward):
    """Penalizes completions close to the length limit:

        r = 0                                    |y| <= max_tokens - buffer_tokens
        r = (max_tokens - buffer_tokens - |y|) / buffer_tokens      in between
        r = -1                                   |y| > max_tokens

    Args:
        max_tokens: Length limit, usually `max_new_tokens`.
        buffer_tokens: Number of tokens before the limit in which the penalty increases, in [1, max_tokens].

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 13. The paper uses max_tokens=20480 and buffer_tokens=4096.
    """

    def __init__(self, max_tokens: int, buffer_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.buffer_tokens = buffer_tokens

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        start = self.max_tokens - self.buffer_tokens
        return [max(-1.0, min(0.0, (start - len(ids)) / self.buffer_tokens)) for ids in completion_ids]


class NestedReward(Reward):
    """Base class of rewards that call other reward functions, by their name in logs and error messages."""

    def __init__(self, functions: Mapping[str, RewardSpec]) -> None:
        self.parts = [RewardFunction(name, load_reward(function)) for name, function in functions.items()]
        offered = (*OFFERED, "messages")
        names = (name for part in self.parts for name in (*part.needed_columns, *part.missing(offered)))
        self.needed_columns = tuple(dict.fromkeys(names))
        self.max_concurrency = min((p.max_concurrency for p in self.parts if p.max_concurrency), default=None)

    async def run_parts(
        self,
        rows: Mapping[str, Sequence[Any]],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
    ) -> list[list[float | None]]:
        """Returns each function's values. Logs their means and values, and what the functions log."""
        calls = await all_of(part.run(rows) for part in self.parts)
        found = []
        for part, (values, metrics, extra) in zip(self.parts, calls, strict=True):
            for name, number in metrics.items():
                log_metric(name.removeprefix("reward/"), number)
            for name, shown in extra.items():
                log_extra(name, shown)
            found.append([None if math.isnan(value) else value for value in values])
            log_values(part.name, found[-1], log_metric, log_extra)
        return found

    def extract_answer(self, completion: str) -> str | None:
        found = (extracted_answer(part.function, completion) for part in self.parts)
        return next((answer for answer in found if answer is not None), None)

    async def close(self) -> None:  # type: ignore[override]
        for part in self.parts:
            await part.close()


def log_values(
    name: str,
    values: Sequence[float | None],
    log_metric: Callable[[str, float], None],
    log_extra: Callable[[str, Sequence[Any]], None],
) -> None:
    """Logs the values of a part of a reward, and the mean of those that are not None."""
    log_extra(name, values)
    if scored := [value for value in values if value is not None]:
        log_metric(name, math.fsum(scored) / len(scored))


class CosineLength(NestedReward):
    """Scales a correctness reward by length with a cosine schedule:

        r = at_max + (at_zero - at_max) / 2 * (1 + cos(pi * |y| / max_tokens))       |y| < max_tokens
        r = exceed                                                                  |y| >= max_tokens

    (at_zero, at_max) depend on whether the completion is correct. By default, short correct completions get the highest
    reward, and long incorrect ones a smaller penalty than short incorrect ones. Unscored if `correct` returns None.

    Args:
        correct: Reward function for correctness, sync or `async`. Values of at least 0.5 mean correct.
        max_tokens: Length at which `exceed` applies.
        correct_at_zero: Reward of a correct completion of length 0.
        correct_at_max: Reward of a correct completion just below `max_tokens`.
        wrong_at_zero: Reward of an incorrect completion of length 0.
        wrong_at_max: Reward of an incorrect completion just below `max_tokens`.
        exceed: Reward of any completion of `max_tokens` or more.

    Source: https://arxiv.org/abs/2502.03373, section 4. Defaults from `get_cosine_scaled_reward` of
    https://github.com/huggingface/open-r1, which has no `exceed` and measures length in characters.
    """

    def __init__(
        self,
        correct: RewardSpec,
        max_tokens: int,
        correct_at_zero: float = 1.0,
        correct_at_max: float = 0.5,
        wrong_at_zero: float = -1.0,
        wrong_at_max: float = -0.5,
        exceed: float = -1.0,
    ) -> None:
        super().__init__({"correct": correct})
        self.max_tokens = max_tokens
        self.exceed = exceed
        self.right = (correct_at_zero, correct_at_max)
        self.wrong = (wrong_at_zero, wrong_at_max)

    async def __call__(self, completion_ids: Sequence[Sequence[int]], **rows: Any) -> list[float | None]:
        call = await self.parts[0].run({**rows, "completion_ids": completion_ids})
        return [self._shape(value, len(ids)) for value, ids in zip(call.values, completion_ids, strict=True)]

    def _shape(self, value: float, length: int) -> float | None:
        if math.isnan(value):
            return None
        if length >= self.max_tokens:
            return self.exceed
        at_zero, at_max = self.right if value >= 0.5 else self.wrong
        return at_max + (at_zero - at_max) / 2 * (1 + math.cos(math.pi * length / self.max_tokens))


def column_of(columns: dict[str, Any], name: str) -> Sequence[Any]:
    """The values of a dataset column. Raises a `RewardError` if it doesn't exist."""
    if name not in columns:
        raise RewardError(f"column={name!r}: not in the dataset. Use one of: {', '.join(sorted(columns))}.")
    return columns[name]  # type: ignore[no-any-return]


def _timed(
    score: Callable[[int], float | None], num_rows: int, log_metric: Callable[[str, float], None] | None
) -> list[float | None]:
    """`score(row)` of each row, None on a TimeoutError. Logs the fraction of timeouts as `timeouts`."""
    values: list[float | None] = []
    timeouts = 0
    for row in range(num_rows):
        try:
            values.append(score(row))
        except TimeoutError:
            values.append(None)
            timeouts += 1
    if log_metric is not None:
        log_metric("timeouts", timeouts / max(1, num_rows))
    return values

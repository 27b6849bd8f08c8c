"""Rewards by rule. None of them reads the prompt: a format that the prompt shows must not count as an answer.

|y| is a completion's length in sampled tokens, the end-of-sequence token included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from lightrl.compat.arguments import above, at_least, one_of
from lightrl.rewards.base import Reward, RewardError, RewardSpec, extracted_answer, load_reward, reward_name
from lightrl.rewards.calls import RewardFunction
from lightrl.rewards.extract import EXTRACTORS, Extract, to_number
from lightrl.rewards.patterns import TimedPattern

"""Longest completion that can be meant."""


class ExactAnswer(Reward):
    r"""1 where the extracted answer equals the reference, 0 where it differs or is missing.

    A row whose reference is None is not applicable (None).

    Args:
        column: data-set column with the reference; numbers are compared as their text.
        extract: how the answer is found in the completion: "text" (all of it), "gsm8k" (number after the last `####`),
            "boxed" (last `\boxed{}`), "number" (last number).
        reference_extract: the same for the reference; GSM8K's own `answer` column needs "gsm8k".
        pattern: a regular expression that finds the answer instead of `extract`: the first group (or all) of its last
            match in the completion.
        ignore_case: compare without regard to case.
        ignore_whitespace: a run of whitespace counts as one space, and none at the ends.
        numeric: two answers that are both numbers are compared by value: 42 = 42.0, 1,000 = 1000.
        timeout: seconds that `pattern` may take on one completion, above 0. What takes longer is logged as
            `timeouts`, a fraction of the rows.
        timeout_value: reward of a completion on which `pattern` ran out of time; None leaves it unscored.

    Raises:
        ValueError: `pattern` beside an `extract`, an invalid pattern, or a number out of range.
        RewardError: (when called) no such column, or a reference without an answer.
    """

    def __init__(
        self,
        column: str = "answer",
        extract: Extract = "text",
        reference_extract: Extract = "text",
        pattern: str | None = None,
        ignore_case: bool = False,
        ignore_whitespace: bool = True,
        numeric: bool = False,
        timeout: float = 1.0,
        timeout_value: float | None = None,
    ) -> None:
        if pattern is not None and extract != "text":
            raise ValueError(f"ExactAnswer: extract={extract!r} and pattern={pattern!r} exclude one another.")
        self.column = column
        self.needed_columns = (column,)
        self.extract = one_of("ExactAnswer.extract", extract, *EXTRACTORS)
        self.reference_extract = one_of("ExactAnswer.reference_extract", reference_extract, *EXTRACTORS)
        above("ExactAnswer.timeout", timeout, note=" seconds")
        self.pattern = None if pattern is None else TimedPattern("ExactAnswer", pattern, timeout)
        self.ignore_case = ignore_case
        self.ignore_whitespace = ignore_whitespace
        self.numeric = numeric
        self.timeout_value = timeout_value

    def __call__(
        self, completions: Sequence[str], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        column = _column(self.column, columns)
        references = [None if reference is None else self._reference(reference) for reference in column]

        def equal(row: int) -> float | None:
            reference = references[row]
            return None if reference is None else float(self._equal(completions[row], reference))

        return _timed(equal, len(completions), self.timeout_value, log_metric)

    def _reference(self, reference: Any) -> str:
        found = EXTRACTORS[self.reference_extract](str(reference))
        if found is None:
            raise RewardError(
                f"column {self.column!r} holds {str(reference)[:80]!r}, in which reference_extract="
                f"{self.reference_extract!r} finds no answer."
            )
        return found

    def _equal(self, completion: str, reference: str) -> bool:
        answer = EXTRACTORS[self.extract](completion)
        if self.pattern is not None:
            answer = self.pattern.last(completion)
        if answer is None:
            return False
        if self.numeric:
            numbers = to_number(answer), to_number(reference)
            if None not in numbers:
                return numbers[0] == numbers[1]
        return self._normal(answer) == self._normal(reference)

    def extract_answer(self, completion: str) -> str | None:
        try:
            found = EXTRACTORS[self.extract](completion) if self.pattern is None else self.pattern.last(completion)
        except TimeoutError:
            return None
        if found is None:
            return None
        number = to_number(found) if self.numeric else None
        return self._normal(found) if number is None else f"{number.normalize():f}"

    def _normal(self, text: str) -> str:
        text = " ".join(text.split()) if self.ignore_whitespace else text
        return text.casefold() if self.ignore_case else text


class RegexFormat(Reward):
    """1 where the completion matches a regular expression, else 0. Only the completion's text is looked at.

    Args:
        pattern: Python regular expression; flags go inside, for example
            `(?s)<think>.*</think>\\s*<answer>.*</answer>` where `.` also matches line breaks.
        match: "full" (the whole completion, whitespace at its ends apart) or "search" (anywhere in it).
        timeout: seconds that the pattern may take on one completion, above 0. What takes longer is logged as
            `timeouts`, a fraction of the rows.
        timeout_value: reward of a completion on which the pattern ran out of time; None leaves it unscored.

    Raises:
        ValueError: an invalid pattern, or an argument out of range.

    Source: the format reward of https://arxiv.org/abs/2501.12948.
    """

    def __init__(
        self,
        pattern: str,
        match: Literal["full", "search"] = "full",
        timeout: float = 1.0,
        timeout_value: float | None = None,
    ) -> None:
        self.pattern = TimedPattern("RegexFormat", pattern, timeout)
        self.match = one_of("RegexFormat.match", match, "full", "search")
        self.timeout_value = timeout_value

    def __call__(
        self, completions: Sequence[str], log_metric: Callable[[str, float], None] | None = None
    ) -> list[float | None]:
        def matches(row: int) -> float | None:
            text = completions[row]
            return float(self.pattern.fullmatch(text.strip()) if self.match == "full" else self.pattern.search(text))

        return _timed(matches, len(completions), self.timeout_value, log_metric)


class LengthReward(Reward):
    """Distance from a wanted length: `r = -alpha * | |y| - target |`.

    Args:
        target: wanted length in tokens, 0 or more.
        column: data-set column with it, per row; give one of the two.
        alpha: penalty per token, above 0.

    Raises:
        ValueError: both or none of `target` and `column`, or a number out of range.

    Source: the length term of L1-Exact, https://arxiv.org/abs/2503.04697, eq. 1 (alpha = 0.0003). We leave the
    correctness term to another function.
    """

    def __init__(self, target: int | None = None, column: str | None = None, alpha: float = 0.0003) -> None:
        if (target is None) == (column is None):
            raise ValueError(f"LengthReward: target={target!r}, column={column!r}: give exactly one of the two.")
        self.target = at_least("LengthReward.target", target, 0, or_none="with column")
        self.column = column
        self.needed_columns = () if column is None else (column,)
        self.alpha = above("LengthReward.alpha", alpha)

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        targets = [self.target] * len(completion_ids) if self.column is None else _column(self.column, columns)
        return [
            None if target is None else -self.alpha * abs(len(ids) - target)
            for ids, target in zip(completion_ids, targets, strict=True)
        ]


class RepetitionPenalty(Reward):
    """Share of repeated n-grams: `r = -max_penalty * (1 - #distinct n-grams / #n-grams)`, 0 for fewer than n items.

    Args:
        n: items per n-gram, at least 1.
        max_penalty: the penalty that a completion of one n-gram only comes close to, above 0.
        unit: "words" (split at whitespace, lower case) or "tokens" (for text without spaces).

    Source: `get_repetition_penalty_reward` of https://github.com/huggingface/open-r1, after
    https://arxiv.org/abs/2502.03373. Same formula; there the sign is in `max_penalty`, and units are words only.
    """

    def __init__(self, n: int = 3, max_penalty: float = 1.0, unit: Literal["words", "tokens"] = "words") -> None:
        self.n = at_least("RepetitionPenalty.n", n, 1)
        self.max_penalty = max_penalty
        above("RepetitionPenalty.max_penalty", max_penalty)
        self.unit = one_of("RepetitionPenalty.unit", unit, "words", "tokens")

    def __call__(self, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> list[float]:
        if self.unit == "tokens":
            return [self._penalty(ids) for ids in completion_ids]
        return [self._penalty(text.lower().split()) for text in completions]

    def _penalty(self, items: Sequence[Any]) -> float:
        ngrams = [tuple(items[i : i + self.n]) for i in range(len(items) - self.n + 1)]
        return self.max_penalty * (len(set(ngrams)) / len(ngrams) - 1) if ngrams else 0.0


class SoftOverlong(Reward):
    """Penalty for a completion that comes close to the length limit:

        r = 0                                    |y| <= max_tokens - buffer_tokens
        r = (max_tokens - buffer_tokens - |y|) / buffer_tokens      in between
        r = -1                                   |y| > max_tokens

    Args:
        max_tokens: the limit, usually `max_new_tokens`.
        buffer_tokens: width of the soft zone below it, between 1 and `max_tokens`.

    Source: DAPO, https://arxiv.org/abs/2503.14476, eq. 13 (16384 + 4096 tokens there, that is max_tokens=20480,
    buffer_tokens=4096).
    """

    def __init__(self, max_tokens: int, buffer_tokens: int) -> None:
        if not 1 <= buffer_tokens <= max_tokens:
            raise ValueError(f"SoftOverlong: buffer_tokens={buffer_tokens}; must be in [1, max_tokens={max_tokens}].")
        self.max_tokens = max_tokens
        self.buffer_tokens = buffer_tokens

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        start = self.max_tokens - self.buffer_tokens
        return [max(-1.0, min(0.0, (start - len(ids)) / self.buffer_tokens)) for ids in completion_ids]


class CosineLength(Reward):
    """A correctness reward shaped by length along half a cosine:

        r = at_max + (at_zero - at_max) / 2 * (1 + cos(pi * |y| / max_tokens))       |y| < max_tokens
        r = exceed                                                                  |y| >= max_tokens

    with (at_zero, at_max) of right or wrong answers. By default short right answers earn most, and wrong ones lose less
    the longer they thought. None where `correct` says None.

    Args:
        correct: the reward function that tells right (at least 0.5) from wrong; plain or `async`.
        max_tokens: length at which `exceed` applies, at least 1.
        correct_at_zero: value of a right answer at length 0.
        correct_at_max: just below `max_tokens`.
        wrong_at_zero: value of a wrong answer at length 0.
        wrong_at_max: just below `max_tokens`.
        exceed: value at `max_tokens` and beyond, right or wrong.

    Source: https://arxiv.org/abs/2502.03373, section 4. Default values as `get_cosine_scaled_reward` of
    https://github.com/huggingface/open-r1, which has no `exceed` and measures characters; we measure tokens.

    Raises:
        ValueError: a number that cannot be a reward, or out of range.
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
        function = load_reward(correct)
        self.correct = RewardFunction(f"CosineLength.correct={reward_name(function)}", function)
        self.max_concurrency = self.correct.max_concurrency
        self.needed_columns = self.correct.needed_columns
        self.max_tokens = at_least("CosineLength.max_tokens", max_tokens, 1)
        self.exceed = exceed
        self.right = (correct_at_zero, correct_at_max)
        self.wrong = (wrong_at_zero, wrong_at_max)

    async def __call__(self, completion_ids: Sequence[Sequence[int]], **rows: Any) -> list[float | None]:
        offered = {name: value for name, value in rows.items() if name not in ("log_metric", "log_extra")}
        values, _ = await self.correct.run({**offered, "completion_ids": completion_ids}, timeout=None)
        return [self._shape(value, len(ids)) for value, ids in zip(values, completion_ids, strict=True)]

    def extract_answer(self, completion: str) -> str | None:
        return extracted_answer(self.correct.function, completion)

    def _shape(self, value: float, length: int) -> float | None:
        if math.isnan(value):
            return None
        if length >= self.max_tokens:
            return self.exceed
        at_zero, at_max = self.right if value >= 0.5 else self.wrong
        return at_max + (at_zero - at_max) / 2 * (1 + math.cos(math.pi * length / self.max_tokens))

    def close(self) -> Any:
        return getattr(self.correct.function, "close", lambda: None)()


def _column(name: str, columns: dict[str, Any]) -> Sequence[Any]:
    if name not in columns:
        raise RewardError(f"column={name!r} is not in the data set; it has: {', '.join(sorted(columns))}.")
    return columns[name]  # type: ignore[no-any-return]


def _timed(
    score: Callable[[int], float | None],
    num_rows: int,
    timeout_value: float | None,
    log_metric: Callable[[str, float], None] | None,
) -> list[float | None]:
    """`score(row)` of each row; `timeout_value` where it raises a TimeoutError. Logs their fraction as `timeouts`."""
    values: list[float | None] = []
    timeouts = 0
    for row in range(num_rows):
        try:
            values.append(score(row))
        except TimeoutError:
            values.append(timeout_value)
            timeouts += 1
    if log_metric is not None:
        log_metric("timeouts", timeouts / max(1, num_rows))
    return values

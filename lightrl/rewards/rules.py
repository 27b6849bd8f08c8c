"""Rule-based rewards. They don't read the prompt, so a format shown in the prompt never counts as an answer.

|y| is a completion's length in sampled tokens, including the end-of-sequence token.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

from lightrl.compat.arguments import above, at_least, one_of
from lightrl.rewards.answers import (
    EXTRACTORS,
    Extract,
    TimedPattern,
    extract_boxed,
    extract_last_line,
    extract_number,
    extract_tags,
    to_number,
)
from lightrl.rewards.base import (
    ONLY_BY_NAME,
    Reward,
    RewardError,
    RewardFunction,
    RewardSpec,
    RewardValues,
    extracted_answer,
    load_reward,
    reward_name,
)

_RULES: dict[str, Callable[[list[float]], float]] = {"product": math.prod, "min": min, "max": max}
_GYM_EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "tags": extract_tags,
    "boxed": extract_boxed,
    "number": extract_number,
    "last_line": extract_last_line,
    "text": str.strip,
}


class ExactAnswer(Reward):
    r"""1 if the extracted answer equals the reference, 0 if it differs or is missing.

    If the reference is None, the completion is unscored. Logs `timeouts`, the fraction of completions on which
    `pattern` timed out.

    Args:
        column: Dataset column with the reference. References are compared as text.
        extract: How to find the answer in the completion: "text" (entire text), "gsm8k" (number after the last
            `####`), "boxed" (last `\boxed{}`), or "number" (last number).
        reference_extract: How to find the answer in the reference. The `answer` column of GSM8K requires "gsm8k".
        pattern: Regular expression that finds the answer instead of `extract`. The answer is the first group of the
            last match in the completion, or the whole match if the pattern has no groups.
        ignore_case: Compare case-insensitively.
        ignore_whitespace: Strip leading and trailing whitespace and collapse other whitespace to one space.
        numeric: Compare by value if both answers are numbers: 42 = 42.0, 1,000 = 1000.
        timeout: Time limit of `pattern` per completion in seconds, above 0.
        timeout_value: Reward of a completion on which `pattern` timed out. None leaves it unscored.

    Raises:
        ValueError: Both `pattern` and `extract` are set, `pattern` is invalid, or a number is out of range.
        RewardError: When called, if the column is missing or a reference contains no answer.
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
            raise ValueError(
                f"ExactAnswer: extract={extract!r} and pattern={pattern!r} are mutually exclusive. Set only one."
            )
        self.column = column
        self.needed_columns = (column,)
        self.extract = one_of("ExactAnswer.extract", extract, *EXTRACTORS)
        self.reference_extract = one_of("ExactAnswer.reference_extract", reference_extract, *EXTRACTORS)
        self.pattern = None if pattern is None else TimedPattern("ExactAnswer", pattern, timeout)
        self.ignore_case = ignore_case
        self.ignore_whitespace = ignore_whitespace
        self.numeric = numeric
        self.timeout_value = timeout_value

    def __call__(
        self, completions: Sequence[str], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        column = column_of(columns, self.column)
        references = [None if reference is None else self._reference(reference) for reference in column]

        def equal(row: int) -> float | None:
            reference = references[row]
            return None if reference is None else float(self._equal(completions[row], reference))

        return _timed(equal, len(completions), self.timeout_value, log_metric)

    def extract_answer(self, completion: str) -> str | None:
        try:
            found = self._answer(completion)
        except TimeoutError:
            return None
        number = to_number(found) if self.numeric and found is not None else None
        if number is not None:
            return f"{number.normalize():f}"
        return None if found is None else self._normal(found)

    def _reference(self, reference: Any) -> str:
        found = EXTRACTORS[self.reference_extract](str(reference))
        if found is None:
            raise RewardError(
                f"reference_extract={self.reference_extract!r}: finds no answer in {str(reference)[:80]!r} (column "
                f"{self.column!r}). Use another reference_extract or fix the data."
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
        text = " ".join(text.split()) if self.ignore_whitespace else text
        return text.casefold() if self.ignore_case else text


class RegexFormat(Reward):
    """1 if the completion matches a regular expression, 0 otherwise. Doesn't read the prompt.

    Args:
        pattern: Python regular expression with inline flags, such as `(?s)<think>.*</think>\\s*<answer>.*</answer>`,
            in which `.` also matches newlines.
        match: "full" (match the entire completion, ignoring leading and trailing whitespace) or "search" (match
            anywhere).
        timeout: Time limit of the pattern per completion in seconds, above 0. Logs the fraction of timeouts as
            `timeouts`.
        timeout_value: Reward of a completion on which the pattern timed out. None leaves it unscored.

    Raises:
        ValueError: The pattern is invalid, or an argument is out of range.

    Source: the format reward of DeepSeek-R1, https://arxiv.org/abs/2501.12948.
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
    """Penalizes the distance from a target length: `r = -alpha * | |y| - target |`.

    Args:
        target: Target length in tokens.
        column: Dataset column with the target of each example. Set either `target` or `column`.
        alpha: Penalty per token, above 0.

    Raises:
        ValueError: Both or neither of `target` and `column` are set, or a number is out of range.

    Source: the length term of L1-Exact, https://arxiv.org/abs/2503.04697, eq. 1 (alpha = 0.0003). Use another reward
        function for the correctness term.
    """

    def __init__(self, target: int | None = None, column: str | None = None, alpha: float = 0.0003) -> None:
        if (target is None) == (column is None):
            raise ValueError(f"LengthReward: target={target!r}, column={column!r}: set exactly one.")
        self.target = at_least("LengthReward.target", target, 0, or_none="with column")
        self.column = column
        self.needed_columns = () if column is None else (column,)
        self.alpha = above("LengthReward.alpha", alpha)

    def __call__(self, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        targets = [self.target] * len(completion_ids) if self.column is None else column_of(columns, self.column)
        return [
            None if target is None else -self.alpha * abs(len(ids) - target)
            for ids, target in zip(completion_ids, targets, strict=True)
        ]


class RepetitionPenalty(Reward):
    """Penalizes repeated n-grams: `r = -max_penalty * (1 - #distinct n-grams / #n-grams)`, 0 for fewer than n items.

    Args:
        n: Number of items per n-gram, at least 1.
        max_penalty: Maximum penalty, approached if a single n-gram repeats throughout. Must be above 0.
        unit: "words" (lowercase, split at whitespace) or "tokens" (for text without spaces).

    Source: `get_repetition_penalty_reward` of https://github.com/huggingface/open-r1, after
    https://arxiv.org/abs/2502.03373. The formula is the same; open-r1 uses a negative `max_penalty` and only words.
    """

    def __init__(self, n: int = 3, max_penalty: float = 1.0, unit: Literal["words", "tokens"] = "words") -> None:
        self.n = at_least("RepetitionPenalty.n", n, 1)
        self.max_penalty = above("RepetitionPenalty.max_penalty", max_penalty)
        self.unit = one_of("RepetitionPenalty.unit", unit, "words", "tokens")

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
        if not 1 <= buffer_tokens <= max_tokens:
            raise ValueError(
                f"SoftOverlong: buffer_tokens={buffer_tokens}: must be in [1, max_tokens={max_tokens}]. Change one."
            )
        self.max_tokens = max_tokens
        self.buffer_tokens = buffer_tokens

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        start = self.max_tokens - self.buffer_tokens
        return [max(-1.0, min(0.0, (start - len(ids)) / self.buffer_tokens)) for ids in completion_ids]


class CosineLength(Reward):
    """Scales a correctness reward by length with a cosine schedule:

        r = at_max + (at_zero - at_max) / 2 * (1 + cos(pi * |y| / max_tokens))       |y| < max_tokens
        r = exceed                                                                  |y| >= max_tokens

    (at_zero, at_max) depend on whether the completion is correct. By default, short correct completions get the highest
    reward, and long incorrect ones a smaller penalty than short incorrect ones. Unscored if `correct` returns None.

    Args:
        correct: Reward function for correctness, sync or `async`. Values of at least 0.5 mean correct.
        max_tokens: Length at which `exceed` applies, at least 1.
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
        function = load_reward(correct)
        self.correct = RewardFunction(f"CosineLength.correct={reward_name(function)}", function)
        self.max_concurrency = self.correct.max_concurrency
        self.needed_columns = self.correct.needed_columns
        self.max_tokens = at_least("CosineLength.max_tokens", max_tokens, 1)
        self.exceed = exceed
        self.right = (correct_at_zero, correct_at_max)
        self.wrong = (wrong_at_zero, wrong_at_max)

    async def __call__(self, completion_ids: Sequence[Sequence[int]], **rows: Any) -> list[float | None]:
        values, _ = await self.correct.run({**rows, "completion_ids": completion_ids}, timeout=None)
        return [self._shape(value, len(ids)) for value, ids in zip(values, completion_ids, strict=True)]

    def extract_answer(self, completion: str) -> str | None:
        return extracted_answer(self.correct.function, completion)

    async def close(self) -> None:  # type: ignore[override]
        await self.correct.close()

    def _shape(self, value: float, length: int) -> float | None:
        if math.isnan(value):
            return None
        if length >= self.max_tokens:
            return self.exceed
        at_zero, at_max = self.right if value >= 0.5 else self.wrong
        return at_max + (at_zero - at_max) / 2 * (1 + math.cos(math.pi * length / self.max_tokens))


class CombinedReward(Reward):
    """Combines several reward functions by product, minimum, maximum, or a custom function.

        r = prod_f r_f    (a correct answer in the wrong format gets 0)      min_f r_f      max_f r_f

    Uses only the functions that scored the completion; None if none did. Functions run concurrently. Logs the mean of
    each function as `reward/CombinedReward/<function>` and shows its values with the completions.

    Args:
        rewards: At least two reward functions. They can't use images, videos, audios, or `training_progress`.
        by: `product`, `min`, `max`, or a function (in YAML, an import path). A function takes a dictionary of name -> n
            values (number or None) and returns n values.
        names: Name of each function. Defaults to the name of the function or class.

    Raises:
        ValueError: There are fewer than two functions, names are duplicated, the rule is unknown, or a function uses
            media.
    """

    def __init__(
        self,
        rewards: list[RewardSpec],
        by: str | Callable[..., Any] = "product",
        names: list[str] | None = None,
    ) -> None:
        functions = [load_reward(reward) for reward in rewards]
        names = [reward_name(function) for function in functions] if names is None else names
        if len(functions) < 2 or len(set(names)) < len(functions) or len(names) != len(functions):
            raise ValueError(
                f"CombinedReward: names={names}: needs at least two functions with unique names, got {len(functions)} "
                "functions. Add functions or set names=[...]."
            )
        self.parts = [RewardFunction(name, function) for name, function in zip(names, functions, strict=True)]
        self.needed_columns = tuple(name for part in self.parts for name in part.needed_columns)
        for part in self.parts:
            if unheard := part.needs.intersection(ONLY_BY_NAME):
                raise ValueError(
                    f"CombinedReward: rewards: {part.name!r} uses {', '.join(sorted(unheard))}, which nested reward "
                    "functions don't receive. Add it to data.rewards next to CombinedReward."
                )
        if isinstance(by, str) and by not in _RULES and "." not in by:
            raise ValueError(
                f"CombinedReward: by={by!r}: is unknown. Use {', '.join(_RULES)}, or the import path of a function."
            )
        self.max_concurrency = min((p.max_concurrency for p in self.parts if p.max_concurrency), default=None)
        self._rule = _RULES.get(by) if isinstance(by, str) else None
        self._own = load_reward(by) if self._rule is None else None

    async def __call__(
        self,
        completions: Sequence[str],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
        **rows: Any,
    ) -> RewardValues:
        offered = {**rows, "completions": completions}
        ran = await asyncio.gather(*(part.run(offered, timeout=None) for part in self.parts))
        parts = {
            part.name: [None if math.isnan(value) else value for value in values]
            for part, (values, _) in zip(self.parts, ran, strict=True)
        }
        for name, values in parts.items():
            log_extra(name, values)
            if scored := [value for value in values if value is not None]:
                log_metric(name, math.fsum(scored) / len(scored))
        if self._own is not None:
            made = self._own(parts)
            return await made if inspect.isawaitable(made) else made  # type: ignore[no-any-return]
        return [self._of_row([values[row] for values in parts.values()]) for row in range(len(completions))]

    def extract_answer(self, completion: str) -> str | None:
        found = (extracted_answer(part.function, completion) for part in self.parts)
        return next((answer for answer in found if answer is not None), None)

    async def close(self) -> None:  # type: ignore[override]
        for part in self.parts:
            await part.close()

    def _of_row(self, values: list[float | None]) -> float | None:
        scored = [value for value in values if value is not None]
        return self._rule(scored) if self._rule is not None and scored else None


class ReasoningGymReward(Reward):
    """Scores the answer with the example's reasoning-gym generator, in [0, 1]; 0 if the completion has no answer.

    Use it with `ReasoningGymRows`. Generators may give partial credit, so the mean reward is not an
    accuracy. The metric `reward/ReasoningGymReward/solved` is: the fraction of completions with a score of 1.

    Args:
        extract: How to find the answer in the completion: "tags" (last `<answer>` tags, as in reasoning-gym's system
            prompts), "boxed" (last `\\boxed{}`), "number" (last number), "last_line", or "text" (entire text).

    Source: https://github.com/open-thought/reasoning-gym (`score_answer`). Unlike its training scripts, adds no format
        bonus; use `RegexFormat` for that.
    """

    needed_columns = ("gym",)

    def __init__(self, extract: Literal["tags", "boxed", "number", "last_line", "text"] = "tags") -> None:
        self.extract = one_of("ReasoningGymReward.extract", extract, *_GYM_EXTRACTORS)

    def __call__(
        self,
        completions: Sequence[str],
        gym: Sequence[str],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        scores = [self._score(text, made) for text, made in zip(completions, gym, strict=True)]
        if log_metric is not None and scores:
            log_metric("solved", scores.count(1.0) / len(scores))
        return scores

    def extract_answer(self, completion: str) -> str | None:
        return _GYM_EXTRACTORS[self.extract](completion)

    def _score(self, completion: str, made: str) -> float:
        answer = self.extract_answer(completion)
        if answer is None:
            return 0.0
        score, item = _gym_scorer(made)
        return float(score(answer, item))


@lru_cache(maxsize=4096)
def _gym_scorer(made: str) -> tuple[Callable[[str, Any], float], Any]:
    """The generator's scorer and the item, recreated from the column `gym`."""
    row = json.loads(made)
    items = _gym_items(row["name"], json.dumps(row["settings"]), row["seed"], row["size"])
    return items.score_answer, items[row["index"]]


@lru_cache(maxsize=64)
def _gym_items(name: str, settings: str, seed: int, size: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(settings))


def column_of(columns: dict[str, Any], name: str) -> Sequence[Any]:
    """The values of a dataset column. Raises a `RewardError` if it doesn't exist."""
    if name not in columns:
        raise RewardError(f"column={name!r}: is not in the dataset. Use one of: {', '.join(sorted(columns))}.")
    return columns[name]  # type: ignore[no-any-return]


def _timed(
    score: Callable[[int], float | None],
    num_rows: int,
    timeout_value: float | None,
    log_metric: Callable[[str, float], None] | None,
) -> list[float | None]:
    """`score(row)` of each row, or `timeout_value` on a TimeoutError. Logs the fraction of timeouts as `timeouts`."""
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

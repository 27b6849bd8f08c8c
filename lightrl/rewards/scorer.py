"""Runs the reward functions of a run concurrently, beside generation, and sums their rewards.

total[i] = sum over functions f that scored row i of weight_f * r_f[i]      NaN where none did
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from lightrl.compat.arguments import MAX_REWARD, above, at_least, one_of
from lightrl.engines.background import BackgroundLoop, all_of
from lightrl.records import Scores
from lightrl.rewards.base import RewardError, RewardSpec, extracted_answer, load_reward, reward_name
from lightrl.rewards.calls import CallFailed, CallLog, RewardFunction, mean
from lightrl.rewards.media import MEDIA

OFFERED = ("prompts", "completions", "completion_ids", "group_ids", "training_progress", *MEDIA)
"""What every function may name in addition to the data set's columns."""
OWN_NAMES = ("prompts", "completions", "completion_ids", "group_ids", "training_progress", "log_metric", "log_extra")
"""Arguments of reward functions that would hide a column of the same name."""

log = logging.getLogger(__name__)


class ScoreHandle:
    """The scores of one submission, there when the slowest function is done."""

    def __init__(self, future: concurrent.futures.Future[Scores]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, Scores]:
        """Waits on an event loop; a wait that is cancelled gives the scoring up."""
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout: float | None = None) -> Scores:
        """Waits for the scores.

        Args:
            timeout: seconds to wait; None waits until they are there.

        Raises:
            RewardError: a function failed. TimeoutError: not there within `timeout`; it may be asked again.
        """
        try:
            while timeout is None:  # in slices: a Ctrl-C that comes just before a wait does not end it
                with suppress(concurrent.futures.TimeoutError):
                    return self._future.result(0.5)
                if self._future.done():
                    break
            return self._future.result(timeout)
        except concurrent.futures.CancelledError as error:
            raise RewardError("the RewardScorer was closed before these rows were scored.") from error


class RewardScorer:
    """Scores groups of completions with several reward functions at once.

    Every submission is scored by all functions at the same time: an `async` function on an event loop of its own in a
    background thread, others in a daemon thread per call, so none blocks another and `submit` returns at once. At most
    `max_concurrency` calls of each function run at a time.

    Args:
        functions: reward functions (`RewardFn`), `Reward` objects or import paths (see `load_reward`), at least one.
        weights: one per function; 1 each where None. A function of weight 0 is run and logged but scores nothing.
        names: one per function, for logs and rewards_by_label; the function's or class's own name where None.
        rewards_by_label: label -> [(function's name, weight), ...]. A row is scored by the functions of its label and
        by no
            others; a function runs only on the rows that need it. Excludes `weights`.
        label_column: data-set column that holds the label; only used with `rewards_by_label`.
        max_concurrency: most calls of one function at a time. A function's own `max_concurrency` attribute wins.
        timeout: seconds that one call may take from its start; None waits for ever. A function that is not `async`
            cannot be stopped: its thread is left behind and its result ignored.
        on_reward_error: what an exception or a time-out means: "error" ends the run, "none" gives None for the rows of
            that call, logs a warning and counts them in `reward/<function>/failed`. Mistakes in the set-up are always
            an error: values that are no rewards (wrong length, NaN, no number), missing columns, a `RewardError` that
            the function raises itself.

    Attributes:
        names: one per function.
        weights: name -> weight, without the functions whose weight differs between labels.

    Raises:
        ValueError: lengths that differ, equal names, unknown functions, numbers out of range.
    """

    def __init__(
        self,
        functions: Sequence[RewardSpec],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        rewards_by_label: Mapping[str, Sequence[tuple[str, float]]] | None = None,
        label_column: str = "label",
        max_concurrency: int = 32,
        timeout: float | None = None,
        on_reward_error: Literal["error", "skip"] = "error",
    ) -> None:
        loaded = [load_reward(function) for function in functions]
        names = [reward_name(function) for function in loaded] if names is None else names
        _check(loaded, names, weights, rewards_by_label)
        self.names = list(names)
        at_least("max_concurrency", max_concurrency, 1)
        self.rewards_by_label = (
            None if rewards_by_label is None else {label: dict(parts) for label, parts in rewards_by_label.items()}
        )
        self.weights = _weights(self.names, weights, self.rewards_by_label)
        self.label_column = label_column
        self.timeout = above("timeout", timeout, or_none="for no limit")
        self.on_reward_error = one_of("on_reward_error", on_reward_error, "error", "skip")
        self._functions = [RewardFunction(name, function) for name, function in zip(self.names, loaded, strict=True)]
        self._limits = [function.max_concurrency or max_concurrency for function in self._functions]
        self._loop = BackgroundLoop("rewards")
        self._slots = [asyncio.Semaphore(limit) for limit in self._limits]
        self._warned: set[str] = set()
        self._progress = 0.0

    def extract_answer(self, completion: str, label: Any = None) -> str | None:
        """The answer in a completion, by the first function for rows of this label that finds one."""
        chosen = self.names if self.rewards_by_label is None else self.rewards_by_label.get(label, ())
        for function in self._functions:
            if function.name in chosen:
                answer = extracted_answer(function.function, completion)
                if answer is not None:
                    return answer
        return None

    def submit(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        group_ids: Sequence[int],
        media: Mapping[str, Sequence[Any]] | None = None,
    ) -> ScoreHandle:
        """Starts scoring n rows and returns at once.

        Args:
            prompts: n strings. completions: n strings. completion_ids: n lists of token ids.
            columns: data-set column -> n values.
            group_ids: n integers. All completions of a prompt belong into one submission.
            media: `images` and `videos`, n lists each, decoded; they go before columns of these names. None for text.

        Raises:
            ValueError: lengths that differ, or a row with an unknown label.
        """
        rows: dict[str, Sequence[Any]] = {**columns, **(media or {})}
        rows.update(prompts=prompts, completions=completions, completion_ids=completion_ids, group_ids=group_ids)
        rows["training_progress"] = [self._progress] * len(completions)
        wrong = {name: len(values) for name, values in rows.items() if len(values) != len(completions)}
        if wrong:
            raise ValueError(f"RewardScorer.submit: {len(completions)} completions, but {wrong} values.")
        weights = self._row_weights(rows, len(completions))
        return ScoreHandle(self._loop.submit(self._score(rows, weights)))

    def set_progress(self, fraction: float) -> None:
        """Tells how much of the run is done, in [0, 1]; functions that name `training_progress` get it."""
        self._progress = fraction

    def require_columns(self, columns: Iterable[str]) -> None:
        """Raises a `ValueError` where a function needs what neither these data-set columns nor LightRL offer."""
        offered = {*columns, *OFFERED}
        for function in self._functions:
            if complaint := function.complaint(offered):
                raise ValueError(complaint)
        self._require_labels(offered)

    def check_source(
        self, columns: Collection[str], source: str, labels: Iterable[Any] | None = None, mixed: Iterable[str] = ()
    ) -> None:
        """Raises a `ValueError` where a function that scores rows of this source needs what none of them has.

        Args:
            columns: of the source.
            source: what messages call it.
            labels: those of its rows; None where they are not known, as of a stream.
            mixed: columns of sources that it is mixed with; it has None there, which `Reward.needed_columns` may hold.
        """
        used = set(self.names)
        if self.rewards_by_label is not None:
            rewards_by_label = (
                [self.rewards_by_label[label] for label in labels]
                if labels is not None
                else list(self.rewards_by_label.values())
            )
            used = (
                set.union(*map(set, rewards_by_label))
                if labels is not None
                else set.intersection(*map(set, rewards_by_label))
            )
        for function in self._functions:
            if function.name not in used:
                continue
            if lacking := sorted({*function.needed_columns} - {*columns, *mixed}):
                raise ValueError(
                    f"reward function {function.name!r}: column={lacking[0]!r} is not in {source}; there are: "
                    f"{', '.join(sorted(columns))}. Name the column with the reference, or add it."
                )
            if complaint := function.complaint({*columns, *OFFERED}, source):
                raise ValueError(
                    f"{complaint} Add the column there (null where there is nothing to compare), give the parameter a "
                    "default, or tell the functions of rows apart by `rewards_by_label`."
                )

    def check_label(self, row: Mapping[str, Any]) -> None:
        """Raises a `ValueError` where there are rewards_by_label, and none for the label of a row."""
        if self.rewards_by_label is None:
            return
        label = row.get(self.label_column)
        try:
            known = label in self.rewards_by_label
        except TypeError:  # a list
            known = False
        if not known:
            raise ValueError(
                f"has label {label!r} (column {self.label_column!r}), which is not in rewards_by_label; known labels: "
                f"{', '.join(map(repr, self.rewards_by_label))}. "
                "Add the label (an empty list scores nothing) or drop such rows."
            )

    def close(self, timeout: float = 5.0) -> None:
        """Gives up what is being scored and ends the loop, in about `timeout` seconds.

        Safe to call twice; `submit` starts it again.
        """
        try:
            self._loop.close(self._close_functions, timeout)
        except concurrent.futures.TimeoutError:
            log.warning("a reward function blocks the event loop and was left behind.")
        finally:
            self._slots = [asyncio.Semaphore(limit) for limit in self._limits]  # those of before are the old loop's

    async def _close_functions(self) -> None:
        """Closes all; raises the first error of theirs, after the last."""
        errors = []
        for function in self._functions:
            try:
                await function.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _row_weights(self, rows: Mapping[str, Sequence[Any]], num_rows: int) -> list[dict[str, float]]:
        """Per row, the functions that score it with their weights."""
        if self.rewards_by_label is None:
            return [self.weights] * num_rows
        self._require_labels(rows)
        labels = rows[self.label_column]
        for index, label in enumerate(labels):
            try:
                self.check_label({self.label_column: label})
            except ValueError as error:
                raise ValueError(f"row {index} (prompt {str(rows['prompts'][index])[:60]!r}) {error}") from error
        return [self.rewards_by_label[label] for label in labels]

    def _require_labels(self, columns: Collection[str]) -> None:
        """Raises a `ValueError` where there are rewards_by_label and no column to choose among them by."""
        if self.rewards_by_label is not None and self.label_column not in columns:
            raise ValueError(
                f"rewards_by_label needs the data-set column label_column={self.label_column!r}; there are: "
                f"{', '.join(sorted(columns))}."
            )

    async def _score(self, rows: Mapping[str, Sequence[Any]], weights: list[dict[str, float]]) -> Scores:
        parts = await all_of(self._part(index, rows, weights) for index in range(len(self._functions)))
        scores = Scores(total=[], parts={})
        for name, part in zip(self.names, parts, strict=True):
            scores.parts[name] = part.total
            scores.metrics.update(part.metrics)
            scores.extra.update(part.extra)
        for row, row_weights in enumerate(weights):
            scored = [
                weight * scores.parts[name][row]
                for name, weight in row_weights.items()
                if weight != 0 and not math.isnan(scores.parts[name][row])
            ]
            scores.total.append(self._sum(row, row_weights, scored, scores))
        return scores

    @staticmethod
    def _sum(row: int, weights: Mapping[str, float], scored: Sequence[float], scores: Scores) -> float:
        if not scored:
            return math.nan
        try:
            total = math.fsum(scored)
        except OverflowError:
            total = math.inf
        if not abs(total) <= MAX_REWARD:
            values = ", ".join(f"{weight:g} * {name}={scores.parts[name][row]:g}" for name, weight in weights.items())
            raise RewardError(
                f"row {row}: the weighted sum of the rewards ({values}) is {total:g}. Rewards and their squares are "
                f"summed in float32: scale weights or rewards so that totals stay at most {MAX_REWARD:g} in size."
            )
        return total

    async def _part(self, index: int, rows: Mapping[str, Sequence[Any]], weights: list[dict[str, float]]) -> Scores:
        """One function's values (as `total`), metrics and extra columns for all n rows."""
        function = self._functions[index]
        asked = [row for row, row_weights in enumerate(weights) if function.name in row_weights]
        if not asked:
            return Scores([], {}).spread([], len(weights))
        chosen = {name: [values[row] for row in asked] for name, values in rows.items()}
        calls, failed = CallLog(function.name, len(asked)), 0.0
        try:
            async with self._slots[index]:
                values, calls = await function.run(chosen, self.timeout)
        except CallFailed as error:
            if self.on_reward_error == "error":
                raise
            values, failed = [math.nan] * len(asked), 1.0
            self._warn(function.name, error)
        metrics = {name: mean(numbers) for name, numbers in calls.metrics.items()}
        if self.on_reward_error == "skip":
            metrics[f"reward/{function.name}/failed"] = failed
        return Scores(values, {}, metrics, dict(calls.extra)).spread(asked, len(weights))

    def _warn(self, name: str, error: CallFailed) -> None:
        first = name not in self._warned
        self._warned.add(name)
        hint = " Its rows count as not scored (on_reward_error: skip)."
        log.warning("%s%s", error, hint if first else "")


def _weights(
    names: Sequence[str], weights: Sequence[float] | None, rewards_by_label: Mapping[str, Mapping[str, float]] | None
) -> dict[str, float]:
    if rewards_by_label is None:
        return dict(zip(names, map(float, weights or [1.0] * len(names)), strict=True))
    used = {name: {parts[name] for parts in rewards_by_label.values() if name in parts} for name in names}
    return {name: float(found.pop()) for name, found in used.items() if len(found) == 1}


def _check(
    functions: Sequence[Any],
    names: Sequence[str],
    weights: Sequence[float] | None,
    rewards_by_label: Mapping[str, Sequence[tuple[str, float]]] | None,
) -> None:
    if not functions:
        raise ValueError("functions=[]: give at least one reward function.")
    for label, values in (("reward_names", names), ("reward_weights", weights)):
        if not isinstance(values, Sequence | None) or isinstance(values, str):
            raise ValueError(f"{label}={values!r}: give a list, one entry for each reward function in their order.")
        if values is not None and len(values) != len(functions):
            raise ValueError(f"{label} has {len(values)} entries for {len(functions)} reward functions.")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ValueError(
            f"two reward functions are called {', '.join(twice)}: tell them apart with reward_names=[...]."
        )
    if weights is not None and not all(map(math.isfinite, weights)):
        raise ValueError(f"reward_weights={list(weights)}: must be finite.")
    if weights is not None and not any(weights):
        raise ValueError(f"reward_weights={list(weights)}: every reward would be 0; one weight must differ from it.")
    if rewards_by_label is not None:
        _check_rewards_by_label(names, weights, rewards_by_label)


def _check_rewards_by_label(
    names: Sequence[str], weights: Sequence[float] | None, rewards_by_label: Mapping[str, Sequence[tuple[str, float]]]
) -> None:
    if weights is not None:
        raise ValueError(
            "reward_weights and rewards_by_label exclude one another: a label names the weight of each of its "
            "functions."
        )
    if not rewards_by_label:
        raise ValueError("rewards_by_label={}: list the functions of each label, or None.")
    for label, parts in rewards_by_label.items():
        for name, weight in parts:
            if name not in names:
                raise ValueError(
                    f"rewards_by_label[{label!r}] names {name!r}; the reward functions are: {', '.join(names)}."
                )
            if not math.isfinite(weight):
                raise ValueError(f"rewards_by_label[{label!r}]: the weight of {name!r} is {weight}; it must be finite.")
        if len({name for name, _ in parts}) != len(parts):
            raise ValueError(f"rewards_by_label[{label!r}] names a function twice.")
    unused = [
        name for name in names if not any(name == used for parts in rewards_by_label.values() for used, _ in parts)
    ]
    if unused:
        raise ValueError(f"reward functions that no label uses would never run: {', '.join(unused)}.")

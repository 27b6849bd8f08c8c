"""Runs the reward functions of a run concurrently, alongside generation, and sums their rewards.

total[i] = sum over functions f that scored row i of weight_f * r_f[i]      NaN if none did
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal

from lightrl.compat.arguments import MAX_REWARD, above, at_least, one_of
from lightrl.engines.background import BackgroundLoop, all_of, patient_result
from lightrl.records import Scores
from lightrl.rewards.base import (
    MEDIA,
    CallFailed,
    CallLog,
    RewardError,
    RewardFunction,
    RewardSpec,
    extracted_answer,
    load_reward,
    mean,
    reward_name,
)

OFFERED = ("prompts", "completions", "completion_ids", "group_ids", "training_progress", *MEDIA)
"""What every function may name in addition to the dataset's columns."""
OWN_NAMES = ("prompts", "completions", "completion_ids", "group_ids", "training_progress", "log_metric", "log_extra")
"""Arguments of reward functions that would hide a column of the same name."""

log = logging.getLogger(__name__)


class ScoreHandle:
    """The scores of one submission, available when the slowest function is done."""

    def __init__(self, future: concurrent.futures.Future[Scores]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, Scores]:
        """Waits on an event loop; cancelling the wait cancels the scoring."""
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout: float | None = None) -> Scores:
        """Waits for the scores, at most `timeout` seconds.

        Raises:
            RewardError: A function failed, or the scorer was closed.
            TimeoutError: The scores are not there within `timeout`; ask again.
        """
        try:
            return patient_result(self._future) if timeout is None else self._future.result(timeout)
        except concurrent.futures.CancelledError as error:
            raise RewardError("the RewardScorer was closed before these rows were scored.") from error


class RewardScorer:
    """Scores groups of completions with several reward functions at once.

    All functions score a submission at the same time: an `async` function on its own event loop in a background thread,
    others in a daemon thread per call, so none blocks another. Threads start at the first submission.

    Args:
        functions: Reward functions, at least one: `Reward` objects, import paths (see `load_reward`), or callables.
        weights: One per function. Defaults to 1 each. A function of weight 0 is run and logged but scores nothing.
        names: One per function, for logs and `rewards_by_label`. Defaults to the function's or class's own name.
        rewards_by_label: Label -> [(function's name, weight), ...]. Only the functions of its label score a row; a
            function runs only on the rows that need it. Excludes `weights`.
        label_column: Dataset column of the label; only used with `rewards_by_label`.
        max_concurrency: Maximum number of concurrent calls of one function. Its own `max_concurrency` wins.
        timeout: Seconds for one call; None waits forever. A function that is not `async` can't be stopped: its result
            is ignored.
        on_reward_error: What an exception or a timeout means: "error" ends the run; "skip" leaves the rows of that call
            unscored by the function, logs a warning, and counts them in `reward/<function>/failed`. Mistakes in the
            setup always raise: values that are not rewards, missing columns, a `RewardError` of the function itself.

    Attributes:
        names: One per function.
        weights: Name -> weight, without functions whose weight differs between labels.

    Raises:
        ValueError: Lengths that differ, equal names, unknown functions, numbers out of range.
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
            prompts: n strings.
            completions: n strings.
            completion_ids: n lists of token ids.
            columns: Dataset column -> n values.
            group_ids: n integers. Submit all completions of a prompt together.
            media: `images`, `videos`, and `audios`, n lists each, decoded; they hide columns of these names.

        Raises:
            ValueError: Lengths that differ, or a row with an unknown label.
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
        """Sets `training_progress`, the fraction of the run that is done."""
        self._progress = fraction

    def require_columns(self, columns: Iterable[str]) -> None:
        """Raises a `ValueError` if a function needs what neither these dataset columns nor LightRL offer."""
        offered = {*columns, *OFFERED}
        for function in self._functions:
            if complaint := function.complaint(offered):
                raise ValueError(complaint)
        self._require_labels(offered)

    def check_source(
        self, columns: Collection[str], source: str, labels: Iterable[Any] | None = None, mixed: Iterable[str] = ()
    ) -> None:
        """Raises a `ValueError` if a function that scores rows of this source needs a column that it lacks.

        Args:
            columns: Columns of the source.
            source: Its name in messages.
            labels: Labels of its rows; None if they are not known, as of a stream.
            mixed: Columns of sources that it is mixed with; they are None in its rows.
        """
        used = set(self.names)
        if self.rewards_by_label is not None:
            if labels is not None:
                used = set().union(*(self.rewards_by_label[label] for label in labels))
            else:
                used = used.intersection(*self.rewards_by_label.values())
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
        """Raises a `ValueError` if `rewards_by_label` has no entry for the label of a row."""
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
        """Cancels what is being scored and ends the loop, in about `timeout` seconds. `submit` starts it again."""
        try:
            self._loop.close(self._close_functions, timeout)
        except concurrent.futures.TimeoutError:
            log.warning("A reward function blocks its event loop. Its thread is abandoned.")
        finally:
            self._slots = [asyncio.Semaphore(limit) for limit in self._limits]  # the old ones belong to the old loop

    async def _close_functions(self) -> None:
        """Closes all functions, then raises the first of their errors."""
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
        """Raises a `ValueError` if the label column that `rewards_by_label` needs is missing."""
        if self.rewards_by_label is not None and self.label_column not in columns:
            raise ValueError(
                f"rewards_by_label needs the dataset column label_column={self.label_column!r}; there are: "
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
            values = {name: scores.parts[name][row] for name in row_weights}
            scored = [w * values[name] for name, w in row_weights.items() if w != 0 and not math.isnan(values[name])]
            total = math.fsum(scored) if scored else math.nan
            if abs(total) > MAX_REWARD:
                listed = ", ".join(f"{weight:g} * {name}={values[name]:g}" for name, weight in row_weights.items())
                raise RewardError(
                    f"row {row}: the weighted sum of the rewards ({listed}) is {total:g}. Rewards and their squares "
                    f"are summed in float32: scale weights or rewards so that totals stay at most {MAX_REWARD:g} in "
                    "size."
                )
            scores.total.append(total)
        return scores

    async def _part(self, index: int, rows: Mapping[str, Sequence[Any]], weights: list[dict[str, float]]) -> Scores:
        """One function's values (as `total`), metrics, and extra columns for all n rows."""
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
            log.warning("%s Its rows count as not scored (on_reward_error: skip).", error)
        metrics = {name: mean(numbers) for name, numbers in calls.metrics.items()}
        if self.on_reward_error == "skip":
            metrics[f"reward/{function.name}/failed"] = failed
        return Scores(values, {}, metrics, dict(calls.extra)).spread(asked, len(weights))


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
    """Rejects what would score with another function or weight than was meant."""
    if not functions:
        raise ValueError("functions=[]: has no reward function. Add at least one.")
    for label, values in (("names", names), ("weights", weights)):
        if values is not None and len(values) != len(functions):
            raise ValueError(f"{label} has {len(values)} entries for {len(functions)} reward functions.")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise ValueError(f"two reward functions are called {', '.join(twice)}. Tell them apart with names=[...].")
    if weights is not None and not (all(map(math.isfinite, weights)) and any(weights)):
        raise ValueError(f"weights={list(weights)}: must be finite, and at least one must not be 0.")
    if rewards_by_label is None:
        return
    if weights is not None:
        raise ValueError("weights and rewards_by_label exclude one another. Set the weights in rewards_by_label.")
    if not rewards_by_label:
        raise ValueError("rewards_by_label={}: has no label. List the functions of each label, or use None.")
    for label, parts in rewards_by_label.items():
        for name, weight in parts:
            if name not in names:
                known = ", ".join(names)
                raise ValueError(f"rewards_by_label[{label!r}] names {name!r}; the reward functions are: {known}.")
            if not math.isfinite(weight):
                raise ValueError(f"rewards_by_label[{label!r}]: the weight of {name!r} is {weight}; it must be finite.")
        if len({name for name, _ in parts}) != len(parts):
            raise ValueError(f"rewards_by_label[{label!r}] names a function twice.")
    used = {name for parts in rewards_by_label.values() for name, _ in parts}
    if unused := [name for name in names if name not in used]:
        raise ValueError(f"reward functions that no label uses would never run: {', '.join(unused)}.")

"""Runs reward functions concurrently with generation and computes weighted sums.

total[i] = sum over functions f that scored completion i of weight_f * r_f[i]      NaN if none did
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
"""Arguments that every function can use in addition to the dataset's columns."""
OWN_NAMES = ("prompts", "completions", "completion_ids", "group_ids", "training_progress", "log_metric", "log_extra")
"""Arguments of reward functions that take precedence over a column of the same name."""

log = logging.getLogger(__name__)


class ScoreHandle:
    """The scores of one submission, available when the slowest function is done."""

    def __init__(self, future: concurrent.futures.Future[Scores]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `result` would return or raise immediately."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, Scores]:
        """Waits on an event loop. Canceling the wait cancels the scoring."""
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout: float | None = None) -> Scores:
        """Waits for the scores for at most `timeout` seconds.

        Raises:
            RewardError: A function failed, or the scorer was closed.
            TimeoutError: The scores are not available yet. You can call `result` again.
        """
        try:
            return patient_result(self._future) if timeout is None else self._future.result(timeout)
        except concurrent.futures.CancelledError as error:
            raise RewardError("The RewardScorer was closed before it had scored these completions.") from error


class RewardScorer:
    """Scores groups of completions with several reward functions concurrently.

    `async` functions run on their own event loop in a background thread, other functions in a thread per call, so they
    don't block each other. Threads start at the first submission.

    Args:
        functions: Reward functions, at least one: `Reward` objects, import paths (see `load_reward`), or callables.
        weights: Weight of each function. Defaults to 1. A function with weight 0 is called and logged only.
        names: Name of each function in logs and `rewards_by_label`. Defaults to the name of the function or class.
        rewards_by_label: Label -> [(function name, weight), ...]. A completion is scored only by the functions of its
            label. Mutually exclusive with `weights`.
        label_column: Dataset column with the label, if `rewards_by_label` is set.
        max_concurrency: Maximum number of concurrent calls per function. A function's own `max_concurrency` takes
            precedence.
        timeout: Time limit per call in seconds. Defaults to no limit. Functions that are not `async` can't be stopped;
            their late results are ignored.
        on_reward_error: Response to exceptions and timeouts of a function. "error" stops the run. "skip" leaves the
            completions of that call unscored by the function, logs a warning, and counts the call in
            `reward/<function>/failed`. Configuration errors always stop the run: invalid rewards, missing columns, and
            a `RewardError` raised by the function itself.

    Attributes:
        names: Name of each function.
        weights: Name -> weight, excluding functions whose weight depends on the label.

    Raises:
        ValueError: Lengths differ, names are duplicated, a function is unknown, or a number is out of range.
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
        """Extracts the answer with the first function of the label that finds one."""
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
        """Starts scoring n completions and returns immediately.

        Args:
            prompts: n strings.
            completions: n strings.
            completion_ids: n lists of token IDs.
            columns: Dataset column -> n values.
            group_ids: n integers. Submit all completions of a prompt together.
            media: Decoded `images`, `videos`, and `audios`, n lists each. Take precedence over columns.

        Raises:
            ValueError: Lengths differ, or a label is unknown.
        """
        rows: dict[str, Sequence[Any]] = {**columns, **(media or {})}
        rows.update(prompts=prompts, completions=completions, completion_ids=completion_ids, group_ids=group_ids)
        rows["training_progress"] = [self._progress] * len(completions)
        wrong = {name: len(values) for name, values in rows.items() if len(values) != len(completions)}
        if wrong:
            raise ValueError(
                f"RewardScorer.submit: got {len(completions)} completions, but {wrong} values. Pass one value each."
            )
        weights = self._row_weights(rows, len(completions))
        return ScoreHandle(self._loop.submit(self._score(rows, weights)))

    def set_progress(self, fraction: float) -> None:
        """Sets `training_progress`, the completed fraction of the run."""
        self._progress = fraction

    def require_columns(self, columns: Iterable[str]) -> None:
        """Raises a `ValueError` if a function requires a column that is not among these."""
        offered = {*columns, *OFFERED}
        for function in self._functions:
            if complaint := function.complaint(offered):
                raise ValueError(complaint)
        self._require_labels(offered)

    def check_source(
        self, columns: Collection[str], source: str, labels: Iterable[Any] | None = None, mixed: Iterable[str] = ()
    ) -> None:
        """Raises a `ValueError` if a function that scores a source's examples requires a column that it lacks.

        Args:
            columns: Columns of the source.
            source: Name of the source in error messages.
            labels: Labels of its examples. None if unknown, as for a stream.
            mixed: Columns of other sources that it is mixed with. They are None in its examples.
        """
        used = set(self.names)
        if self.rewards_by_label is not None:
            if labels is None:
                used = used.intersection(*self.rewards_by_label.values())
            else:
                used = set()
                for label in labels:
                    self.check_label(label, f"{source}: an example")
                    used.update(self.rewards_by_label[label])
        for function in self._functions:
            if function.name not in used:
                continue
            if lacking := sorted({*function.needed_columns} - {*columns, *mixed}):
                raise ValueError(
                    f"reward function {function.name!r}: column={lacking[0]!r} is not in {source}, which has: "
                    f"{', '.join(sorted(columns))}. Set column to the one with the reference, or add it to the data."
                )
            if complaint := function.complaint({*columns, *OFFERED}, source):
                raise ValueError(
                    f"{complaint} Or add the column to the data (null if not applicable), give the parameter a "
                    "default, or assign functions to examples with rewards_by_label."
                )

    def check_label(self, label: Any, where: str) -> None:
        """Raises a `ValueError` if `rewards_by_label` has no entry for the label of the example at `where`."""
        labels = list(self.rewards_by_label or ())
        if label not in labels:
            raise ValueError(
                f"{where} has label {label!r} (column {self.label_column!r}), which is not in rewards_by_label "
                f"(labels: {', '.join(map(repr, labels))}). Add the label, with an empty list to leave its examples "
                "unscored, or remove these examples."
            )

    def close(self, timeout: float = 5.0) -> None:
        """Cancels scoring and stops the event loop within about `timeout` seconds. `submit` restarts it."""
        try:
            self._loop.close(self._close_functions, timeout)
        except concurrent.futures.TimeoutError:
            log.warning("A reward function is blocking its event loop. Abandoned its thread.")
        finally:
            self._slots = [asyncio.Semaphore(limit) for limit in self._limits]  # semaphores are bound to their loop

    async def _close_functions(self) -> None:
        """Closes all functions, then raises the first error."""
        errors = []
        for function in self._functions:
            try:
                await function.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _row_weights(self, rows: Mapping[str, Sequence[Any]], num_rows: int) -> list[dict[str, float]]:
        """The functions that score each completion, with their weights."""
        if self.rewards_by_label is None:
            return [self.weights] * num_rows
        self._require_labels(rows)
        labels = rows[self.label_column]
        for index, label in enumerate(labels):
            self.check_label(label, f"row {index} (prompt {str(rows['prompts'][index])[:60]!r})")
        return [self.rewards_by_label[label] for label in labels]

    def _require_labels(self, columns: Collection[str]) -> None:
        """Raises a `ValueError` if the label column that `rewards_by_label` needs is missing."""
        if self.rewards_by_label is not None and self.label_column not in columns:
            raise ValueError(
                f"label_column={self.label_column!r}: is not a dataset column, but rewards_by_label requires it. "
                f"Use one of: {', '.join(sorted(columns))}."
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
                    f"completion {row}: the weighted sum of rewards ({listed}) is {total:g}, which overflows float32 "
                    f"sums of squares. Scale weights or rewards to totals of at most {MAX_REWARD:g}."
                )
            scores.total.append(total)
        return scores

    async def _part(self, index: int, rows: Mapping[str, Sequence[Any]], weights: list[dict[str, float]]) -> Scores:
        """One function's values (as `total`), metrics, and extra columns for all n completions."""
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
            log.warning("%s Left its completions unscored (on_reward_error: skip).", error)
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
    """Rejects ambiguous or inconsistent functions, names, and weights."""
    if not functions:
        raise ValueError("functions=[]: must contain at least one reward function. Add one.")
    for label, values in (("names", names), ("weights", weights)):
        if values is not None and len(values) != len(functions):
            raise ValueError(
                f"{label}={list(values)}: has {len(values)} entries for {len(functions)} functions. Pass one each."
            )
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise ValueError(f"names: several reward functions are named {', '.join(twice)}. Set unique names=[...].")
    if weights is not None and not (all(map(math.isfinite, weights)) and any(weights)):
        raise ValueError(f"weights={list(weights)}: must be finite and not all 0. Fix the weights.")
    if rewards_by_label is None:
        return
    if weights is not None:
        raise ValueError("weights and rewards_by_label are mutually exclusive. Set the weights in rewards_by_label.")
    if not rewards_by_label:
        raise ValueError("rewards_by_label={}: has no labels. List the functions of each label, or set it to null.")
    for label, parts in rewards_by_label.items():
        for name, weight in parts:
            if name not in names:
                known = ", ".join(names)
                raise ValueError(
                    f"rewards_by_label[{label!r}]: {name!r} is not a reward function. Use one of: {known}."
                )
            if not math.isfinite(weight):
                raise ValueError(
                    f"rewards_by_label[{label!r}]: the weight of {name!r} is {weight}. Use a finite number."
                )
        if len({name for name, _ in parts}) != len(parts):
            raise ValueError(f"rewards_by_label[{label!r}]: lists a function twice. Remove the duplicate.")
    used = {name for parts in rewards_by_label.values() for name, _ in parts}
    if unused := [name for name in names if name not in used]:
        raise ValueError(f"rewards_by_label: no label uses {', '.join(unused)}. Add them to a label or remove them.")

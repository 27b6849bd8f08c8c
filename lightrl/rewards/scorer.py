"""Runs reward functions concurrently with generation and computes weighted sums.

total[i] = sum over functions f that scored completion i of weight_f * r_f[i]      NaN if none did
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from lightrl.engines.background import BackgroundLoop, all_of
from lightrl.records import Scores
from lightrl.rewards.base import (
    OFFERED,
    Call,
    CallFailed,
    RewardFunction,
    RewardSpec,
    extracted_answer,
    load_reward,
    reward_name,
)

log = logging.getLogger(__name__)


class RewardScorer:
    """Scores groups of completions with several reward functions concurrently.

    `async` functions run on their own event loop in a background thread, other functions in a thread per call, so they
    don't block each other. Threads start at the first submission.

    Args:
        functions: Reward functions, at least one: `Reward` objects, import paths (see `load_reward`), or callables.
        weights: Weight of each function. Defaults to 1. A function with weight 0 is only called and logged.
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
        ValueError: Names are duplicated, a function is unknown, or `weights` and `rewards_by_label` are both set.
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
        self.names = list(names)
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"names={self.names}: must be unique. Set names=[...].")
        if weights is not None and rewards_by_label is not None:
            raise ValueError("weights and rewards_by_label are mutually exclusive. Set only one.")
        listed = {name for parts in (rewards_by_label or {}).values() for name, _ in parts}
        if unknown := sorted(listed - set(self.names)):
            raise ValueError(f"rewards_by_label: {unknown} are not reward functions. Use some of {self.names}.")
        self.rewards_by_label = (
            None if rewards_by_label is None else {label: dict(parts) for label, parts in rewards_by_label.items()}
        )
        self.weights = _weights(self.names, weights, self.rewards_by_label)
        self.label_column = label_column
        self.timeout = timeout
        self.on_reward_error = on_reward_error
        self._functions = [RewardFunction(name, function) for name, function in zip(self.names, loaded, strict=True)]
        self._limits = [function.max_concurrency or max_concurrency for function in self._functions]
        self._loop = BackgroundLoop("rewards")
        self._slots = [asyncio.Semaphore(limit) for limit in self._limits]

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
    ) -> concurrent.futures.Future[Scores]:
        """Starts scoring n completions and returns a future immediately. Closing the scorer cancels it.

        Args:
            prompts: n strings.
            completions: n strings.
            completion_ids: n lists of token IDs.
            columns: Dataset column -> n values.
            group_ids: n integers. Submit all completions of a prompt together.
            media: Decoded `images`, `videos`, and `audios`, n lists each. Take precedence over columns.
        """
        rows: dict[str, Sequence[Any]] = {**columns, **(media or {})}
        rows.update(prompts=prompts, completions=completions, completion_ids=completion_ids, group_ids=group_ids)
        weights = [self.weights] * len(completions)
        if self.rewards_by_label is not None:
            for label in rows[self.label_column]:
                self.check_label(label, "an example")
            weights = [self.rewards_by_label[label] for label in rows[self.label_column]]
        return self._loop.submit(self._score(rows, weights))

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
            missing = {*function.needed_columns} - {*columns, *mixed} | {*function.missing({*columns, *OFFERED})}
            if function.name in used and missing:
                raise ValueError(
                    f"reward function {function.name!r}: requires {', '.join(sorted(missing))}, but {source} has "
                    f"{', '.join(sorted(columns))}. Add the column, set the reward's column "
                    "argument, or assign functions to examples with rewards_by_label."
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
        closed = await asyncio.gather(*(function.close() for function in self._functions), return_exceptions=True)
        for error in filter(None, closed):
            raise error

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
            scores.total.append(math.fsum(scored) if scored else math.nan)
        return scores

    async def _part(self, index: int, rows: Mapping[str, Sequence[Any]], weights: list[dict[str, float]]) -> Scores:
        """One function's values (as `total`), metrics, and extra columns for all n completions."""
        function = self._functions[index]
        asked = [row for row, row_weights in enumerate(weights) if function.name in row_weights]
        if not asked:
            return Scores([], {}).spread([], len(weights))
        chosen = {name: [values[row] for row in asked] for name, values in rows.items()}
        failed = 0.0
        try:
            async with self._slots[index]:
                call = await function.run(chosen, self.timeout)
        except CallFailed as error:
            if self.on_reward_error == "error":
                raise
            call, failed = Call([math.nan] * len(asked), {}, {}), 1.0
            log.warning("%s Left its completions unscored (on_reward_error: skip).", error)
        if self.on_reward_error == "skip":
            call.metrics[f"reward/{function.name}/failed"] = failed
        return Scores(call.values, {}, call.metrics, call.extra).spread(asked, len(weights))


def _weights(
    names: Sequence[str], weights: Sequence[float] | None, rewards_by_label: Mapping[str, Mapping[str, float]] | None
) -> dict[str, float]:
    if rewards_by_label is None:
        return dict(zip(names, map(float, weights or [1.0] * len(names)), strict=True))
    used = {name: {parts[name] for parts in rewards_by_label.values() if name in parts} for name in names}
    return {name: float(found.pop()) for name, found in used.items() if len(found) == 1}

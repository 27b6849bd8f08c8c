"""What scoring a submission gives, and the handle under which it is waited for."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lightrl.rewards.base import RewardError

__all__ = ["ScoreHandle", "Scores"]


@dataclass
class Scores:
    """The rewards of n rows.

    Attributes:
        total: n floats, the weighted sums; NaN where no function scored the row.
        parts: function's name -> n floats, unweighted; NaN where it said None, failed or was not asked.
        metrics: scalars, each a mean over the rows or calls: `reward/<function>/failed` is the fraction of the rows
            that the function was asked for and failed on, the others are what the functions logged.
        extra: `<function>/<column>` -> n values that the function logged, None where it was not asked.
    """

    total: list[float]
    parts: dict[str, list[float]]
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    @staticmethod
    def concat(pieces: Sequence[Scores]) -> Scores:
        """The rows of several submissions, one after another; metrics are means over the pieces that have them."""
        names = pieces[0].parts if pieces else {}
        columns = {name: None for piece in pieces for name in piece.extra}  # a dict keeps the order
        metrics: dict[str, list[float]] = {}
        for piece in pieces:
            for name, value in piece.metrics.items():
                metrics.setdefault(name, []).append(value)
        return Scores(
            total=[value for piece in pieces for value in piece.total],
            parts={name: [value for piece in pieces for value in piece.parts[name]] for name in names},
            metrics={name: sum(values) / len(values) for name, values in metrics.items()},
            extra={name: [v for p in pieces for v in p.extra.get(name, [None] * len(p.total))] for name in columns},
        )


class ScoreHandle:
    """The scores of one submission, there when the slowest function is done."""

    def __init__(self, future: concurrent.futures.Future[Scores]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._future.done()

    def when_done(self, function: Callable[[], None]) -> None:
        """Calls the function once `done`, in whatever thread that happens; at once if it already is."""
        self._future.add_done_callback(lambda _: function())

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

"""When groups are started and handed out, where that is not all at once: ahead of the update, or as they finish."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from lightrl.background import in_background
from lightrl.engines.base import EngineRestartedError
from lightrl.rollout.collation import ScoredGroup
from lightrl.rollout.collector import Collection, may_restart
from lightrl.types import Piece, Rollouts

__all__ = ["CollectedRollout", "StaleSource", "StreamedRollouts"]

log = logging.getLogger(__name__)


@dataclass
class CollectedRollout:
    """A rollout before it is laid out.

    Attributes:
        groups: its groups.
        cursor: number of the prompt after its last.
        metrics: scalars of its making.
        version: version of the policy, where the groups' own may be out of date; None to take theirs.
        sampled: all groups that were sampled on the way, also those that were replaced.
    """

    groups: list[ScoredGroup]
    cursor: int
    metrics: dict[str, float]
    version: int | None = None
    sampled: list[ScoredGroup] = field(default_factory=list)


@dataclass
class _Flight:
    """A rollout under way: its result, and what its weights were."""

    future: Future[CollectedRollout]
    version: int
    number: int


class StaleSource:
    """Samples up to `staleness` rollouts ahead, in rounds of so many, each round with one version of the weights.

    When the last rollout of a round is handed out the engine is idle: the weights are pushed, by the main thread since
    that is collective, and the next round starts, which samples while the policy learns from the rollout in hand. So a
    rollout is of one policy, which lacks the updates of at most `staleness` rollouts, and which one does not depend on
    timing: runs repeat.

    Args:
        staleness: s, at least 1. Rollouts of a round are 1, 2, ... s rollouts behind; the first of a run is not.
        collect: (cursor) samples and scores the rollout that starts with that prompt. Called in the background.
        ready: pushes the weights and gives seconds. Called by the caller's thread.
        version: gives the number of the policy's version.
        world_size: number of processes.
    """

    def __init__(
        self,
        staleness: int,
        collect: Callable[[int], CollectedRollout],
        ready: Callable[[], float],
        version: Callable[[], int],
        world_size: int,
    ) -> None:
        self.staleness = staleness
        self._collect = collect
        self._ready = ready
        self._version = version
        self._world_size = world_size
        self._flights: deque[_Flight] = deque()
        self._thread: threading.Thread | None = None
        self._taken = 0  # rollouts handed out, each learnt from before the next is asked for

    def next(self, cursor: int, left: int) -> CollectedRollout:
        """The next rollout, with `rollout/staleness` and waiting times in its metrics.

        Args:
            cursor: number of its first prompt.
            left: rollouts that will be asked for after this one.
        """
        sync = 0.0
        if not self._flights:
            sync = self._round(cursor, 1)
        begin = time.perf_counter()
        collected, flight = self._take(cursor)
        waited = time.perf_counter() - begin
        stale = {"rollout/staleness": self._taken - flight.number}
        stale["rollout/staleness_updates"] = self._version() - flight.version
        self._taken += 1
        collected.version = flight.version
        if not self._flights and left:
            sync += self._round(collected.cursor, min(self.staleness, left), self._taken - 1)
        collected.metrics |= {"time/sync": sync, "time/wait": waited, **{k: float(v) for k, v in stale.items()}}
        return collected

    def drain(self) -> None:
        """Waits until the engine is idle. What was sampled stays; an error is raised when its rollout is asked for."""
        for flight in self._flights:
            flight.future.exception()

    def stop(self, timeout: float) -> None:
        """Forgets what is under way, and waits at most so many seconds for its thread, once that has been given up."""
        self._flights.clear()
        if self._thread is not None:
            self._thread.join(timeout)

    def _round(self, cursor: int, count: int, number: int | None = None) -> float:
        """Pushes the weights and starts `count` rollouts; seconds of the push."""
        seconds, number = self._ready(), self._taken if number is None else number
        flights = [_Flight(Future(), self._version(), number) for _ in range(count)]
        self._flights.extend(flights)
        futures = [flight.future for flight in flights]
        self._thread = in_background(lambda: self._work(cursor, futures), "lightrl-sampling")
        return seconds

    def _work(self, cursor: int, futures: list[Future[CollectedRollout]]) -> None:
        for i, future in enumerate(futures):
            try:
                collected = self._collect(cursor)
            except BaseException as error:
                for unmade in futures[i:]:
                    unmade.set_exception(error)
                return
            cursor = collected.cursor
            future.set_result(collected)

    def _take(self, cursor: int) -> tuple[CollectedRollout, _Flight]:
        """The oldest flight. After an engine's restart, what was lost is sampled again, with the current policy."""
        restarts = 0
        while True:
            try:
                collected = self._flights[0].future.result()
            except EngineRestartedError as error:
                restarts = may_restart(error, restarts, self._world_size)
                count = len(self._flights)
                log.warning("%s Pushing the weights and sampling %d lost rollouts again.", error, count)
                self._flights.clear()
                self._round(cursor, count)
                continue
            return collected, self._flights.popleft()


class StreamedRollouts(Rollouts):
    """`Rollouts` that can also be had piece by piece: `pieces` yields finished groups while others still generate.

    Reading any field waits for all groups, so code that knows nothing of pieces sees ordinary `Rollouts`. Groups are in
    the order of the prompts; where a trajectory may have any number of rows, in the order in which they finished, since
    a piece must say which rows of the whole it is.

    Args:
        collection: where groups come from.
        assemble: (groups, their numbers, whether that is all of them) lays groups out as `Rollouts`.
        one_row: whether every trajectory is one row.
        temperature: of the sampling distribution.
    """

    def __init__(
        self,
        collection: Collection,
        assemble: Callable[[list[ScoredGroup], list[int], bool], Rollouts],
        *,
        one_row: bool,
        temperature: float,
    ) -> None:
        self.temperature = temperature
        self.filler = False
        self.supervised = None
        self._collection = collection
        self._assemble = assemble
        self._one_row = one_row
        self._device: torch.device | str = "cpu"
        self._order: list[int] = []
        self._finished = False

    def __len__(self) -> int:
        if self._one_row:
            return sum(len(task.attempts) for task in self._collection.tasks)
        return int(self.token_ids.shape[0])

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:  # the only ones that are not there from the start
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._finish()
        return self.__dict__[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Rollouts:
        return replace(self.whole())  # Lightning's half-precision plugins copy a batch before they convert its fields

    def mapped(self, tensor_fn: Any, list_fn: Any) -> Any:
        return self.whole().mapped(tensor_fn, list_fn)

    def to(self, device: torch.device | str) -> Rollouts:  # type: ignore[override]
        """Itself, which will come on that device; the finished one as ordinary `Rollouts`."""
        if self._finished:
            return self.whole().to(device)
        self._device = device
        return self

    def whole(self) -> Rollouts:
        """All rows as ordinary `Rollouts`; waits for them."""
        return Rollouts(**{name: getattr(self, name) for name in _FIELDS})

    def pieces(self) -> Iterator[Piece]:
        """Yields all groups that are scored by then, again and again, until all are out; without metrics.

        One piece of all rows where the whole has been waited for already.
        """
        if self._finished:
            yield Piece(torch.arange(len(self)), replace(self.whole(), metrics={}), last=True)
        given = 0
        while not self._collection.exhausted:
            numbers = self._next()
            piece = self._assemble([self._collection.groups[n] for n in numbers], numbers, False)
            piece.metrics = {}
            if self._one_row:
                sizes = [len(task.attempts) for task in self._collection.tasks]
                rows = torch.cat([sum(sizes[:n]) + torch.arange(sizes[n]) for n in numbers])
            else:
                rows = given + torch.arange(len(piece))
            given += len(piece)
            yield Piece(rows, piece.to(self._device), last=self._collection.exhausted)

    def _next(self) -> list[int]:
        numbers = self._collection.next()
        self._order += numbers
        return numbers

    def _finish(self) -> None:
        while not self._collection.exhausted:
            self._next()
        order: Sequence[int] = range(len(self._order)) if self._one_row else self._order
        whole = self._assemble([self._collection.groups[n] for n in order], list(order), True).to(self._device)
        self.__dict__.update({name: getattr(whole, name) for name in _FIELDS - self.__dict__.keys()})
        self._finished = True


_FIELDS = {field.name for field in fields(Rollouts)}

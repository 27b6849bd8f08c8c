"""Rollouts that are sampled in the background while the policy learns from earlier ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from lightrl.data.sampled import Draft
from lightrl.engines.base import EngineDiedError, EngineRestartedError

__all__ = ["MAX_RESTARTS", "Ahead", "in_background", "may_restart"]

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Times a `restart_engine` engine may die within one rollout."""


@dataclass
class _Flight:
    """A rollout under way: its result, and what its weights were."""

    future: Future[Draft]
    version: int
    number: int


class Ahead:
    """Samples up to `staleness` rollouts ahead, in rounds of so many, each round with one version of the weights.

    When the last rollout of a round is handed out the engine is idle: the weights are pushed, by the main thread since
    that is collective, and the next round starts, which samples while the policy learns from the rollout in hand. So a
    rollout is of one policy, which lacks the updates of at most `staleness` rollouts, and which one does not depend on
    timing: runs repeat.

    Args:
        staleness: s, at least 1. Rollouts of a round are 1, 2, ... s rollouts behind; the first of a run is not.
        draft: (cursor) samples and scores the rollout that starts with that prompt. Called in the background.
        ready: pushes the weights and gives seconds. Called by the caller's thread.
        version: gives the number of the policy's version.
        world_size: number of processes.
    """

    def __init__(
        self,
        staleness: int,
        draft: Callable[[int], Draft],
        ready: Callable[[], float],
        version: Callable[[], int],
        world_size: int,
    ) -> None:
        self.staleness, self._draft, self._ready, self._version = staleness, draft, ready, version
        self._world_size = world_size
        self._flights: deque[_Flight] = deque()
        self._thread: threading.Thread | None = None
        self._taken = 0  # rollouts handed out, each learnt from before the next is asked for

    def next(self, cursor: int, left: int) -> Draft:
        """The next rollout, with `rollout/staleness` and waiting times in its metrics.

        Args:
            cursor: number of its first prompt.
            left: rollouts that will be asked for after this one.
        """
        sync = 0.0
        if not self._flights:
            sync = self._round(cursor, 1)
        begin = time.perf_counter()
        draft, flight = self._take(cursor)
        waited = time.perf_counter() - begin
        stale = {"rollout/staleness": self._taken - flight.number}
        stale["rollout/staleness_updates"] = self._version() - flight.version
        self._taken += 1
        draft.version = flight.version
        if not self._flights and left:
            sync += self._round(draft.cursor, min(self.staleness, left), self._taken - 1)
        draft.metrics |= {"time/sync": sync, "time/wait": waited, **{k: float(v) for k, v in stale.items()}}
        return draft

    def drain(self) -> None:
        """Waits until the engine is idle. What was sampled stays; an error is raised when its rollout is asked for."""
        for flight in self._flights:
            flight.future.exception()

    def stop(self, cancel: Callable[[], None], timeout: float) -> None:
        """Forgets what is under way and waits for the thread to leave the engine, at most so many seconds."""
        self._flights.clear()
        if self._thread is not None and self._thread.is_alive():
            cancel()
            self._thread.join(timeout)

    def _round(self, cursor: int, count: int, number: int | None = None) -> float:
        """Pushes the weights and starts `count` rollouts; seconds of the push."""
        seconds, number = self._ready(), self._taken if number is None else number
        flights = [_Flight(Future(), self._version(), number) for _ in range(count)]
        self._flights.extend(flights)
        self._thread = in_background(lambda: self._work(cursor, [flight.future for flight in flights]))
        return seconds

    def _work(self, cursor: int, futures: list[Future[Draft]]) -> None:
        for i, future in enumerate(futures):
            try:
                draft = self._draft(cursor)
            except BaseException as error:
                for unmade in futures[i:]:
                    unmade.set_exception(error)
                return
            cursor = draft.cursor
            future.set_result(draft)

    def _take(self, cursor: int) -> tuple[Draft, _Flight]:
        """The oldest flight. After an engine's restart, what was lost is sampled anew, with the policy of now."""
        restarts = 0
        while True:
            try:
                draft = self._flights[0].future.result()
            except EngineRestartedError as error:
                restarts = may_restart(error, restarts, self._world_size)
                count = len(self._flights)
                log.warning("%s Pushing the weights and sampling %d lost rollouts again.", error, count)
                self._flights.clear()
                self._round(cursor, count)
                continue
            return draft, self._flights.popleft()


def in_background(work: Callable[[], None]) -> threading.Thread:
    """Starts a thread that does not keep the process alive."""
    thread = threading.Thread(target=work, name="lightrl-sampling", daemon=True)
    thread.start()
    return thread


def may_restart(error: EngineRestartedError, restarts: int, world_size: int) -> int:
    """Counts a restart of the engine.

    Raises:
        EngineDiedError: there were too many, or there are several ranks: a push is collective, others are elsewhere.
    """
    if world_size > 1:
        raise EngineDiedError(f"{error} restart_engine works with one process only.") from error
    if restarts == MAX_RESTARTS:
        raise EngineDiedError(
            f"The engine died {restarts + 1} times in one rollout: look for what kills it (memory, a driver), "
            "restarting does not help."
        ) from error
    return restarts + 1

"""When groups are started and handed out, where that is not all at once: ahead of the update, or as they finish."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from lightrl.engines.background import in_background
from lightrl.engines.base import EngineRestartedError
from lightrl.records import Completion, Routes, SamplingParams, Support
from lightrl.rollout.collation import ScoredGroup
from lightrl.rollout.collector import Collection, may_restart

log = logging.getLogger(__name__)


@dataclass
class CollectedRollout:
    """A rollout before it is laid out.

    Attributes:
        groups: its groups.
        cursor: number of the prompt after its last.
        metrics: scalars of its making.
        sampling: how it was sampled.
        version: version of the policy, where the groups' own may be out of date; None to take theirs.
        sampled: all groups that were sampled on the way, also those that were replaced.
    """

    groups: list[ScoredGroup]
    cursor: int
    metrics: dict[str, float]
    sampling: SamplingParams
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
        collect: (cursor, sampling) samples and scores the rollout that starts with that prompt. Called in the
            background.
        sampling: gives the settings of rollouts that begin now, which callbacks may change later.
        ready: pushes the weights and gives seconds. Called by the caller's thread.
        version: gives the number of the policy's version.
        world_size: number of processes.
    """

    def __init__(
        self,
        staleness: int,
        collect: Callable[[int, SamplingParams], CollectedRollout],
        sampling: Callable[[], SamplingParams],
        ready: Callable[[], float],
        version: Callable[[], int],
        world_size: int,
    ) -> None:
        self.staleness = staleness
        self._collect = collect
        self._sampling = sampling
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
        sampling = self._sampling()
        self._thread = in_background(lambda: self._work(cursor, sampling, futures), "lightrl-sampling")
        return seconds

    def _work(self, cursor: int, sampling: SamplingParams, futures: list[Future[CollectedRollout]]) -> None:
        for i, future in enumerate(futures):
            try:
                collected = self._collect(cursor, sampling)
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


@dataclass(frozen=True)
class InFlight:
    """Weights change within completions, with `staleness`.

    Args:
        cache: what becomes of the keys and values of the tokens that are there: "recompute" recomputes them, so that
            a token's log-prob is what its version gives it; "keep" goes on with those of older weights at once, as
            PipelineRL does: its log-prob is then that of a mixture which no forward of the trainer repeats.
    """

    cache: Literal["recompute", "keep"] = "recompute"


@dataclass
class _Begun:
    """A rollout that has begun: what makes it, and how many rollouts had been handed out then."""

    collection: Collection
    finish: Callable[[], CollectedRollout]
    number: int


class InFlightSource:
    """Keeps `staleness` rollouts under way while the policy learns, and changes the weights in the middle of them.

    Before a rollout is handed out the engine leaves off, wherever its completions are; the weights are pushed, and all
    goes on from the tokens that are there, whose keys and values are recomputed or kept. Then the rollout that comes
    `staleness` later begins, so the first token of any is at most so many rollouts old when it is learnt from, and the
    last is of the policy of now. Rollouts are of the same prompts as without it and are handed out in that order:
    nothing is dropped, nothing waits for longer than the bound, and each has its own long completions.

    Where the weights change depends on timing. `state_dict` has what was sampled so far, so that a run is resumed as if
    it had not stopped.

    Args:
        staleness: s, at least 1.
        settings: what becomes of keys and values.
        begin: (cursor, begun, sampling) starts the rollout with that first prompt; see `Collector.start`.
            `sampling` is None for the current settings.
        ready: pushes the weights and gives seconds. Collective.
        version: gives the number of the policy's version.
        prompts: of a rollout, over all ranks.

    Source: PipelineRL, https://arxiv.org/abs/2509.19128, and AReaL, https://arxiv.org/abs/2505.24298, which hand out
        what is done first: with a bound, slow prompts are then learnt from last or dropped. AReaL admits new prompts
        as here, so many rollouts ahead. PipelineRL keeps keys and values of the old weights.
    """

    def __init__(
        self,
        staleness: int,
        settings: InFlight,
        begin: Callable[
            [int, dict[int, list[Completion]], SamplingParams | None],
            tuple[Collection, Callable[[], CollectedRollout]],
        ],
        ready: Callable[[], float],
        version: Callable[[], int],
        *,
        prompts: int,
    ) -> None:
        self.staleness = staleness
        self._keep = settings.cache == "keep"
        self._begin = begin
        self._ready = ready
        self._version = version
        self._prompts = prompts
        self._flights: deque[_Begun] = deque()
        self._saved: list[dict[str, Any]] = []  # of a run that is resumed, until they begin again
        self._taken = 0

    def next(self, cursor: int, left: int) -> CollectedRollout:
        """The next rollout, with how old its tokens are and waiting times in its metrics.

        Args:
            cursor: number of its first prompt.
            left: rollouts that will be asked for after this one.
        """
        began = time.perf_counter()
        if not self._keep:
            self.drain()
        self._ready()
        for flight in self._flights:
            flight.collection.resume()
        while len(self._flights) <= min(self.staleness, left):
            saved: dict[str, Any] = self._saved.pop(0) if self._saved else {"behind": 0, "sampled": {}}
            first = cursor + len(self._flights) * self._prompts
            begun = {seed: [_loaded(part) for part in parts] for seed, parts in saved["sampled"].items()}
            # What was sampled before a resume has log-probs of the settings that it was sampled with.
            sampling = SamplingParams(**saved["sampling"]) if saved.get("sampling") else None
            collection, finish = self._begin(first, begun, sampling)
            self._flights.append(_Begun(collection, finish, self._taken - saved["behind"]))
        pushed = time.perf_counter()
        flight = self._flights[0]
        collected = flight.finish()
        self._flights.popleft()
        collected.metrics |= {"time/sync": pushed - began, "time/wait": time.perf_counter() - pushed}
        collected.metrics |= self._ages(collected, self._taken - flight.number)
        self._taken += 1
        return collected

    def drain(self) -> None:
        """Has the engine leave off until the next rollout is asked for, so that others may use it."""
        for flight in self._flights:
            flight.collection.suspend()

    def stop(self, timeout: float) -> None:
        """Forgets what is under way, which the collector ends."""
        self._flights.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        """What was sampled of the rollouts under way. The engine leaves off."""
        self.drain()
        return [
            {
                "behind": self._taken - flight.number,
                "sampling": asdict(flight.collection.sampling),
                "sampled": {s: [_saved(part) for part in parts] for s, parts in flight.collection.sampled.items()},
            }
            for flight in self._flights
        ] or self._saved

    def load_state_dict(self, flights: list[dict[str, Any]]) -> None:
        """Begins the first rollouts with what another run had sampled of them."""
        self._saved = list(flights)

    def _ages(self, collected: CollectedRollout, behind: int) -> dict[str, float]:
        now = self._version()
        rows = [row for group in collected.groups for trajectory in group.trajectories for row in trajectory.rows]
        versions = [[version for version in row.policy_versions if version >= 0] for row in rows]
        ages = [now - version for row in versions for version in row]
        return {
            "rollout/staleness": float(behind),
            "rollout/staleness_updates": float(max(ages, default=0)),
            "rollout/staleness_mean": sum(ages) / max(len(ages), 1),
            "rollout/switched": sum(len(set(row)) > 1 for row in versions) / len(versions),
        }


def _saved(part: Completion) -> dict[str, Any]:
    """A completion as a checkpoint holds it."""
    support = None if part.support is None else [part.support.counts, part.support.ids]
    routes = None if part.routes is None else part.routes.experts
    return {f.name: getattr(part, f.name) for f in fields(Completion)} | {"support": support, "routes": routes}


def _loaded(part: dict[str, Any]) -> Completion:
    support, routes = part["support"], part["routes"]
    records = {
        "support": None if support is None else Support(*support),
        "routes": None if routes is None else Routes(routes),
    }
    return Completion(**part | records)

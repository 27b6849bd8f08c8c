"""Schedules: when rollouts are sampled relative to the updates, and by which weights.

Every schedule hands out rollouts of the same prompts in the same order.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal

import torch

from lightrl.compat.arguments import at_least, one_of
from lightrl.distributed.strategies import gather_objects
from lightrl.engines.background import in_background
from lightrl.engines.base import Engine, EngineRestartedError
from lightrl.records import Completion, Routes, SamplingParams, Support
from lightrl.rollout.collector import may_restart
from lightrl.rollout.sampler import BegunRollout, RolloutSampler, SampledRollout

log = logging.getLogger(__name__)


class Schedule(ABC):
    """Decides when the rollouts of a run are sampled.

    A life: `check` when the data module is built, `attach` at the first rollout of each run, `load_state_dict` before
    it in a resumed run, `next` for each rollout, `close` at the end.

    Attributes:
        max_staleness: Number of rollouts that the weights of a sampled token may be behind those that learn from it.
        keeps_cache: Whether the engine keeps keys and values of older weights.
    """

    max_staleness: int = 0
    keeps_cache: bool = False

    def check(self, engine: Engine, *, adapts_prompts: bool, dynamic_sampling_rounds: int) -> None:  # noqa: B027
        """Raises a ValueError if the schedule doesn't fit the other parts of the data module.

        Args:
            engine: The engine, not started.
            adapts_prompts: Whether the next prompts depend on earlier rewards.
            dynamic_sampling_rounds: The data module's.
        """

    def attach(self, sampler: RolloutSampler) -> None:
        """Takes what samples the rollouts of the next run. Collective."""
        self.sampler = sampler

    @abstractmethod
    def next(self, cursor: int, left: int) -> SampledRollout:
        """The next rollout. Collective.

        Args:
            cursor: Number of its first prompt.
            left: Number of rollouts that are asked for after this one.
        """

    def drain(self) -> None:  # noqa: B027
        """Waits until others may use the engine until `next`. What was sampled stays."""

    def state_dict(self) -> Any:
        """State for a checkpoint: plain data, the same on every rank; None for nothing. Collective."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: B027
        """Restores the state."""

    def close(self, timeout: float) -> None:  # noqa: B027
        """Forgets what is under way, which has been given up by now, and waits so many seconds for threads."""


class OnPolicy(Schedule):
    """Samples each rollout when it is asked for, by the weights that learn from it."""

    def next(self, cursor: int, left: int) -> SampledRollout:
        sync = self.sampler.ready(cursor)
        rollout = self.sampler.finish(self.sampler.begin(cursor))
        rollout.metrics["time/sync"] = sync
        return rollout


class _BesideTraining(Schedule):
    """A schedule that samples while the policy learns."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = at_least(f"{type(self).__name__}.max_staleness", max_staleness, 1)

    def check(self, engine: Engine, *, adapts_prompts: bool, dynamic_sampling_rounds: int) -> None:
        schedule = f"schedule={type(self).__name__}"
        try:
            engine.check_overlap(in_flight=isinstance(self, InFlight))
        except ValueError as error:
            raise ValueError(f"{schedule} with {error}") from None
        if adapts_prompts:
            raise ValueError(
                f"{schedule} with PromptCurriculum: the next prompts depend on rewards that are not known while they "
                "are sampled. Use schedule=OnPolicy, or another source of prompts."
            )


@dataclass
class _Flight:
    """A rollout sampled ahead: its result, the version of its weights, and how many rollouts that will be behind."""

    future: Future[SampledRollout]
    version: int
    behind: int


class Ahead(_BesideTraining):
    """Samples up to `max_staleness` rollouts ahead, in rounds of that many, each with one version of the weights.

    When the last rollout of a round is handed out the engine is idle: the main thread pushes the weights, and the next
    round is sampled while the policy learns from the rollout in hand. Which version samples which rollout doesn't
    depend on timing: runs repeat. Needs an engine in separate processes.

    Args:
        max_staleness: Number of rollouts in a round, at least 1. They are 1, 2, ... rollouts behind the policy that
            learns from them; the first of a run is not. 1 hides the shorter of generation and update behind the other.
    """

    def __init__(self, max_staleness: int = 1) -> None:
        super().__init__(max_staleness)
        self._flights: deque[_Flight] = deque()
        self._thread: threading.Thread | None = None
        self._side_group: Any = None

    def attach(self, sampler: RolloutSampler) -> None:
        super().attach(sampler)
        # The thread's collectives must not meet the trainer's.
        if sampler.world_size > 1 and sampler.dynamic_sampling_rounds:
            self._side_group = torch.distributed.new_group(backend="gloo")

    def next(self, cursor: int, left: int) -> SampledRollout:
        """See `Schedule.next`. Adds `rollout/staleness` and waiting times to the metrics."""
        sync = 0.0 if self._flights else self._round(cursor, 1, behind=0)
        begin, restarts = time.perf_counter(), 0
        while True:
            try:
                rollout = self._flights[0].future.result()
                break
            except EngineRestartedError as error:  # what was lost is sampled again, by the policy of now
                restarts = may_restart(error, restarts, self.sampler.world_size)
                count = len(self._flights)
                log.warning("%s Pushing the weights and sampling %d lost rollouts again.", error, count)
                self._flights.clear()
                self._round(cursor, count, behind=0)
        flight, waited = self._flights.popleft(), time.perf_counter() - begin
        rollout.version = flight.version
        rollout.metrics |= {
            "rollout/staleness": float(flight.behind),
            "rollout/staleness_updates": float(self.sampler.policy_version - flight.version),
        }
        if not self._flights and left:
            sync += self._round(rollout.cursor, min(self.max_staleness, left), behind=1)
        rollout.metrics |= {"time/sync": sync, "time/wait": waited}
        return rollout

    def drain(self) -> None:
        for flight in self._flights:
            flight.future.exception()  # is raised when its rollout is asked for

    def close(self, timeout: float) -> None:
        self._flights.clear()
        if self._thread is not None:
            self._thread.join(timeout)

    def _round(self, cursor: int, count: int, behind: int) -> float:
        """Pushes the weights and starts `count` rollouts; seconds of the push."""
        seconds, sampling = self.sampler.ready(cursor), self.sampler.sampling()
        flights = [_Flight(Future(), self.sampler.policy_version, behind + i) for i in range(count)]
        self._flights.extend(flights)
        self._thread = in_background(partial(self._sample, cursor, sampling, flights), "lightrl-ahead")
        return seconds

    def _sample(self, cursor: int, sampling: SamplingParams, flights: list[_Flight]) -> None:
        gather = partial(gather_objects, group=self._side_group)
        for i, flight in enumerate(flights):
            try:
                rollout = self.sampler.finish(self.sampler.begin(cursor, sampling=sampling, recover=False), gather)
            except BaseException as error:
                for unmade in flights[i:]:
                    unmade.future.set_exception(error)
                return
            cursor = rollout.cursor
            flight.future.set_result(rollout)


class InFlight(_BesideTraining):
    """Keeps `max_staleness` rollouts under way while the policy learns, and changes the weights within completions.

    Before a rollout is handed out the weights are pushed between two steps of the engine, wherever its completions are.
    Then the rollout that comes `max_staleness` later begins. So the first token of a completion is at most that many
    rollouts old when it is learned from, and the last is of the current policy. No prompt is dropped or waits longer
    than that. Where the weights change depends on timing; a checkpoint has what was sampled so far, so that a resumed
    run continues as if it had not stopped.

    Args:
        max_staleness: Number of rollouts, at least 1.
        cache: What becomes of the keys and values of earlier tokens. "recompute" recomputes them, so that each token's
            log-prob is what its version gives it. "keep" continues with those of older weights at once: the log-prob is
            then of a mixture that no forward pass of the trainer repeats.

    Source: PipelineRL, https://arxiv.org/abs/2509.19128 (keeps the cache), and AReaL, https://arxiv.org/abs/2505.24298
        (admits prompts as here). Both hand out what is done first, so that slow prompts come last or are dropped.
    """

    def __init__(self, max_staleness: int = 1, cache: Literal["recompute", "keep"] = "recompute") -> None:
        super().__init__(max_staleness)
        self.cache = one_of("InFlight.cache", cache, "recompute", "keep")
        self.keeps_cache = cache == "keep"
        self._flights: deque[BegunRollout] = deque()
        self._saved: list[dict[str, Any]] = []  # of a run that is resumed, until they begin again

    def check(self, engine: Engine, *, adapts_prompts: bool, dynamic_sampling_rounds: int) -> None:
        super().check(engine, adapts_prompts=adapts_prompts, dynamic_sampling_rounds=dynamic_sampling_rounds)
        if dynamic_sampling_rounds:
            raise ValueError(
                f"schedule=InFlight with dynamic_sampling_rounds={dynamic_sampling_rounds}: prompts begin before "
                "it is known how many the rounds take. Remove one of the two."
            )

    def attach(self, sampler: RolloutSampler) -> None:
        super().attach(sampler)
        if checks := sampler.host.checks():
            raise ValueError(
                f"schedule=InFlight with callback {type(checks[0]).__name__}: at the end of a trajectory the engine no "
                "longer holds the weights that sampled it. Remove the callback; LogprobMonitor compares in the trainer."
            )

    def next(self, cursor: int, left: int) -> SampledRollout:
        """See `Schedule.next`. Adds how old the tokens are and waiting times to the metrics."""
        began, count = time.perf_counter(), self.sampler.prompts_per_rollout
        new = [cursor + i * count for i in range(len(self._flights), min(self.max_staleness, left) + 1)]
        self.sampler.ready(*new[:1])
        for first in new:
            self._begin(first)
        pushed = time.perf_counter()
        rollout = self.sampler.finish(self._flights[0])
        behind = self._flights.popleft().behind
        for flight in self._flights:
            flight.behind += 1
        rollout.metrics |= {"time/sync": pushed - began, "time/wait": time.perf_counter() - pushed}
        rollout.metrics |= self._ages(rollout) | {"rollout/staleness": float(behind)}
        return rollout

    def close(self, timeout: float) -> None:
        self._flights.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        """What every rank has sampled of the rollouts under way."""
        own = [
            {
                "behind": flight.behind,
                "sampling": asdict(flight.sampling),
                "sampled": {
                    key: [_saved(part) for part in parts] for key, parts in flight.collection.sampled().items()
                },
            }
            for flight in self._flights
        ]
        return [
            of_ranks[0] | {"sampled": {key: done for one in of_ranks for key, done in one["sampled"].items()}}
            for of_ranks in zip(*gather_objects(own or self._saved), strict=True)
        ]

    def load_state_dict(self, state: Any) -> None:
        self._saved = list(state or [])

    def _begin(self, first: int) -> None:
        saved = self._saved.pop(0) if self._saved else {"behind": 0, "sampling": None, "sampled": {}}
        begun = {key: [_loaded(part) for part in parts] for key, parts in saved["sampled"].items()}
        # What was sampled before a resume has log-probs of the settings that it was sampled with.
        sampling = SamplingParams(**saved["sampling"]) if saved["sampling"] else None
        flight = self.sampler.begin(first, sampling=sampling, begun=begun)
        flight.behind = saved["behind"]
        self._flights.append(flight)

    def _ages(self, rollout: SampledRollout) -> dict[str, float]:
        now = self.sampler.policy_version
        rows = [row for group in rollout.groups for trajectory in group.trajectories for row in trajectory.rows]
        versions = [[version for version in row.policy_versions if version >= 0] for row in rows]
        ages = [now - version for row in versions for version in row]
        return {
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

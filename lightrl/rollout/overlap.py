"""Schedules that sample rollouts during updates: `Ahead` and `InFlight`."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, Literal

import torch

from lightrl.compat.arguments import one_of
from lightrl.distributed.strategies import gather_objects
from lightrl.engines.background import in_background, release_threads
from lightrl.engines.base import EngineDiedError
from lightrl.environments.episodes import Task
from lightrl.records import Completion, CompletionGroup, GenerationRequest, Routes, SamplingParams, Support
from lightrl.rollout.collector import Collection
from lightrl.rollout.sampler import RolloutSampler, SampledRollout, Schedule


class _BesideTraining(Schedule):
    """A schedule that samples during updates."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness

    def check(self, data: Any) -> None:
        data.engine.check_overlap(in_flight=isinstance(self, InFlight))
        if hasattr(data.prompts, "success_reward"):
            raise ValueError(
                f"schedule={type(self).__name__} with PromptCurriculum: the next prompts depend on rewards that are "
                "not known yet. Use schedule=OnPolicy, or another source of prompts."
            )


class Ahead(_BesideTraining):
    """Samples `max_staleness` rollouts in advance with one version of the weights, while the policy is trained.

    Once the last rollout of a round is ready, the engine is idle. The schedule then pushes the weights and samples the
    next round during the updates. The version that samples each rollout doesn't depend on timing, so runs are
    reproducible. Requires an engine in separate processes.

    Args:
        max_staleness: Number of rollouts per round, at least 1. The i-th rollout of a round is i rollouts behind the
            policy trained on it; the first rollout of a run is on-policy. 1 samples one step ahead.
    """

    def __init__(self, max_staleness: int = 1) -> None:
        super().__init__(max_staleness)
        self._flights: deque[Future[SampledRollout]] = deque()
        self._thread: threading.Thread | None = None
        self._side_group: Any = None

    def attach(self, sampler: RolloutSampler) -> None:
        super().attach(sampler)
        # Keeps the thread's collectives apart from the trainer's.
        if sampler.data.world_size > 1 and sampler.data.dynamic_sampling_rounds:
            self._side_group = torch.distributed.new_group(backend="gloo")

    def next(self, cursor: int, left: int) -> SampledRollout:
        """Returns the next rollout, with `rollout/staleness` and waiting times in its metrics."""
        sync = 0.0 if self._flights else self._round(cursor, 1, behind=0)
        begin = time.perf_counter()
        release_threads()
        rollout = self._flights[0].result()
        self._flights.popleft()
        waited = time.perf_counter() - begin
        behind = self.sampler.data.learner.policy_version - (rollout.version or 0)
        rollout.metrics["rollout/staleness_updates"] = float(behind)
        if not self._flights and left:
            sync += self._round(rollout.cursor, min(self.max_staleness, left), behind=1)
        rollout.metrics |= {"time/sync": sync, "time/wait": waited}
        return rollout

    def drain(self) -> None:
        for flight in self._flights:
            flight.exception()  # raised when its rollout is requested

    def close(self, timeout: float) -> None:
        self._flights.clear()
        if self._thread is not None:
            self._thread.join(timeout)

    def _round(self, cursor: int, count: int, behind: int) -> float:
        """Pushes the weights, starts `count` rollouts, and returns the seconds that the push took."""
        seconds, sampling = self.sampler.ready(cursor), self.sampler.sampling()
        flights: list[Future[SampledRollout]] = [Future() for _ in range(count)]
        self._flights.extend(flights)
        version = self.sampler.data.learner.policy_version
        self._thread = in_background(partial(self._sample, cursor, sampling, version, behind, flights), "lightrl-ahead")
        return seconds

    def _sample(
        self, cursor: int, sampling: SamplingParams, version: int, behind: int, flights: list[Future[SampledRollout]]
    ) -> None:
        gather = partial(gather_objects, group=self._side_group)
        for i, flight in enumerate(flights):
            try:
                rollout = self.sampler.finish(self.sampler.begin(cursor, sampling=sampling), cursor, gather)
            except BaseException as error:
                for unmade in flights[i:]:
                    unmade.set_exception(error)
                return
            cursor, rollout.version = rollout.cursor, version
            rollout.metrics["rollout/staleness"] = float(behind + i)
            flight.set_result(rollout)


class RecordedCollection(Collection):
    """A collection that continues earlier partial completions, and records its own for a checkpoint.

    `begun` has the earlier ones by `_key` of the request. `behind` rollouts have been returned since it started.
    """

    def __init__(
        self, sampler: RolloutSampler, tasks: Sequence[Task], *, begun: Mapping[int, list[Completion]], behind: int = 0
    ) -> None:
        self.behind = behind
        self._record = dict(begun)
        self._keys: dict[GenerationRequest, int] = {}  # of pending requests
        super().__init__(sampler, tasks, trained=True)

    def sampled(self) -> dict[int, list[Completion]]:
        """Returns the completions so far, by `_key` of the request, for another collection to continue."""
        if self._future.done():
            return dict(self._record)
        run = self._sampler.loop.run
        try:
            paused = {group.request: group.completions for group in self._engine.pause()}
        except EngineDiedError:  # a checkpoint at the end of the run keeps finished completions
            return run(self._so_far({}))
        try:
            return run(self._so_far(paused))  # after pending responses
        finally:
            self._engine.resume()

    async def _so_far(self, paused: Mapping[GenerationRequest, list[Completion]]) -> dict[int, list[Completion]]:
        return self._record | {key: paused[request] for request, key in self._keys.items() if request in paused}

    async def _generate(self, request: GenerationRequest) -> CompletionGroup:
        key = _key(request)
        begun = self._record.get(key, [])
        if begun and all(part.finish_reason != "suspended" for part in begun):
            return CompletionGroup(request, begun, min(v for part in begun for v in part.policy_versions))
        request = replace(request, begun=begun)
        self._keys[request] = key
        try:
            group = await super()._generate(request)
        finally:
            del self._keys[request]
        versions = map(group.versions, range(len(group.completions)))
        parts = zip(group.completions, versions, strict=True)
        self._record[key] = [replace(part, policy_versions=of_part) for part, of_part in parts]
        return group


def _key(request: GenerationRequest) -> int:
    """Returns the key of a request in its rollout. A retry has the same seed, but may have a different prompt."""
    text = f"{request.seed}/{request.num_completions}/{request.token_ids}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class InFlight(_BesideTraining):
    """Keeps `max_staleness` rollouts in flight during training and updates the weights in the middle of completions.

    Before each rollout is returned, the weights are pushed between two engine steps, and the rollout that follows
    `max_staleness` later starts. The first token of a completion is therefore at most `max_staleness` rollouts old when
    it is trained on. No prompt is dropped or delayed longer. The token at which the weights change depends on timing.
    Checkpoints contain the partial completions, so a resumed run continues them.

    Args:
        max_staleness: Number of rollouts in flight, at least 1.
        cache: What happens to the KV cache when the weights change. "recompute" recomputes it, so each token has the
            exact log-prob under its weight version. "keep" continues with the old cache without a pause. Log-probs then
            come from a mixture of versions that the trainer can't reproduce.

    Source: PipelineRL, https://arxiv.org/abs/2509.19128 (keeps the cache), and AReaL, https://arxiv.org/abs/2505.24298
        (admits prompts as here). Both return rollouts in order of completion, which delays or drops slow prompts; we
        keep the order of the prompts.
    """

    def __init__(self, max_staleness: int = 1, cache: Literal["recompute", "keep"] = "recompute") -> None:
        super().__init__(max_staleness)
        self.cache = one_of("InFlight.cache", cache, "recompute", "keep")
        self.keeps_cache = cache == "keep"
        self._flights: deque[RecordedCollection] = deque()
        self._saved: list[dict[str, Any]] = []  # of a resumed run, until restarted

    def check(self, data: Any) -> None:
        super().check(data)
        if rounds := data.dynamic_sampling_rounds:
            raise ValueError(
                f"schedule=InFlight with dynamic_sampling_rounds={rounds}: later prompts start before the number of "
                "resampled prompts is known. Set dynamic_sampling_rounds to 0, or use another schedule."
            )

    def attach(self, sampler: RolloutSampler) -> None:
        super().attach(sampler)
        if checks := sampler.data.host.checks():
            raise ValueError(
                f"schedule=InFlight with callback {type(checks[0]).__name__}: at the end of a trajectory the engine no "
                "longer holds the weights that sampled it. Use the LogprobMonitor callback instead."
            )

    def next(self, cursor: int, left: int) -> SampledRollout:
        """Returns the next rollout, with token staleness and waiting times in its metrics."""
        began, count = time.perf_counter(), self.sampler.data.prompts_per_rollout
        new = [cursor + i * count for i in range(len(self._flights), min(self.max_staleness, left) + 1)]
        self.sampler.ready(*new[:1])
        for first in new:
            self._begin(first)
        pushed = time.perf_counter()
        rollout = self.sampler.finish(self._flights[0], cursor)
        behind = self._flights.popleft().behind
        for flight in self._flights:
            flight.behind += 1
        rollout.metrics |= {"time/sync": pushed - began, "time/wait": time.perf_counter() - pushed}
        rollout.metrics |= self._ages(rollout) | {"rollout/staleness": float(behind)}
        return rollout

    def close(self, timeout: float) -> None:
        self._flights.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns the partial completions of all ranks."""
        own = [
            {
                "behind": flight.behind,
                "sampling": asdict(flight.sampling),
                "sampled": {key: [_saved(part) for part in parts] for key, parts in flight.sampled().items()},
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
        # Log-probs from before a resume belong to the sampling settings of that time.
        sampling = SamplingParams(**saved["sampling"]) if saved["sampling"] else None
        collection = partial(RecordedCollection, begun=begun, behind=saved["behind"])
        flight: Any = self.sampler.begin(first, sampling=sampling, collection=collection)
        self._flights.append(flight)

    def _ages(self, rollout: SampledRollout) -> dict[str, float]:
        now = self.sampler.data.learner.policy_version
        rows = [row for group in rollout.groups for trajectory in group.trajectories for row in trajectory.rows]
        versions = [[version for version in row.policy_versions if version >= 0] for row in rows]
        ages = [now - version for row in versions for version in row]
        return {
            "rollout/staleness_updates": float(max(ages, default=0)),
            "rollout/staleness_mean": sum(ages) / max(len(ages), 1),
            "rollout/switched": sum(len(set(row)) > 1 for row in versions) / len(versions),
        }


def _saved(part: Completion) -> dict[str, Any]:
    """Converts a completion to plain data for a checkpoint."""
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

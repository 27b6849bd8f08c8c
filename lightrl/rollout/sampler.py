"""Samples rollouts. Schedules decide when, with which weights, and on which prompts.

Every schedule returns rollouts of the same prompts in the same order. `lightrl.rollout.overlap` contains schedules
that sample during updates.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightrl.data.prompts import PromptSet
from lightrl.distributed.strategies import gather_objects
from lightrl.engines.background import BackgroundLoop
from lightrl.environments.episodes import Task, request_seed
from lightrl.models.turns import ending_turns
from lightrl.records import Prompts, SamplingParams
from lightrl.rollout.collector import Collection, ScoredGroup

log = logging.getLogger(__name__)

TRAINED = partial(Collection, trained=True)


@dataclass
class SampledRollout:
    """A rollout before collation."""

    groups: list[ScoredGroup]  # this rank's
    cursor: int  # index of the prompt after its last
    metrics: dict[str, float]  # scalars
    sampling: SamplingParams  # its sampling settings
    sampled: list[ScoredGroup]  # all groups, including those dropped by dynamic sampling
    version: int | None = None  # of the weights; None uses the oldest version of its tokens


class RolloutSampler:
    """Starts and collects the groups of a run. Outside of training, `prompts` is None."""

    def __init__(self, data: Any, prompts: PromptSet | None) -> None:
        self.data = data
        self.prompts = prompts
        self.loop = BackgroundLoop("lightrl-episodes")
        self._live: list[Collection] = []
        self._read: tuple[int, Prompts] | None = None

    @property
    def progress(self) -> tuple[int, int, str] | None:
        """(finished prompts, total prompts, activity) of the oldest unfinished rollout; None without one."""
        return next((each.progress() for each in self._unfinished()), None)

    def collect(self, tasks: Sequence[Task], collection: Callable[..., Collection] = Collection) -> Collection:
        """Starts the episodes of P >= 1 tasks as a `collection`."""
        self._live = [*self._unfinished(), collection(self, tasks)]
        return self._live[-1]

    def _unfinished(self) -> list[Collection]:
        return [each for each in self._live if each.task is None or not each.task.done()]

    def ready(self, first: int | None = None) -> float:
        """Pushes the weights for the rollout from prompt `first` on; returns the elapsed seconds. Collective."""
        if first is not None:
            self._show(self._own_prompts(first), self.sampling())
        return self.data.host.ready()

    def sampling(self) -> SamplingParams:
        """Returns the current settings of training, which callbacks may change between rollouts."""
        self.data.engine.check_sampling(self.data.sampling, trained=True)
        sampling: SamplingParams = self.data.sampling
        return sampling

    def begin(
        self, first: int, *, sampling: SamplingParams | None = None, collection: Callable[..., Collection] = TRAINED
    ) -> Collection:
        """Starts the training rollout whose first prompt has the global index `first`. The engine must be ready.

        `sampling` defaults to the data module's current settings. The collection has this rank's groups.
        """
        prompts, sampling = self._own_prompts(first), sampling or self.sampling()
        return self.start(prompts, sampling, self.data.group_size, self._seeds(prompts, first, "train"), collection)

    def finish(
        self, begun: Collection, first: int, gather: Callable[[int], list[int]] = gather_objects
    ) -> SampledRollout:
        """Waits for the groups of a rollout, and for those that replace groups without reward spread.

        `first` is the global index of its first prompt. `gather` returns the integers of all ranks. Collective.
        """
        assert self.prompts is not None, "training has prompts"
        groups = begun.finish()
        cursor = first + self.data.prompts_per_rollout
        rollout = SampledRollout(groups, cursor, begun.metrics, begun.sampling, groups)
        if self.data.dynamic_sampling_rounds:
            from lightrl.rollout.dynamic_sampling import refill

            refill(self, rollout, gather)
        rollout.metrics |= {f"rollout/prompts_{name}": float(number) for name, number in self.prompts.counts.items()}
        self.data.host.check_trajectories(rollout.groups, rollout.sampling)
        return rollout

    def start(
        self,
        prompts: Prompts,
        sampling: SamplingParams,
        group_size: int,
        seeds: list[int],
        collection: Callable[..., Collection] = Collection,
    ) -> Collection:
        """Starts `group_size` trajectories for each of P prompts and seeds."""
        sampling = ending_turns(sampling, self.data.tokenizer)
        tasks = [
            Task(
                prompts[[i]],
                tuple(range(group_size)),
                seeds[i],
                sampling,
                self.data.tokenizer,
                self.data.engine.max_model_len,
                name=f"prompt {i} (dataset row {prompts.indices[i]})" if prompts.indices else f"prompt {i}",
            )
            for i in range(len(prompts))
        ]
        return self.collect(tasks, collection)

    def evaluate(
        self, prompts: Prompts, sampling: SamplingParams, group_size: int, stream: str, first: int
    ) -> SampledRollout:
        """Samples evaluation groups with the current policy.

        The random seeds depend on the name of the `stream` and on the index of a prompt in it, `first` for the first.
        """
        self._show(prompts, sampling)
        sync = self.data.host.ready()
        collection = self.start(prompts, sampling, group_size, self._seeds(prompts, 0, stream, first))
        groups = collection.finish()
        return SampledRollout(groups, first, collection.metrics | {"time/sync": sync}, sampling, groups)

    def close(self, timeout: float) -> None:
        """Cancels unfinished rollouts and stops the episodes' thread within about `timeout` seconds."""
        end = time.monotonic() + timeout
        for collection in self._live:
            collection.cancel()
        with contextlib.suppress(concurrent.futures.TimeoutError):  # an episode blocks the loop
            if self._live:
                self.loop.submit(self._ended()).result(max(timeout - 1, 0.5))
        self._live = []
        try:
            self.loop.close(self.data.episode.close, max(end - time.monotonic(), 0.5))
        except concurrent.futures.TimeoutError:  # Python 3.10 has another TimeoutError
            log.warning("An episode did not stop within %g seconds; its thread is leaked.", timeout)

    async def _ended(self) -> None:
        if tasks := [collection.task for collection in self._live if collection.task is not None]:
            await asyncio.wait(tasks)

    def _seeds(self, prompts: Prompts, cursor: int, stream: str, first: int = 0) -> list[int]:
        """Returns the seeds of this rank's prompts in the rollout of a stream that starts at prompt `cursor`."""
        rows = [first + i * self.data.world_size + self.data.rank for i in range(len(prompts))]
        return [request_seed(self.data.seed, stream, cursor, row) for row in rows]

    def _show(self, prompts: Prompts, sampling: SamplingParams) -> None:
        self.data.host.show([prompts.request(i, sampling, 0, 1) for i in range(len(prompts))])

    def _own_prompts(self, first: int) -> Prompts:
        """Returns this rank's prompts of the training rollout that starts at prompt `first`. Cached."""
        if self._read is None or self._read[0] != first:
            assert self.prompts is not None, "training has prompts"
            count, rank, world_size = self.data.prompts_per_rollout, self.data.rank, self.data.world_size
            self._read = first, self.prompts.batch(first, count, rank=rank, world_size=world_size)
        return self._read[1]


class Schedule(ABC):
    """Decides when the rollouts of a run are sampled.

    Call order: `check` when the data module is created, `attach` in its `setup`, `load_state_dict` when a run resumes,
    `next` for each rollout, and `close` at the end.

    Attributes:
        max_staleness: Maximum number of rollouts between the weights that sampled a token and the weights trained on
            it.
        keeps_cache: Whether the engine keeps the KV cache when the weights change.
    """

    max_staleness: int = 0
    keeps_cache: bool = False

    def check(self, data: Any) -> None:  # noqa: B027
        """Raises a ValueError if the schedule is incompatible with the other arguments of the `RolloutDataModule`."""

    def attach(self, sampler: RolloutSampler) -> None:
        """Sets the sampler of the next run. Collective."""
        self.sampler = sampler

    @abstractmethod
    def next(self, cursor: int, left: int) -> SampledRollout:
        """Returns the next rollout. Collective.

        Args:
            cursor: Index of its first prompt.
            left: Number of rollouts remaining after this one.
        """

    def drain(self) -> None:  # noqa: B027
        """Waits until the engine is free for other uses before the next call of `next`. Keeps sampled rollouts."""

    def state_dict(self) -> Any:
        """Returns the state for a checkpoint: plain data, equal on all ranks, or None. Collective."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: B027
        """Restores the state of `state_dict`."""

    def close(self, timeout: float) -> None:  # noqa: B027
        """Drops unfinished rollouts, which are already canceled, and waits up to `timeout` seconds for threads."""


class OnPolicy(Schedule):
    """Samples each rollout when it is requested, with the weights that are trained on it."""

    def next(self, cursor: int, left: int) -> SampledRollout:
        sync = self.sampler.ready(cursor)
        rollout = self.sampler.finish(self.sampler.begin(cursor), cursor)
        rollout.metrics["time/sync"] = sync
        return rollout

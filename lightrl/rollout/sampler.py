"""Samples rollouts: when, with which weights, and on which prompts.

Every schedule returns rollouts of the same prompts in the same order. `lightrl.rollout.overlap` has those that sample
during updates.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.data.prompts import PromptSet
from lightrl.distributed.strategies import gather_objects
from lightrl.engines.background import BackgroundLoop
from lightrl.engines.base import Engine
from lightrl.environments.episodes import Episode, Task, request_seed
from lightrl.models.turns import ending_turns
from lightrl.records import Completion, Prompts, SamplingParams
from lightrl.rewards.scorer import RewardScorer
from lightrl.rollout.collector import Collection, ScoredGroup
from lightrl.rollout.host import EngineHost

log = logging.getLogger(__name__)


@dataclass
class BegunRollout:
    """A training rollout in progress.

    Attributes:
        first: Index of its first prompt.
        collection: This rank's groups.
        sampling: Sampling settings.
        behind: Number of rollouts returned since it started.
    """

    first: int
    collection: Collection
    sampling: SamplingParams
    behind: int = 0


@dataclass
class SampledRollout:
    """A training rollout before collation.

    Attributes:
        groups: This rank's groups.
        cursor: Index of the prompt after its last.
        metrics: Scalar metrics.
        sampling: Sampling settings.
        sampled: All groups, including those dropped by dynamic sampling.
        version: Version of the weights. None uses the oldest version of its tokens.
    """

    groups: list[ScoredGroup]
    cursor: int
    metrics: dict[str, float]
    sampling: SamplingParams
    sampled: list[ScoredGroup]
    version: int | None = None


@dataclass(eq=False)
class RolloutSampler:
    """Starts and collects the groups of a run.

    Args:
        host: Host of the engine.
        episode: Episode type that produces trajectories.
        scorer: Reward functions, or None.
        prompts: Training prompts, or None outside of training.
        tokenizer: The policy's tokenizer.
        sampling: Function that returns the current training settings, which callbacks may change.
        group_size: Number of trajectories per training prompt.
        prompts_per_rollout: Number of prompts per training rollout across all ranks.
        dynamic_sampling_rounds: Maximum number of resampling rounds per training rollout.
        seed: Random seed of the run.
        rank: Rank of this process.
        world_size: Number of processes.
        stall_timeout: Seconds without progress after which a rollout fails. None waits forever.
    """

    host: EngineHost
    episode: Episode
    scorer: RewardScorer | None
    prompts: PromptSet | None
    tokenizer: Any
    sampling: Callable[[], SamplingParams]
    group_size: int
    prompts_per_rollout: int
    dynamic_sampling_rounds: int
    seed: int
    rank: int
    world_size: int
    stall_timeout: float | None

    loop: BackgroundLoop = field(default_factory=lambda: BackgroundLoop("lightrl-episodes"), init=False)
    _live: list[Collection] = field(default_factory=list, init=False)
    _read: tuple[int, Prompts] | None = field(default=None, init=False)

    @property
    def policy_version(self) -> int:
        """Current version of the policy's weights."""
        return self.host.module.policy_version

    @property
    def progress(self) -> tuple[int, int, str] | None:
        """(finished prompts, total prompts, activity) of the oldest unfinished rollout; None without one."""
        live = (each for each in list(self._live) if each.task is None or not each.task.done())
        return next((each.progress() for each in live), None)

    def collect(self, tasks: Sequence[Task], **how: Any) -> Collection:
        """Starts the episodes of P >= 1 tasks. `how` is passed to `Collection`."""
        self._live = [each for each in self._live if each.task is None or not each.task.done()]
        self._live.append(Collection(self, tasks, **how))
        return self._live[-1]

    def ready(self, first: int | None = None) -> float:
        """Pushes the weights and returns the elapsed seconds. Collective.

        Args:
            first: Index of the next training rollout's first prompt, for the weight-sync check.
        """
        if first is not None:
            self._show(self._own_prompts(first), self.sampling())
        return self.host.ready()

    def begin(
        self,
        first: int,
        *,
        sampling: SamplingParams | None = None,
        begun: dict[int, list[Completion]] | None = None,
    ) -> BegunRollout:
        """Starts a training rollout. The engine must be ready.

        Args:
            first: Global index of its first prompt.
            sampling: Sampling settings. Defaults to the data module's current ones.
            begun: Partial completions of an interrupted run, by request key. None disables recording.
        """
        prompts, sampling = self._own_prompts(first), sampling or self.sampling()
        seeds = self._seeds(prompts, first, "train")
        collection = self._start(prompts, sampling, self.group_size, seeds, trained=True, begun=begun)
        return BegunRollout(first, collection, sampling)

    def finish(self, rollout: BegunRollout, gather: Callable[[int], list[int]] = gather_objects) -> SampledRollout:
        """Waits for the groups of a rollout and replaces those without reward spread (dynamic sampling).

        In each of up to `dynamic_sampling_rounds` rounds, every rank takes one new prompt per missing group. The ranks
        share consecutive prompts, so the cursor is equal on all ranks and no prompt is skipped. Remaining places are
        filled with the oldest dropped groups, which add nothing to a group estimator.

        Args:
            rollout: Rollout started by `begin`.
            gather: Function that gathers an integer from all ranks. Collective.

        Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.2, which samples batches of a fixed size until one is
            full and drops surplus groups. We sample only the missing groups.
        """
        assert self.prompts is not None, "training has prompts"
        collections, groups = [rollout.collection], rollout.collection.finish()
        wanted, cursor, rounds = len(groups), rollout.first + self.prompts_per_rollout, 0
        while rounds < self.dynamic_sampling_rounds:
            missing = gather(wanted - sum(group.has_spread for group in groups))
            if not any(missing):
                break
            if count := missing[self.rank]:
                offset = sum(missing[: self.rank])
                prompts = self.prompts.batch(cursor + offset, count)
                seeds = [request_seed(self.seed, "train", cursor, offset + i) for i in range(count)]
                collections.append(self._start(prompts, rollout.sampling, self.group_size, seeds, trained=True))
                groups = [*groups, *collections[-1].finish()]
            cursor, rounds = cursor + sum(missing), rounds + 1
        metrics = {f"rollout/prompts_{name}": float(number) for name, number in self.prompts.counts.items()}
        metrics |= {name: sum(each.seconds[name] for each in collections) for name in rollout.collection.seconds}
        if self.episode.multi_turn:
            metrics["rollout/retried"] = float(sum(each.retried for each in collections))
        sampled = groups
        if self.dynamic_sampling_rounds:
            kept = [group for group in sampled if group.has_spread]
            flat = [group for group in sampled if not group.has_spread]
            groups = [*kept, *flat[: wanted - len(kept)]]
            rewards = [reward for group in sampled for reward in group.rewards if not math.isnan(reward)]
            metrics |= {
                "rollout/refills": float(rounds),
                "rollout/dropped_groups": float(len(sampled) - wanted),
                "rollout/flat_groups": float(wanted - len(kept)),
                "reward/sampled_mean": math.fsum(rewards) / len(rewards) if rewards else 0.0,
            }
        self.host.check_trajectories(groups, rollout.sampling, self.tokenizer)
        return SampledRollout(groups, cursor, metrics, rollout.sampling, sampled)

    def evaluate(
        self, prompts: Prompts, sampling: SamplingParams, group_size: int, stream: str, cursor: int
    ) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Samples evaluation groups with the current policy, and returns them with timing metrics.

        The random seeds depend on the name of the `stream` and on `cursor`, the number of earlier prompts in it.
        """
        self._show(prompts, sampling)
        sync = self.host.ready()
        collection = self._start(prompts, sampling, group_size, self._seeds(prompts, cursor, stream))
        return collection.finish(), {**collection.seconds, "time/sync": sync}

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
            self.loop.close(self.episode.close, max(end - time.monotonic(), 0.5))
        except concurrent.futures.TimeoutError:  # Python 3.10 has another TimeoutError
            log.warning("An episode did not stop within %g seconds; its thread is leaked.", timeout)

    async def _ended(self) -> None:
        if tasks := [collection.task for collection in self._live if collection.task is not None]:
            await asyncio.wait(tasks)

    def _start(
        self, prompts: Prompts, sampling: SamplingParams, group_size: int, seeds: list[int], **how: Any
    ) -> Collection:
        """Starts `group_size` trajectories for each of P prompts and seeds. `how` is passed to `Collection`."""
        sampling = ending_turns(sampling, self.tokenizer)
        tasks = [
            Task(
                prompts[[i]],
                tuple(range(group_size)),
                seeds[i],
                sampling,
                self.tokenizer,
                self.host.engine.max_model_len,
                name=f"prompt {i} (dataset row {prompts.indices[i]})" if prompts.indices else f"prompt {i}",
            )
            for i in range(len(prompts))
        ]
        return self.collect(tasks, **how)

    def _seeds(self, prompts: Prompts, cursor: int, stream: str) -> list[int]:
        """Returns the seeds of this rank's prompts in the rollout of a stream that starts at prompt `cursor`."""
        rows = [i * self.world_size + self.rank for i in range(len(prompts))]
        return [request_seed(self.seed, stream, cursor, row) for row in rows]

    def _show(self, prompts: Prompts, sampling: SamplingParams) -> None:
        self.host.show(prompts, sampling, first_turn_only=not self.episode.multi_turn)

    def _own_prompts(self, first: int) -> Prompts:
        """Returns this rank's prompts of the training rollout that starts at prompt `first`. Cached."""
        if self._read is None or self._read[0] != first:
            assert self.prompts is not None, "training has prompts"
            count, rank, world_size = self.prompts_per_rollout, self.rank, self.world_size
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

    def check(self, engine: Engine, *, adapts_prompts: bool, dynamic_sampling_rounds: int) -> None:  # noqa: B027
        """Raises a ValueError if the schedule is incompatible with the other arguments of the data module.

        Args:
            engine: The engine, not started.
            adapts_prompts: Whether the next prompts depend on earlier rewards.
            dynamic_sampling_rounds: Argument of the data module.
        """

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
        rollout = self.sampler.finish(self.sampler.begin(cursor))
        rollout.metrics["time/sync"] = sync
        return rollout

"""Samples rollouts: prompts to episodes to scored groups, with the weights that the engine holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightrl.data.prompts import PromptSet
from lightrl.distributed.strategies import gather_objects
from lightrl.environments.episodes import Episode, Task, request_seed
from lightrl.models.turns import ending_turns
from lightrl.records import Completion, Prompts, SamplingParams
from lightrl.rewards.scorer import RewardScorer
from lightrl.rollout.collation import ScoredGroup
from lightrl.rollout.collector import Collection, Collector
from lightrl.rollout.host import EngineHost


@dataclass
class SampledRollout:
    """A training rollout before it is laid out.

    Attributes:
        groups: This rank's groups.
        cursor: Number of the prompt after its last.
        metrics: Scalars measured on the way.
        sampling: How it was sampled.
        sampled: All groups, also those that dynamic sampling dropped.
        version: Version of the weights; None takes that of the tokens.
    """

    groups: list[ScoredGroup]
    cursor: int
    metrics: dict[str, float]
    sampling: SamplingParams
    sampled: list[ScoredGroup]
    version: int | None = None


@dataclass
class BegunRollout:
    """A training rollout under way: number of its first prompt, its groups, and how it is sampled."""

    first: int
    collection: Collection
    sampling: SamplingParams
    recover: bool


@dataclass(eq=False)
class RolloutSampler:
    """Starts groups and collects them, in one run.

    Args:
        host: The engine's.
        episode: How attempts are made.
        scorer: Reward functions; None without any.
        prompts: Training prompts; None outside of training.
        tokenizer: The policy's.
        sampling: Returns the training settings of now, which callbacks may change.
        group_size: Attempts per prompt.
        prompts_per_rollout: Prompts of a training rollout, over all ranks.
        dynamic_sampling_rounds: Maximum number of further generations per training rollout.
        seed: The run's.
        rank: Rank of this process.
        world_size: Number of processes.
        stall_timeout: Seconds without progress after which a rollout fails; None waits forever.
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

    def __post_init__(self) -> None:
        self._collector = Collector(
            self.host.engine,
            self.episode,
            self.scorer,
            ready=self.host.ready,
            world_size=self.world_size,
            stall_timeout=self.stall_timeout,
            asks_with_media=self.host.show_media,
        )
        self._read: tuple[int, Prompts] | None = None

    @property
    def policy_version(self) -> int:
        """Version of the weights that the policy has now."""
        return self.host.module.policy_version

    def ready(self, first: int | None = None) -> float:
        """Pushes the weights. Collective.

        Args:
            first: Number of the first prompt of the training rollout that begins next, whose prompts the check after
                the push may use.

        Returns:
            seconds that it took.
        """
        if first is not None:
            self.show(self._own_prompts(first), self.sampling())
        return self.host.ready()

    def begin(
        self,
        first: int,
        *,
        sampling: SamplingParams | None = None,
        begun: dict[int, list[Completion]] | None = None,
        recover: bool = False,
    ) -> BegunRollout:
        """Starts the training rollout whose first prompt has number `first`; the engine must be ready.

        Args:
            first: Number of the prompt over all ranks.
            sampling: Defaults to the data module's settings of now.
            begun: What an interrupted run had sampled; {} for nothing, in a rollout that may be suspended.
            recover: Push the weights to an engine that restarts, and continue. Only in the main thread.
        """
        prompts, sampling = self._own_prompts(first), sampling or self.sampling()
        how: dict[str, Any] = {"trained": True, "begun": begun, "recover": recover}
        collection = self.start(prompts, sampling, self.group_size, self.seeds(prompts, first), **how)
        return BegunRollout(first, collection, sampling, recover)

    def finish(self, rollout: BegunRollout, gather: Callable[[int], list[int]] = gather_objects) -> SampledRollout:
        """Waits for the groups of a rollout, and replaces those without reward spread (dynamic sampling).

        Args:
            rollout: What `begin` started.
            gather: Every rank's number from this rank's. Collective.
        """
        assert self.prompts is not None, "training has prompts"
        training, rounds = self.prompts, self.dynamic_sampling_rounds
        metrics, retried, sampled = {"time/generate": 0.0, "time/score": 0.0}, 0, list[ScoredGroup]()

        def collect(collection: Collection) -> list[ScoredGroup]:
            nonlocal retried
            groups = collection.finish()
            for name, seconds in collection.seconds.items():
                metrics[name] += seconds
            retried += collection.retried
            sampled.extend(groups)
            return groups

        def collect_more(start: int, offset: int, count: int) -> list[ScoredGroup]:
            prompts = training.batch(start + offset, count)
            seeds = [request_seed(self.seed, "train", start, offset + i) for i in range(count)]
            how: dict[str, Any] = {"recover": rollout.recover, "trained": True}
            return collect(self.start(prompts, rollout.sampling, self.group_size, seeds, **how))

        groups, cursor = collect(rollout.collection), rollout.first + self.prompts_per_rollout
        if rounds:
            groups, cursor, refilled = refill(
                groups, cursor, rounds, collect=collect_more, gather=gather, rank=self.rank
            )
            metrics |= refilled
        if self.episode.multi_turn:
            metrics["rollout/retried"] = float(retried)
        metrics |= {f"rollout/prompts_{name}": float(n) for name, n in training.counts.items()}
        self.host.check_trajectories(groups, rollout.sampling, self.tokenizer)
        return SampledRollout(groups, cursor, metrics, rollout.sampling, sampled)

    def start(
        self, prompts: Prompts, sampling: SamplingParams, group_size: int, seeds: list[int], **how: Any
    ) -> Collection:
        """Starts `group_size` attempts at each of this rank's prompts; the engine must be ready.

        Args:
            prompts: P prompts.
            sampling: The distribution.
            group_size: Attempts per prompt.
            seeds: P seeds.
            how: Further arguments of `Collection`.
        """
        self.show(prompts, sampling)
        if self.scorer is not None:
            self.scorer.set_progress(self._progress())
        sampling = ending_turns(sampling, self.tokenizer)
        tasks = [
            Task(
                prompts[[i]],
                tuple(range(group_size)),
                seeds[i],
                sampling,
                self.tokenizer,
                self.host.engine.max_model_len,
                name=f"prompt {i} (data-set row {prompts.indices[i]})" if prompts.indices else f"prompt {i}",
            )
            for i in range(len(prompts))
        ]
        return self._collector.start(tasks, **how)

    def seeds(self, prompts: Prompts, cursor: int, stream: str = "train") -> list[int]:
        """A seed for each of this rank's prompts in the rollout of a stream that starts with prompt number `cursor`."""
        rows = [i * self.world_size + self.rank for i in range(len(prompts))]
        return [request_seed(self.seed, stream, cursor, row) for row in rows]

    def show(self, prompts: Prompts, sampling: SamplingParams) -> None:
        """Shows what pushes weights the prompts that are about to be sampled."""
        self.host.show(prompts, sampling, first_turn_only=not self.episode.multi_turn)

    def close(self, timeout: float) -> None:
        """Ends what is under way, in about `timeout` seconds."""
        self._collector.close(timeout)

    def _progress(self) -> float:
        """Share of the run's rollouts that are done; 0 outside of training, or if the run's length is unknown."""
        trainer: Any = self.host.module.trainer
        if trainer.state.fn != "fit" or not isinstance(trainer.num_training_batches, int):
            return 0.0
        total = trainer.num_training_batches * (trainer.max_epochs or 0)
        return min((trainer.fit_loop.total_batch_idx + 1) / total, 1.0) if total > 0 else 0.0

    def _own_prompts(self, first: int) -> Prompts:
        """This rank's share of the training rollout that starts with prompt number `first`, read once."""
        if self._read is None or self._read[0] != first:
            assert self.prompts is not None, "training has prompts"
            count, rank, world_size = self.prompts_per_rollout, self.rank, self.world_size
            self._read = first, self.prompts.batch(first, count, rank=rank, world_size=world_size)
        return self._read[1]


def refill(
    groups: list[ScoredGroup],
    cursor: int,
    rounds: int,
    *,
    collect: Callable[[int, int, int], list[ScoredGroup]],
    gather: Callable[[int], list[int]],
    rank: int,
) -> tuple[list[ScoredGroup], int, dict[str, float]]:
    """Replaces groups without reward spread by those of further prompts (dynamic sampling), in at most `rounds` rounds.

    In each round every rank takes one prompt for each group that it lacks, all ranks together consecutive ones, so that
    the cursor is the same everywhere and no prompt is lost. Groups that are still missing at the end are filled up with
    dropped ones, the oldest first: the batch keeps its size, and they add nothing to a group estimator.

    Args:
        groups: This rank's groups.
        cursor: Number of the prompt after those taken so far.
        rounds: Maximum number of rounds.
        collect: (start, offset, count) samples the groups of prompts start + offset ... start + offset + count - 1.
        gather: Every rank's number from this rank's. Collective; called equally often on every rank.
        rank: Rank of this process.

    Returns:
        as many groups as came in; the cursor after all rounds; metrics.

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.2, which samples batches of a fixed size until one is full
        and drops surplus groups; here there is no surplus.
    """
    wanted, everything, refills = len(groups), list(groups), 0
    while refills < rounds:
        missing = gather(wanted - sum(group.has_spread for group in everything))
        if not any(missing):
            break
        if missing[rank]:
            everything += collect(cursor, sum(missing[:rank]), missing[rank])
        cursor += sum(missing)
        refills += 1
    kept = [group for group in everything if group.has_spread]
    flat = [group for group in everything if not group.has_spread]
    rewards = [reward for group in everything for reward in group.rewards if not math.isnan(reward)]
    metrics = {
        "rollout/refills": float(refills),
        "rollout/dropped_groups": float(len(everything) - wanted),
        "rollout/flat_groups": float(wanted - len(kept)),
        "reward/sampled_mean": math.fsum(rewards) / len(rewards) if rewards else 0.0,
    }
    return [*kept, *flat[: wanted - len(kept)]], cursor, metrics

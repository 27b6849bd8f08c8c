"""Schedules: when rollouts are sampled relative to the updates, and with which weights.

Every schedule returns rollouts of the same prompts in the same order. `lightrl.rollout.overlap` has those that sample
during updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lightrl.engines.base import Engine
from lightrl.rollout.sampler import RolloutSampler, SampledRollout


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

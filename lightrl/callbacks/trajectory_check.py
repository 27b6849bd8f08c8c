"""Proves at run time that what is trained is what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightrl.compat.arguments import above, at_least
from lightrl.engines.base import Engine
from lightrl.environments.canary import check_trajectories
from lightrl.records import SamplingParams, Trajectory
from lightrl.rollout.learner import TrajectoryCheck


class LedgerMismatchError(RuntimeError):
    """A row that would be trained on is not what the engine sampled."""


class TrajectoryLogprobCheck(TrajectoryCheck):
    """Asks the engine for the log-probs of some finished rows, and stops the run where they are not those of sampling.

    It compares `log pi(token | row up to it)` of the row with what the engine reported for the token when it sampled
    it, before the weights change. A row whose history differs from what was sampled, by tokenising again, a template
    that rewrites, or a splice in the wrong place, gives other log-probs. Failed trajectories and
    prompts with media are left out.

    Args:
        every_n_rollouts: how often, at least 1.
        num_trajectories: how many per rollout and rank, at least 1; evenly spread over the rollout.
        tolerance: largest difference in log-prob. Prefill and decoding round differently: 1e-4 suits engines in float32
            (a run had 1.2e-5 at a log-prob of -6); bfloat16 needs about 0.1.

    Raises:
        ValueError: a count below 1, a tolerance not above 0, or training samples of another temperature than 1 or cut
            by top-p and the like, whose log-probs are not those that the engine is asked for.
        LedgerMismatchError: with trajectory, row, turn and both texts.
    """

    def __init__(self, every_n_rollouts: int = 1, num_trajectories: int = 4, tolerance: float = 1e-4) -> None:
        self.every_n_rollouts = at_least("TrajectoryLogprobCheck.every_n_rollouts", every_n_rollouts, 1)
        self.num_trajectories = at_least("TrajectoryLogprobCheck.num_trajectories", num_trajectories, 1)
        self.tolerance = above("TrajectoryLogprobCheck.tolerance", tolerance)
        self._rollouts = 0

    def check_sampling(self, sampling: SamplingParams) -> None:
        plain = SamplingParams()
        names = ["temperature", "fire_temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens"]
        names += ["regex", "json_schema"]
        other = [f"sampling.{n}={getattr(sampling, n)!r}" for n in names if getattr(sampling, n) != getattr(plain, n)]
        if other:
            raise ValueError(
                f"TrajectoryLogprobCheck with {', '.join(other)}: the engine gives log-probs of finished rows at "
                "temperature 1 and uncut, which those of sampling then are not. Sample so, or leave the callback out."
            )

    def check_trajectories(self, engine: Engine, trajectories: Sequence[Trajectory], tokenizer: Any) -> None:
        self._rollouts += 1
        sound = [trajectory for trajectory in trajectories if not trajectory.failed]
        if (self._rollouts - 1) % self.every_n_rollouts or not sound:
            return
        count = min(self.num_trajectories, len(sound))
        sample = [sound[i * len(sound) // count] for i in range(count)]
        found = check_trajectories(engine, sample, tokenizer.decode, tolerance=self.tolerance)
        if found:
            raise LedgerMismatchError(
                f"{len(found)} turns of {count} trajectories have other log-probs in the rows to be trained than when "
                f"they were sampled (tolerance {self.tolerance:g}). The first: {found[0]}"
            )

"""Checks of log-probs on trained rows: the engine against the trainer, and against its own sampling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightrl.algorithms.hooks import RLCallback
from lightrl.compat.arguments import above, at_least, one_of
from lightrl.engines.base import Engine
from lightrl.environments.canary import check_trajectories
from lightrl.records import Experience, Rollouts, SamplingParams, Trajectory
from lightrl.rollout.learner import TrajectoryCheck

log = logging.getLogger(__name__)

BOUNDS = {"float64": 1e-3, "float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
POSITIONS = (0, 1, 16, 128, 1024)
TURNS, LAGS = 8, 4  # the last of each takes all that come after it


class LogprobMonitor(RLCallback):
    """Measures the gap between the engine's log-probs and the trainer's; above a bound it warns or stops the run.

        gap = mean |log pi_engine - log pi_old| over the trained tokens that the current weights sampled

    The bound applies to all of them, to each range of token positions within a row, and to each turn, since faults of a
    cache, of position ids, or of later turns hide in the overall mean. Tokens sampled by older weights are measured by
    lag and not bounded. Metrics over all ranks: `kl/engine_gap` and `kl/engine_gap_<cell>`. It needs the trainer's
    log-probs before the update: one more forward pass per rollout if nothing else does.

    Args:
        bound: Maximum mean gap in nats per token, above 0. Defaults to that of the coarsest dtype of engine, policy,
            and `trainer.precision`: 0.001 in float32, 0.02 in float16, 0.05 in bfloat16 (also for an unknown dtype).
        action: "warn" logs a warning per rollout; "stop" ends the run before the update.
        min_tokens: Minimum tokens of a cell that is bounded, at least 1.

    Raises:
        ValueError: An argument is out of range; in `setup`, the module has no rollouts, or its loss replaces the
            trainer's log-probs by the engine's.
        RuntimeError: With "stop", on all ranks: a cell is above the bound.
    """

    reads_all_rows = False

    def __init__(
        self, bound: float | None = None, action: Literal["warn", "stop"] = "warn", min_tokens: int = 16
    ) -> None:
        self.bound = above("LogprobMonitor.bound", bound, or_none="(null) for the dtype's")
        self.action = one_of("LogprobMonitor.action", action, "warn", "stop")
        self.min_tokens = at_least("LogprobMonitor.min_tokens", min_tokens, 1)
        self._rollouts: Rollouts | None = None
        self._measured: dict[str, float] = {}
        self._warned = False

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Rejects a module without rollouts, and a loss that replaces the trainer's log-probs."""
        super().setup(trainer, pl_module, stage)
        loss = pl_module.loss
        if stage == "fit" and loss.replaces_old_logprobs:
            raise ValueError(
                f"LogprobMonitor with loss={type(loss).__name__}: the engine's log-probs replace the trainer's, "
                "so there is nothing to compare. Drop one of them."
            )

    def on_rollout_scored(self, trainer: Trainer, pl_module: Any, rollouts: Rollouts) -> None:
        """Keeps the rollout."""
        self._rollouts = rollouts

    def on_experience_made(self, trainer: Trainer, pl_module: Any, experience: Experience) -> None:
        """Measures, and warns or stops."""
        rollouts, self._rollouts = self._rollouts, None
        assert rollouts is not None and experience.old_logprobs is not None, "declared by reads_old_logprobs"
        cells = _cells(rollouts, experience, pl_module.policy_version)
        gap = (experience.engine_logprobs - experience.old_logprobs).abs().double()
        sums = torch.stack([torch.where(mask, gap, 0.0).sum() for mask in cells.values()])
        counts = torch.stack([mask.sum().double() for mask in cells.values()])
        totals, tokens = pl_module.all_sum(torch.stack([sums, counts])).tolist()
        means = {n: s / c for n, s, c in zip(cells, totals, tokens, strict=True) if c}
        several_turns = any(f"turn_{turn}" in means for turn in range(1, TURNS))
        shown = {n: x for n, x in means.items() if n not in ("all", "lag_0") and (several_turns or n != "turn_0")}
        self._measured = {f"kl/engine_gap_{name}": value for name, value in shown.items()}
        if "all" in means:
            self._measured["kl/engine_gap"] = means["all"]
        bound = self.bound or self._dtype_bound(trainer, pl_module)
        enough = {name for name, count in zip(cells, tokens, strict=True) if count >= self.min_tokens}
        bounded = {n: x for n, x in means.items() if not n.startswith("lag_") and n in enough}
        above = {name: value for name, value in bounded.items() if not value <= bound}  # NaN is above
        if above:
            self._act(trainer, pl_module, bound, above)

    def on_policy_updated(self, trainer: Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Adds the measurements to the rollout's metrics."""
        metrics.update(self._measured)

    def _dtype_bound(self, trainer: Trainer, pl_module: Any) -> float:
        """The bound of the coarsest dtype of engine and trainer."""
        engine = getattr(trainer.datamodule, "engine", None)  # type: ignore[attr-defined]
        theirs = getattr(engine, "dtype", None)
        if theirs is None and not self._warned:
            self._warned = True
            log.warning(
                "LogprobMonitor: the dtype of %s is unknown. Using bfloat16's bound, %g nats per token. Set "
                "LogprobMonitor.bound.",
                type(engine).__name__,
                BOUNDS["bfloat16"],
            )
        precision = str(trainer.precision)
        own = "bfloat16" if precision.startswith("bf16") else "float16" if precision.startswith("16") else "float32"
        dtypes = (own, pl_module.actor_spec.dtype or "float32", theirs or "bfloat16")
        return max(BOUNDS.get(dtype, BOUNDS["bfloat16"]) for dtype in dtypes)

    def _act(self, trainer: Trainer, pl_module: Any, bound: float, above: dict[str, float]) -> None:
        engine = getattr(trainer.datamodule, "engine", None)  # type: ignore[attr-defined]
        listed = ", ".join(f"{name} {value:.3g}" for name, value in above.items())
        message = (
            f"The log-probs of {type(engine).__name__} differ from the trainer's (layout {pl_module.actor.layout}) by "
            f"more than {bound:g} nats per token on average: {listed}. Check dtypes, WeightSync's canary, and "
            "sampling settings that change the distribution; correct it (OffPolicyCorrection) or raise "
            "LogprobMonitor.bound."
        )
        if self.action == "stop":
            raise RuntimeError(message)
        log.warning("%s", message)


def _cells(rollouts: Rollouts, experience: Experience, version: int) -> dict[str, Tensor]:
    """Name -> (B, T) bool mask of its trained tokens; the same names on every rank."""
    mask = experience.response_mask
    if rollouts.policy_versions is None:
        versions = torch.full_like(rollouts.token_ids, rollouts.policy_version)
    else:
        versions = rollouts.policy_versions
    lag = (version - versions).clamp(0, LAGS - 1)
    current = mask & (lag == 0)
    position = rollouts.response_mask.cumsum(1) - 1
    turn = torch.zeros_like(position) if rollouts.turn_ids is None else rollouts.turn_ids
    cells = {"all": current}
    for start, end in zip(POSITIONS, [*POSITIONS[1:], mask.shape[1] + 1], strict=True):
        cells[f"position_{start}"] = current & (position >= start) & (position < end)
    cells |= {f"turn_{n}": current & (turn.clamp(max=TURNS - 1) == n) for n in range(TURNS)}
    return cells | {f"lag_{n}": mask & (lag == n) for n in range(LAGS)}


class LedgerMismatchError(RuntimeError):
    """A row that would be trained differs from what the engine sampled."""


class TrajectoryLogprobCheck(TrajectoryCheck):
    """Asks the engine for the log-probs of some finished rows, and stops the run if they differ from those of sampling.

    It compares `log pi(token | row up to it)` with the log-prob that the engine reported when it sampled the token,
    before the weights change. A row with another history (tokenized again, rewritten by a template, spliced in the
    wrong place) has other log-probs. Failed trajectories and prompts with media are skipped.

    Args:
        every_n_rollouts: Rollouts between two checks, at least 1.
        num_trajectories: Trajectories per rollout and rank, evenly spread, at least 1.
        tolerance: Maximum difference in log-prob. Prefill and decoding round differently: 1e-4 suits float32 engines;
            bfloat16 needs about 0.1.

    Raises:
        ValueError: An argument is out of range, or sampling changes the distribution (temperature, top-p, ...), since
            the engine reports log-probs of the unchanged one.
        LedgerMismatchError: With trajectory, row, turn, and both texts.
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
                f"TrajectoryLogprobCheck with {', '.join(other)}: the engine scores finished rows at "
                "temperature 1 without cuts. Sample that way, or remove the callback."
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

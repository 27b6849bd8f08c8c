"""Log-prob checks, which compare the engine with the trainer and with its own sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightrl.engines.base import Engine
from lightrl.records import Experience, Rollouts, SamplingParams, Trajectory
from lightrl.rollout.learner import RLCallback

log = logging.getLogger(__name__)

BOUNDS = {"float64": 1e-3, "float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
POSITIONS = (0, 1, 16, 128, 1024)
TURNS, LAGS = 8, 4  # the last bin also contains all higher values


class LogprobMonitor(RLCallback):
    """Monitors the gap between the engine's and the trainer's log-probs, and warns or stops above a bound.

        gap = mean |log pi_engine - log pi_old| over the trained tokens that the current weights sampled

    The bound applies to all tokens, to each range of token positions, and to each turn. The overall mean can hide
    errors in a cache, in position IDs, or in later turns. Tokens from older weights are reported by lag, without a
    bound. Metrics across all ranks are `kl/engine_gap` and `kl/engine_gap_<cell>`. Requires the trainer's log-probs
    before the update, which adds a forward pass per rollout unless training already computes them.

    Args:
        bound: Maximum mean gap in nats per token. Defaults by the coarsest dtype of engine, policy, and
            `trainer.precision`: 0.001 in float32, 0.02 in float16, and 0.05 in bfloat16 or if unknown.
        action: "warn" logs a warning per rollout, and "stop" ends the run before the update.
        min_tokens: Minimum number of tokens for a cell to be checked.

    Raises:
        ValueError: If the module has no rollouts, or its loss replaces the trainer's log-probs with the engine's.
        RuntimeError: If a cell exceeds the bound with `action="stop"`, on all ranks.
    """

    reads_all_rows = False

    def __init__(
        self, bound: float | None = None, action: Literal["warn", "stop"] = "warn", min_tokens: int = 16
    ) -> None:
        self.bound = bound
        self.action = action
        self.min_tokens = min_tokens
        self._rollouts: Rollouts | None = None
        self._measured: dict[str, float] = {}

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        loss = pl_module.loss
        if stage == "fit" and loss.replaces_old_logprobs:
            raise ValueError(
                f"LogprobMonitor with loss={type(loss).__name__}: the engine's log-probs replace the trainer's, so "
                "there is nothing to compare. Remove one of the two."
            )

    def on_rollout_scored(self, trainer: Trainer, pl_module: Any, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def on_experience_made(self, trainer: Trainer, pl_module: Any, experience: Experience) -> None:
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
        metrics.update(self._measured)

    def _dtype_bound(self, trainer: Trainer, pl_module: Any) -> float:
        theirs = trainer.datamodule.engine.dtype  # type: ignore[attr-defined]
        precision = str(trainer.precision)
        own = "bfloat16" if precision.startswith("bf16") else "float16" if precision.startswith("16") else "float32"
        dtypes = (own, pl_module.actor_spec.dtype or "float32", theirs)
        return max(BOUNDS.get(dtype, BOUNDS["bfloat16"]) for dtype in dtypes)

    def _act(self, trainer: Trainer, pl_module: Any, bound: float, above: dict[str, float]) -> None:
        engine = trainer.datamodule.engine  # type: ignore[attr-defined]
        listed = ", ".join(f"{name} {value:.3g}" for name, value in above.items())
        message = (
            f"The log-probs of {type(engine).__name__} differ from the trainer's (layout "
            f"{pl_module.actor.stream.layout}) by more than {bound:g} nats per token on average: {listed}. Check "
            "dtypes, WeightSync's check, and sampling settings that change the distribution. Use OffPolicyCorrection, "
            "or raise LogprobMonitor.bound."
        )
        if self.action == "stop":
            raise RuntimeError(message)
        log.warning("%s", message)


def _cells(rollouts: Rollouts, experience: Experience, version: int) -> dict[str, Tensor]:
    """Returns the (B, T) masks of the cells' trained tokens by name, with equal names on all ranks."""
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


def logprob_mismatches(
    engine: Engine, trajectories: Sequence[Trajectory], decode: Callable[[list[int]], Any], tolerance: float = 1e-4
) -> list[str]:
    """Compares recorded log-probs with log-probs that the engine recomputes for the trained sequences.

    The engine must still have the weights that sampled the tokens, at temperature 1 without top-p or similar settings.
    Skips sequences with images, because engines score only tokens. The default of `tolerance`, in nats, is for float32.
    Returns a description of the first mismatch of each turn with mismatches.
    """
    rows = [(t, r, row) for t, trajectory in enumerate(trajectories) for r, row in enumerate(trajectory.rows)]
    rows = [entry for entry in rows if not entry[2].media and any(turn >= 0 for turn in entry[2].turn_ids)]
    if not rows:
        return []
    fits = engine.max_model_len - 1  # vLLM requires space for one more token
    routes = [[row.routes for *_, row in rows]] if engine.replays_routes else []
    scored = engine.logprobs([row.token_ids[:fits] for *_, row in rows], *routes)
    found = []
    for (t, r, row), recomputed in zip(rows, scored, strict=True):
        bad: set[int] = set()
        for i, turn in enumerate(row.turn_ids[:fits]):
            if turn < 0 or turn in bad:
                continue
            gap = recomputed[i - 1] - row.logprobs[i]
            cut = row.support is not None and row.support.counts[i] > 0  # fewer tokens, each at least as likely
            if not (gap if cut else abs(gap)) <= tolerance:  # NaN is also a mismatch
                bad.add(turn)
                ids = [token for token, of in zip(row.token_ids, row.turn_ids, strict=True) if of == turn]
                found.append(
                    f"trajectory {t}, row {r}, turn {turn}, token {i}: sampled with log-prob {row.logprobs[i]:.6f}, "
                    f"but {recomputed[i - 1]:.6f} in the trained sequence.\nText before the token: "
                    f"{decode(row.token_ids[:i])!r}\nText of the turn: {decode(ids)!r}"
                )
    return found


class LedgerMismatchError(RuntimeError):
    """Raised if a training sequence differs from the sampled tokens."""


class TrajectoryLogprobCheck(Callback):
    """Verifies sampled trajectories against the engine's log-probs, and stops the run if they differ.

    Compares `log pi(token | prefix)` of training sequences with the log-prob that the engine reported during sampling,
    before the weights change. A sequence with a different history (retokenized, rewritten by a template, or joined
    incorrectly) has different log-probs. Skips failed trajectories and prompts with media.

    Args:
        every_n_rollouts: Number of rollouts between checks.
        num_trajectories: Number of evenly spaced trajectories per rollout and rank.
        tolerance: Maximum difference in nats. Prefill and decoding round differently: 1e-4 suits float32 engines, and
            bfloat16 needs about 0.1.

    Raises:
        ValueError: If an argument is out of range, or sampling changes the distribution (temperature, top-p, ...).
        LedgerMismatchError: If log-probs differ. Reports trajectory, sequence, turn, and both texts.
    """

    def __init__(self, every_n_rollouts: int = 1, num_trajectories: int = 4, tolerance: float = 1e-4) -> None:
        self.every_n_rollouts = every_n_rollouts
        self.num_trajectories = num_trajectories
        self.tolerance = tolerance
        self._rollouts = 0

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Rejects settings that change the sampling distribution. Called before training, and for each rollout."""
        plain = SamplingParams()
        names = ["temperature", "fire_temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens"]
        names += ["regex", "json_schema"]
        other = [f"sampling.{n}={getattr(sampling, n)!r}" for n in names if getattr(sampling, n) != getattr(plain, n)]
        if other:
            raise ValueError(
                f"TrajectoryLogprobCheck with {', '.join(other)}: the engine scores sequences with the unmodified "
                "distribution. Reset these settings, or remove the callback."
            )

    def check_trajectories(self, engine: Engine, trajectories: Sequence[Trajectory], tokenizer: Any) -> None:
        """Verifies this rank's trajectories while the engine is idle and still has the weights that sampled them.

        Called on every rank, possibly in a background thread.
        """
        self._rollouts += 1
        sound = [trajectory for trajectory in trajectories if not trajectory.failed]
        if (self._rollouts - 1) % self.every_n_rollouts or not sound:
            return
        count = min(self.num_trajectories, len(sound))
        sample = [sound[i * len(sound) // count] for i in range(count)]
        found = logprob_mismatches(engine, sample, tokenizer.decode, self.tolerance)
        if found:
            raise LedgerMismatchError(
                f"{len(found)} turns of {count} trajectories have different log-probs in the training sequences than "
                f"during sampling (tolerance {self.tolerance:g}). First mismatch: {found[0]}"
            )

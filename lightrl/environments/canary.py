"""Verifies that the trained tokens are the sampled ones by rescoring finished sequences with the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.engines.base import Engine
from lightrl.records import Trajectory


@dataclass
class LedgerMismatch:
    """A sampled token whose recomputed log-prob differs from the recorded one.

    Attributes:
        trajectory: Index of the trajectory.
        row: Index of the sequence in the trajectory.
        turn: Index of the turn.
        token: Index of the token in the sequence.
        sampled: Log-prob recorded during sampling.
        recomputed: Log-prob in the trained sequence.
        before: Text of the sequence before the token.
        text: Text of the turn.
    """

    trajectory: int
    row: int
    turn: int
    token: int
    sampled: float
    recomputed: float
    before: str
    text: str

    def __str__(self) -> str:
        return (
            f"trajectory {self.trajectory}, row {self.row}, turn {self.turn}, token {self.token}: sampled with "
            f"log-prob {self.sampled:.6f}, but {self.recomputed:.6f} in the trained sequence.\nText before the token: "
            f"{self.before!r}\nText of the turn: {self.text!r}"
        )


def check_trajectories(
    engine: Engine,
    trajectories: Sequence[Trajectory],
    decode: Callable[[list[int]], Any],
    *,
    tolerance: float = 1e-4,
) -> list[LedgerMismatch]:
    """Compares recorded log-probs with log-probs that the engine recomputes for the trained sequences.

    The engine must still have the weights that sampled the tokens, at temperature 1 without top-p or similar settings.
    Skips sequences with images, because engines score only tokens.

    Args:
        engine: Started engine.
        trajectories: Finished trajectories.
        decode: Function from token IDs to text.
        tolerance: Maximum difference of log-probs. The default is for float32.

    Returns:
        The first mismatch of each turn with mismatches.
    """
    rows = [(t, r, row) for t, trajectory in enumerate(trajectories) for r, row in enumerate(trajectory.rows)]
    rows = [entry for entry in rows if not entry[2].media and any(turn >= 0 for turn in entry[2].turn_ids)]
    found: list[LedgerMismatch] = []
    if not rows:
        return found
    fits = engine.max_model_len - 1  # vLLM requires space for one more token
    again = [[row.routes for *_, row in rows]] if engine.replays_routes else []
    scored = engine.logprobs([row.token_ids[:fits] for *_, row in rows], *again)
    for (t, r, row), recomputed in zip(rows, scored, strict=True):
        bad: set[int] = set()
        for i, turn in enumerate(row.turn_ids):
            if turn < 0 or turn in bad or i >= fits:
                continue
            gap = recomputed[i - 1] - row.logprobs[i]
            cut = row.support is not None and row.support.counts[i] > 0  # fewer tokens, each at least as likely
            if not (gap if cut else abs(gap)) <= tolerance:  # NaN is also a mismatch
                bad.add(turn)
                ids = [token for token, of in zip(row.token_ids, row.turn_ids, strict=True) if of == turn]
                before, text = str(decode(row.token_ids[:i])), str(decode(ids))
                found.append(LedgerMismatch(t, r, turn, i, row.logprobs[i], recomputed[i - 1], before, text))
    return found

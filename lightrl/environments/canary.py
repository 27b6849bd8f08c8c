"""Checks that trained tokens are the sampled ones: the engine scores finished rows again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.engines.base import Engine
from lightrl.records import Trajectory


@dataclass
class LedgerMismatch:
    """A sampled token whose log-prob is not what the engine gives it in its row.

    Attributes:
        trajectory, row, turn, token: Numbers of the trajectory, its row, the turn, and the token in the row.
        sampled, recomputed: Log-prob when it was sampled, and in the row.
        before, text: Text of the row up to the token, and of the turn.
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
            f"log-prob {self.sampled:.6f}, but {self.recomputed:.6f} in the row that is trained.\nThe row before it: "
            f"{self.before!r}\nThe turn: {self.text!r}"
        )


def check_trajectories(
    engine: Engine,
    trajectories: Sequence[Trajectory],
    decode: Callable[[list[int]], Any],
    *,
    tolerance: float = 1e-4,
) -> list[LedgerMismatch]:
    """Compares the log-probs of sampled tokens with the engine's of the finished rows.

    The engine must hold the weights that sampled them, and have sampled at temperature 1 without top-p and the like.
    Rows with images are left out, because engines score tokens alone.

    Args:
        engine: Started engine.
        trajectories: Finished trajectories.
        decode: From token IDs to text.
        tolerance: Maximum difference; 1e-4 suits float32.

    Returns:
        First mismatch of each turn that has one.
    """
    rows = [(t, r, row) for t, trajectory in enumerate(trajectories) for r, row in enumerate(trajectory.rows)]
    rows = [entry for entry in rows if not entry[2].media and any(turn >= 0 for turn in entry[2].turn_ids)]
    found: list[LedgerMismatch] = []
    if not rows:
        return found
    fits = engine.max_model_len - 1  # vLLM scores what leaves room for one more token
    again = [[row.routes for *_, row in rows]] if engine.replays_routes else []
    scored = engine.logprobs([row.token_ids[:fits] for *_, row in rows], *again)
    for (t, r, row), recomputed in zip(rows, scored, strict=True):
        bad: set[int] = set()
        for i, turn in enumerate(row.turn_ids):
            if turn < 0 or turn in bad or i >= fits:
                continue
            gap = recomputed[i - 1] - row.logprobs[i]
            cut = row.support is not None and row.support.counts[i] > 0  # fewer tokens, each at least as likely
            if not (gap if cut else abs(gap)) <= tolerance:  # NaN is a mismatch too
                bad.add(turn)
                ids = [token for token, of in zip(row.token_ids, row.turn_ids, strict=True) if of == turn]
                before, text = str(decode(row.token_ids[:i])), str(decode(ids))
                found.append(LedgerMismatch(t, r, turn, i, row.logprobs[i], recomputed[i - 1], before, text))
    return found

"""`RolloutCheckpoint`: which files it keeps, and under which names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.callbacks import RolloutCheckpoint
from tests.callbacks.toys import Loader, LoggingModule, make_rollouts


class Rewards(LoggingModule):
    """Logs rewards 1, 3, 2, 5, 4, 0 in turn."""

    def training_step(self, rollouts: Any, batch_idx: int) -> dict[str, float]:
        metrics = super().training_step(rollouts, batch_idx)
        self.log("score", (1.0, 3.0, 2.0, 5.0, 4.0, 0.0)[batch_idx])
        return metrics


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({}, ["rollout=000006"]),
        ({"every_n_rollouts": 4}, ["rollout=000006"]),  # the end of a run is saved, too
        ({"save_top_k": -1, "every_n_rollouts": 2}, ["rollout=000002", "rollout=000004", "rollout=000006"]),
        ({"save_top_k": 2, "monitor": "score"}, ["rollout=000004", "rollout=000005"]),
        ({"save_top_k": 1, "monitor": "score", "mode": "min"}, ["rollout=000006"]),
        ({"filename": "at-{rollout}"}, ["at-6"]),
    ],
)
def test_what_is_kept(
    arguments: dict[str, Any], kept: list[str], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    callback = RolloutCheckpoint(dirpath=str(tmp_path / "c"), **{"every_n_rollouts": 1, **arguments})
    rollouts = make_rollouts(["1+1="], [["2", "3"]], [[1.0, 0.0]])
    make_trainer(callback, enable_checkpointing=True).fit(Rewards(), Loader([rollouts] * 6))
    assert sorted(p.stem for p in (tmp_path / "c").glob("*.ckpt")) == sorted([*kept, "last"])

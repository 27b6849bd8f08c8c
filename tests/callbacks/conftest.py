"""Fixtures of a run without models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightrl.records import Rollouts
from tests.callbacks.toys import make_rollouts
from tests.toys import quiet_trainer


@pytest.fixture()
def rollouts() -> Rollouts:
    return make_rollouts(
        ["1+1=", "[b]2+2="], [["2", "[/red]33"], ["4\n", "\x1b[2J55"]], [[1.0, 0.0], [1.0, float("nan")]]
    )


@pytest.fixture()
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(*callbacks: Any, **arguments: Any) -> Trainer:
        logged = {"logger": CSVLogger(tmp_path, name="", version=""), "log_every_n_steps": 1}
        return quiet_trainer(callbacks=list(callbacks), **(logged | arguments))

    return make

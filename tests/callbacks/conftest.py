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


@pytest.fixture()
def rollouts() -> Rollouts:
    return make_rollouts(
        ["1+1=", "[b]2+2="], [["2", "[/red]33"], ["4\n", "\x1b[2J55"]], [[1.0, 0.0], [1.0, float("nan")]]
    )


@pytest.fixture()
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(*callbacks: Any, **arguments: Any) -> Trainer:
        defaults = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": CSVLogger(tmp_path, name="", version=""),
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
        }
        return Trainer(callbacks=list(callbacks), **(defaults | arguments))

    return make

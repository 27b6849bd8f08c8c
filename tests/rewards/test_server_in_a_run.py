"""A training run whose reward server is killed after the first rollout, and what the user's choice makes of that."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import RolloutCheckpoint, WeightSync
from lightrl.rewards import RemoteReward, RewardError
from lightrl.rewards.scorer import RewardScorer
from tests.rewards.conftest import Server
from tests.toys import SMALL, Keep, digits_reward, model_fixture, quiet_trainer, sums_data

ONCE = {"retries": 1, "backoff": 0.01}


class Watch(Keep):
    """Keeps what the hooks saw, and calls `then` after the first rollout."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.then = then

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if batch_idx == 0:
            self.then()


model_path = model_fixture(**SMALL)


def train(path: str, watch: Watch, reward: Any, *callbacks: Any, **fit: Any) -> None:
    module = GRPOLightningModule(path, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), kl=None)
    data = sums_data(rewards=RewardScorer([reward, digits_reward], names=["remote", "digits"]), rollouts_per_epoch=3)
    saves = any(isinstance(callback, RolloutCheckpoint) for callback in callbacks)
    trainer = quiet_trainer(callbacks=[WeightSync(), watch, *callbacks], enable_checkpointing=saves)
    trainer.fit(module, data, **fit)


def test_the_rows_of_a_dead_server_are_left_to_the_other_functions(serve: Any, model_path: str) -> None:
    server: Server = serve("length")
    watch = Watch(server.kill)
    train(model_path, watch, RemoteReward(server.url, on_failure="skip", **ONCE))
    assert [len(r) for r in watch.rollouts] == [32, 32, 32], "every rollout keeps its size"
    assert [bool(r.reward_parts["remote"].isnan().all()) for r in watch.rollouts] == [False, True, True]
    for r in watch.rollouts[1:]:
        torch.testing.assert_close(r.rewards, r.reward_parts["digits"])
    assert [m.get("reward/remote/unanswered", 0.0) for m in watch.metrics] == [0.0, 1.0, 1.0]
    assert all(m["reward/scored_fraction"] == 1.0 for m in watch.metrics)


def test_a_run_that_ends_with_an_error_resumes_with_the_rollout_it_lost(
    serve: Any, model_path: str, tmp_path: Path
) -> None:
    server: Server = serve("length")
    whole, broken, resumed = Watch(), Watch(server.kill), Watch()
    train(model_path, whole, RemoteReward(server.url, **ONCE))
    with pytest.raises(RewardError, match=r"remote.*failed to score .* after 2 attempts"):
        train(model_path, broken, RemoteReward(server.url, **ONCE), RolloutCheckpoint(1, str(tmp_path)))
    assert len(broken.rollouts) == 1
    server.start()
    last = str(tmp_path / "last.ckpt")
    train(model_path, resumed, RemoteReward(server.url, **ONCE), RolloutCheckpoint(1, str(tmp_path)), ckpt_path=last)
    assert [r.prompts for r in resumed.rollouts] == [r.prompts for r in whole.rollouts[1:]]
    assert not math.isnan(resumed.metrics[-1]["reward/mean"])

"""A run that is killed and resumed ends with the weights, bit for bit, of one that was not."""

from __future__ import annotations

import csv
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import CSVLogger

from lightrl.algorithms import CriticSpec, GRPOLightningModule, PPOLightningModule
from lightrl.algorithms.module import Updates
from lightrl.callbacks import AdaptiveKL, RewardNormalization, RolloutCheckpoint, ThroughputMonitor, WeightSync
from lightrl.objectives import KLInReward
from tests import forks
from tests.toys import digits_reward, model_fixture, quiet_trainer, sums_data

EPOCHS = 2


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)


class Reward:
    """Scores like `digits_reward`, and does something in the middle of scoring the rollout of that number."""

    def __init__(self, in_rollout: int | None = None, do: Callable[[], Any] = lambda: None) -> None:
        self.in_rollout, self.do, self.calls, self.lock = in_rollout, do, 0, Lock()

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        with self.lock:
            self.calls += 1
            if self.in_rollout is not None and self.calls == 8 * self.in_rollout - 4:  # one call per prompt
                self.do()
        return digits_reward(prompts, completions)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Draw(Callback):
    """Logs a random number, which only follows from the one before if the generators' states came back."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.log("random", torch.rand(()))


def run(
    folder: Path,
    model: str,
    reward: Reward | None = None,
    resume: str | None = None,
    callbacks: Any = (),
    every_n_rollouts: int = 1,
    **data: Any,
) -> Any:
    """PPO with everything that has a state: critic, optimizer, schedule, callbacks, generators. Returns the module."""
    # What a resumed run needs is in the checkpoint, not in its seed.
    seed_everything(0 if resume is None else 1, verbose=False)
    module = PPOLightningModule(
        model,
        CriticSpec(lr=1e-2),
        kl=KLInReward(coef=0.1),
        optimizer=adam,
        lr_scheduler=decay,
        updates=Updates(minibatch_size=16),
        ppo_epochs=2,
    )
    checkpoint = RolloutCheckpoint(every_n_rollouts, dirpath=str(folder / "checkpoints"))
    controllers = [AdaptiveKL(target=0.01, horizon=200), RewardNormalization(), ThroughputMonitor(), Draw()]
    trainer = quiet_trainer(
        max_epochs=EPOCHS,
        callbacks=[WeightSync(), *controllers, checkpoint, *callbacks],
        enable_checkpointing=True,
        logger=CSVLogger(folder, name="", version="resumed" if resume else "first"),
        log_every_n_steps=1,
    )
    trainer.fit(module, sums_data(rollouts_per_epoch=3, rewards=[reward or Reward()], **data), ckpt_path=resume)
    return module


def rows(folder: Path, version: str, of: str = "reward/mean") -> list[dict[str, str]]:
    """What was logged with a metric, without times and speeds."""
    with open(folder / version / "metrics.csv") as file:
        return [
            {k: v for k, v in row.items() if v and not k.startswith(("time/", "throughput/"))}
            for row in csv.DictReader(file)
            if row.get(of)
        ]


model = model_fixture(num_hidden_layers=2, hidden_size=64, intermediate_size=64)


@pytest.fixture(scope="module")
def killed(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed, by SIGKILL, in rollout 3 of 6."""
    folder = tmp_path_factory.mktemp("killed")
    assert forks.run(__name__, str(folder), model, "3") == -signal.SIGKILL
    return folder


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, model), folder


def assert_same(module: Any, other: Any) -> None:
    for (name, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_killed_and_resumed_is_the_run_that_was_not(model: str, killed: Path, whole: tuple[Any, Path]) -> None:
    module, folder = whole
    last = killed / "checkpoints" / "last.ckpt"
    resumed = run(killed, model, resume=str(last))
    assert_same(resumed, module)
    assert resumed.kl.coef == module.kl.coef != 0.1
    assert resumed.policy_version == module.policy_version == 24
    expected = rows(folder, "first")
    assert len(expected) == 6 and len({row["random"] for row in expected}) == 6
    assert rows(killed, "resumed") == expected[2:]
    assert rows(killed, "first") == expected[:2]


def test_ckpt_path_last_finds_it(model: str, killed: Path, whole: tuple[Any, Path]) -> None:
    """Also after the resumed run above, which left the whole run's end there: then nothing remains to be done."""
    assert_same(run(killed, model, resume="last"), whole[0])


def test_checkpoint_is_plain_data_without_frozen_models(whole: tuple[Any, Path]) -> None:
    module, folder = whole
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert {name.split(".")[0] for name in stored["state_dict"]} == {"actor", "critic"}
    assert module.reference is not None
    assert stored["RolloutDataModule"]["prompt_cursor"] == 48
    assert stored["callbacks"]["RewardNormalization"]["count"] == 6 * 32


class OwnCallbacks(PPOLightningModule):
    def configure_callbacks(self) -> list[Any]:
        return []


def test_a_resumed_run_appends_to_its_table(model: str, tmp_path: Path) -> None:
    """A `CSVLogger` with a fixed folder, whose table Lightning would delete. The override doesn't call `super`."""

    def fit(epochs: int, checkpoint: str | None) -> list[str]:
        trainer = quiet_trainer(
            max_epochs=epochs,
            callbacks=[WeightSync(), RolloutCheckpoint(dirpath=str(tmp_path / "checkpoints"))],
            enable_checkpointing=True,
            logger=CSVLogger(tmp_path, name="", version="mine"),
            log_every_n_steps=1,
        )
        trainer.fit(OwnCallbacks(model), sums_data(rollouts_per_epoch=1), ckpt_path=checkpoint)
        return [row["step"] for row in rows(tmp_path, "mine")]

    assert fit(1, None) == ["0"]
    assert fit(2, "last") == ["0", "1"]
    assert fit(1, None) == ["0"]  # another run, which begins from nothing


def test_another_optimizer_is_rejected(model: str, tmp_path: Path) -> None:
    def fit(optimizer: Any, epochs: int, **settings: Any) -> Any:
        trainer = quiet_trainer(max_epochs=epochs, callbacks=[WeightSync()])
        module = GRPOLightningModule(model, kl=None, optimizer=lambda params: optimizer(params, lr=1e-4))
        trainer.fit(module, sums_data(rollouts_per_epoch=1), **settings)
        return trainer

    fit(torch.optim.Adam, 1).save_checkpoint(tmp_path / "adam.ckpt")
    with pytest.raises(ValueError, match="state of Adam"):
        fit(torch.optim.RAdam, 2, ckpt_path=tmp_path / "adam.ckpt")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], Reward(int(sys.argv[3]), die))

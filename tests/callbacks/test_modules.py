"""Every callback beside every kind of module: it takes part, or is refused when the run is set up, by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything

import lightrl.callbacks
from lightrl.algorithms import DistillLightningModule, RewardLightningModule, SFTLightningModule
from lightrl.callbacks import EMA, HFExport
from lightrl.data.preferences import PreferenceDataModule, PreferenceSource
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.models.reward import RewardModel
from tests.toys import SMALL, model_fixture, quiet_trainer, sums_data

ROWS = [{"prompt": f"{a}+{b}=", "completion": "1", "chosen": "1", "rejected": "2"} for a in range(2) for b in range(2)]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "LinearKL": {"start": 0.1, "end": 0.0, "num_rollouts": 2},
    "RolloutWriter": {"every_n_rollouts": 1},
    "CompletionLogger": {"every_n_rollouts": 1},
}
ROLLOUTS = {
    *("AdaptiveEntropy", "AdaptiveKL", "LogprobMonitor", "LinearKL", "OffloadModels", "ReferenceSync"),
    *("RewardNormalization", "CompletionLogger", "RolloutWriter"),
}
"""Callbacks that mean nothing to a module without rollouts."""


path = model_fixture(**SMALL)


def made(kind: str, path: str) -> tuple[LightningModule, LightningDataModule]:
    seed_everything(0, verbose=False)
    if kind == "sft":
        return SFTLightningModule(path), SFTDataModule(SFTSource(rows=ROWS), batch_size=2)
    if kind == "reward":
        return RewardLightningModule(path), PreferenceDataModule(PreferenceSource(rows=ROWS), batch_size=2)
    return DistillLightningModule(path, {"teacher": path}), sums_data(rollouts_per_epoch=1, prompts_per_rollout=2)


@pytest.mark.parametrize("kind", ["sft", "reward", "distill"])
def test_a_callback_works_or_is_refused_by_name(kind: str, path: str, tmp_path: Path) -> None:
    refused = {"AdaptiveKL", "LinearKL", "ReferenceSync"} if kind == "distill" else ROLLOUTS
    module, data = made(kind, path)
    callbacks = {
        name: getattr(lightrl.callbacks, name)(**ARGUMENTS.get(name, {})) for name in lightrl.callbacks.__all__
    }
    for name in refused:
        with pytest.raises(ValueError, match=f"{name} "):
            callbacks.pop(name).setup(quiet_trainer(), module, "fit")
    folder = {"default_root_dir": str(tmp_path), "enable_checkpointing": True}
    trainer = quiet_trainer(callbacks=list(callbacks.values()), max_steps=1, **folder)
    trainer.fit(module, data)
    assert trainer.global_step == 1


def test_the_average_of_a_reward_model_is_exported(path: str, tmp_path: Path) -> None:
    module, data = made("reward", path)
    average = EMA(decay=0.0)
    export = HFExport(str(tmp_path / "average"), ema=True)
    quiet_trainer(callbacks=[average, export], max_steps=2).fit(module, data)
    assert RewardModel is type(module.trained_model[0]) and average.state_dict()["ranks"][0].keys() == {
        name for name, _ in module.trained_model[0].named_parameters()
    }
    assert (tmp_path / "average" / "config.json").exists()

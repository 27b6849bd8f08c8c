"""What loggers are told of a run from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger

from lightrl import GRPOLightningModule, LoraSpec, ModelSpec
from lightrl.algorithms.module import Shaping
from lightrl.algorithms.schedules import LRSchedule
from lightrl.rewards.scorer import RewardScorer
from tests.toys import SMALL, digits_reward, model_fixture, quiet_trainer, sums_data


class Recorder(Logger):
    """Keeps what it is told."""

    name, version = "recorder", 0

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.told.append(params)


class OwnGRPO(GRPOLightningModule):
    """Takes an argument of its own and passes the others on."""

    def __init__(self, actor: Any, patience: int = 3, **kwargs: Any) -> None:
        super().__init__(actor, **kwargs)
        self.patience = patience


model = model_fixture(**SMALL)


def test_loggers_are_told_what_a_run_from_python_is(model: str, tmp_path: Path) -> None:
    recorder, table = Recorder(), CSVLogger(tmp_path, name="run", version="")
    spec = ModelSpec(model, lora=LoraSpec(r=4), kwargs={"token": "of-mine"})
    module = OwnGRPO(
        spec,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
        lr_scheduler=LRSchedule("cosine", warmup=0.1),
        shaping=Shaping(mask_truncated=True),
    )
    half = RewardScorer([digits_reward], weights=[0.5])
    data = sums_data(rollouts_per_epoch=1, prompts_per_rollout=2, group_size=2, rewards=half)
    quiet_trainer(logger=[recorder, table], log_every_n_steps=1).fit(module, data)
    (told,) = recorder.told
    own, rows = told["model"]["init_args"], told["data"]["init_args"]
    assert told["model"]["class_path"].endswith("test_hyperparameters.OwnGRPO") and own["patience"] == 3
    assert own["actor"]["path"] == model and own["actor"]["lora"]["r"] == 4
    assert own["actor"]["kwargs"] == {"token": "***"} and "of-mine" not in str(told)
    assert own["advantage"]["class_path"] == "lightrl.objectives.estimators.GroupRelative"  # the algorithm's own
    assert own["kl"]["init_args"]["coef"] == 0.04 and "critic" not in own and own["shaping"]["mask_truncated"] is True
    assert own["lr_scheduler"]["name"] == "cosine" and own["lr_scheduler"]["warmup"] == 0.1
    assert rows["rewards"]["init_args"]["weights"] == {"digits_reward": 0.5}
    assert rows["prompts"]["rows"] == "64 entries" and rows["sampling"]["max_new_tokens"] == 6
    assert rows["engine"]["class_path"].endswith("TransformersEngine") and rows["group_size"] == 2
    assert told["optimizers"][0]["class_path"].endswith("AdamW") and told["optimizers"][0]["lr"] == 3e-4
    assert told["trainer"]["max_epochs"] == 1 and set(told["versions"]) >= {"lightrl", "torch"} and told["command"]
    assert yaml.safe_load((tmp_path / "run/hparams.yaml").read_text())["model"] == told["model"]

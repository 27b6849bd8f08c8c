"""What the tests of the algorithms share: small modules and a short run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from lightrl.algorithms import GRPOLightningModule, PPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.models.spec import ModelSpec
from tests.toys import Keep, adam, quiet_trainer, sgd, sums_data


def fit(module: PPOLightningModule, rollouts: int = 1, callbacks: Any = (), **data: Any) -> Keep:
    seed_everything(0, verbose=False)
    keep = Keep()
    trainer = quiet_trainer(callbacks=[WeightSync(), keep, *callbacks])
    trainer.fit(module, sums_data(rollouts_per_epoch=rollouts, **data))
    return keep


def weights(module: PPOLightningModule) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.actor.parameters()])


def ppo(path: str | ModelSpec, **kwargs: Any) -> PPOLightningModule:
    return PPOLightningModule(path, optimizer=kwargs.pop("optimizer", adam), **kwargs)


def grpo(path: str | ModelSpec, **kwargs: Any) -> GRPOLightningModule:
    return GRPOLightningModule(path, optimizer=kwargs.pop("optimizer", sgd), kl=kwargs.pop("kl", None), **kwargs)


class FirstSums:
    """Only prompts that begin with an even digit get rewards that differ within a group."""

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [float(i) if int(p[1]) % 2 == 0 else 1.0 for i, p in enumerate(prompts)]

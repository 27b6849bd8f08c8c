"""A closed-form check of learning: the regularised bandit.

One prompt, one sampled token, K actions, reward r(a), KL weight beta. The policy that maximises
E[r] - beta KL(pi || pi_ref) is pi*(a) = pi_ref(a) exp(r(a) / beta) / Z. The whole machine runs: engine, data module,
reward function, experience, losses, optimizer, weight sync.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightrl.data.prompts import PromptSource
from lightrl.data.rollout import RolloutDataModule
from lightrl.engines.transformers import TransformersEngine
from lightrl.modules import GRPOLightningModule, PPOLightningModule, RLOOLightningModule
from lightrl.modules.advantages import GroupNorm, Reinforce
from lightrl.modules.kl import KLInReward
from lightrl.types import SamplingParams
from tests.toys import bandit_model, quiet_trainer

K, BETA = 5, 0.5
REWARDS = torch.tensor([0.0, 0.4, -0.3, 0.8, 0.1])


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """r(a) of the one sampled token."""
    return [float(REWARDS[ids[0]]) for ids in completion_ids]


def policy(module: PPOLightningModule) -> torch.Tensor:
    """The K probabilities after the prompt."""
    with torch.no_grad():
        return module.actor.lm(torch.zeros(1, 1, dtype=torch.long)).logits[0, -1].softmax(-1)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def schedule(opt: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Decays, so that the noise of the last updates averages out."""
    return torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.03 ** min(step / NUM_ROLLOUTS, 1.0))


NUM_ROLLOUTS = 150
COMMON: dict[str, Any] = {"kl_coef": BETA, "optimizer": optimizer, "lr_scheduler": schedule, "max_grad_norm": None}
MODULES = {
    "ppo": lambda path: PPOLightningModule(path, ppo_epochs=1, critic_lr=0.03, value_clip=None, **COMMON),
    "grpo": lambda path: GRPOLightningModule(path, advantage=GroupNorm(scale="none"), kl=KLInReward(), **COMMON),
    "rloo": lambda path: RLOOLightningModule(path, **COMMON),
    "reinforce": lambda path: PPOLightningModule(
        path, critic=None, advantage=Reinforce(), ppo_epochs=1, whiten_advantages=False, **COMMON
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_converges_to_the_closed_form_optimum(name: str, tmp_path: Path) -> None:
    seed_everything(0, verbose=False)
    path = bandit_model(tmp_path, K)
    data = RolloutDataModule(
        prompts=PromptSource(rows=[{"prompt": "a0"}], chat_template=False),
        rewards=[reward],
        engine=TransformersEngine(),
        sampling=SamplingParams(max_new_tokens=1),
        group_size=64,
        prompts_per_rollout=16,
        rollouts_per_epoch=NUM_ROLLOUTS,
    )
    module = MODULES[name](path)
    trainer = quiet_trainer()
    trainer.fit(module, data)
    ref_logits = module.reference.lm(torch.zeros(1, 1, dtype=torch.long)).logits[0, -1].detach()
    reference = ref_logits.softmax(-1)
    optimum = (ref_logits + REWARDS / BETA).softmax(-1)
    assert (reference - 1 / K).abs().max() > 0.05, "the reference must not be uniform"
    start_distance = 0.5 * (reference - optimum).abs().sum()
    distance = 0.5 * (policy(module) - optimum).abs().sum()
    assert start_distance > 0.1
    assert distance <= 0.01, f"{name}: total variation {distance:.4f}, {policy(module)} instead of {optimum}"

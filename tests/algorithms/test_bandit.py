"""A closed-form check of learning: the regularised bandit.

One prompt, one sampled token, K actions, reward r(a), KL weight beta. The policy that maximises
E[r] - beta KL(pi || pi_ref) is pi*(a) = pi_ref(a) exp(r(a) / beta) / Z; the one that maximises
E[r] - beta KL(pi_ref || pi) is pi(a) = beta pi_ref(a) / (lambda - r(a)). The whole machine runs: engine, data module,
reward function, experience, losses, optimizer, weight sync. tests/ops/test_fixed_points.py has the other pairs of
estimator and KL placement, in exact expectations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightrl.algorithms import CriticSpec, GRPOLightningModule, PPOLightningModule, RLOOLightningModule
from lightrl.algorithms.module import Updates
from lightrl.data.prompts import PromptSource
from lightrl.models.spec import ModelSpec
from lightrl.objectives import GroupRelative, KLInLoss, KLInReward, KLPenalty
from lightrl.records import SamplingParams
from lightrl.rollout.datamodule import RolloutDataModule
from tests.toys import bandit_model, quiet_trainer, sums_data

pytestmark = pytest.mark.slow

K, BETA = 5, 0.5
Make = Callable[[ModelSpec], PPOLightningModule]
REWARDS = torch.tensor([0.0, 0.4, -0.3, 0.8, 0.1])


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """r(a) of the one sampled token."""
    return [float(REWARDS[ids[0]]) for ids in completion_ids]


def policy(module: PPOLightningModule) -> torch.Tensor:
    """The K probabilities after the prompt."""
    with torch.no_grad():
        return module.actor.lm(torch.zeros(1, 1, dtype=torch.long)).logits[0, -1].softmax(-1)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02)


def schedule(opt: torch.optim.Optimizer, rollouts: int = 60) -> torch.optim.lr_scheduler.LRScheduler:
    """Decays, so that the noise of the last updates averages out."""
    return torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.01 ** min(step / rollouts, 1.0))


NUM_ROLLOUTS = 60
COMMON: dict[str, Any] = {"optimizer": optimizer, "lr_scheduler": schedule, "updates": Updates(max_grad_norm=None)}


def rloo(kl: KLPenalty) -> Make:
    return lambda path: RLOOLightningModule(path, kl=kl, **COMMON)


REVERSE: dict[str, Make] = {
    "ppo": lambda path: PPOLightningModule(
        path, CriticSpec(lr=0.03, clip=None), kl=KLInReward(coef=BETA), ppo_epochs=1, **COMMON
    ),
    "grpo": lambda path: GRPOLightningModule(
        path, advantage=GroupRelative(scale="none"), kl=KLInReward(coef=BETA), **COMMON
    ),
}


def forward_kl_optimum(reference: torch.Tensor) -> torch.Tensor:
    """pi = beta * pi_ref / (lambda - r) with the lambda above max r at which it sums to 1, by bisection."""
    low, high = float(REWARDS.max()), float(REWARDS.max()) + BETA
    for _ in range(60):
        middle = (low + high) / 2
        above = float((BETA * reference / (middle - REWARDS)).sum()) > 1
        low, high = (middle, high) if above else (low, middle)
    return BETA * reference / (high - REWARDS)


def tv(p: torch.Tensor, q: torch.Tensor) -> float:
    return 0.5 * float((p - q).abs().sum())


def bandit(**kwargs: Any) -> RolloutDataModule:
    """Rollouts of 16 times 64 actions after the one prompt."""
    prompts = PromptSource(rows=[{"prompt": "a0"}], chat_template=False)
    one = SamplingParams(max_new_tokens=1)
    arguments = {"prompts": prompts, "rewards": [reward], "sampling": one, "group_size": 64, "prompts_per_rollout": 16}
    return sums_data(**{**arguments, "rollouts_per_epoch": NUM_ROLLOUTS, **kwargs})


def learned(make: Make, path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy after training; reference; the reverse-KL optimum."""
    seed_everything(0, verbose=False)
    module = make(ModelSpec(bandit_model(path, K), layout="padded"))
    quiet_trainer().fit(module, bandit())
    logits = module.reference.lm(torch.zeros(1, 1, dtype=torch.long)).logits[0, -1].detach()
    return policy(module), logits.softmax(-1), (logits + REWARDS / BETA).softmax(-1)


@pytest.mark.parametrize("name", REVERSE)
def test_reverse_kl_optimum(name: str, tmp_path: Path) -> None:
    pi, reference, optimum = learned(REVERSE[name], tmp_path)
    assert (reference - 1 / K).abs().max() > 0.05, "the reference must not be uniform"
    assert min(tv(optimum, reference), tv(optimum, forward_kl_optimum(reference))) > 0.1
    assert tv(pi, optimum) <= 0.01, f"{name}: total variation {tv(pi, optimum):.4f}, {pi} instead of {optimum}"


def test_plain_k3_in_the_loss_leads_to_the_forward_kl_optimum(tmp_path: Path) -> None:
    pi, reference, reverse = learned(rloo(KLInLoss("k3", BETA)), tmp_path)
    optimum = forward_kl_optimum(reference)
    assert tv(optimum, reverse) > 0.1
    assert tv(pi, optimum) <= 0.01, f"total variation {tv(pi, optimum):.4f}, {pi} instead of {optimum}"


def test_cut_sampling_leads_to_the_optimum_over_what_was_kept(tmp_path: Path) -> None:
    """Top-k keeps three actions: policy, reference and KL are over those, and the others take no part."""
    seed_everything(0, verbose=False)
    # Only the head learns: no logit moves with another one's.
    spec = ModelSpec(bandit_model(tmp_path, K, seed=8), layout="padded", freeze=["model"])
    module = rloo(KLInReward(coef=BETA))(spec)
    quiet_trainer().fit(module, bandit(sampling=SamplingParams(max_new_tokens=1, top_k=3)))
    logits = module.reference.lm(torch.zeros(1, 1, dtype=torch.long)).logits[0, -1].detach()
    pi = policy(module)
    kept = pi.topk(3).indices
    assert set(kept.tolist()) == set(logits.topk(3).indices.tolist()), "no action may have left the kept ones"
    optimum = (logits + REWARDS / BETA)[kept].softmax(-1)
    assert tv(pi[kept] / pi[kept].sum(), optimum) <= 0.01
    assert tv(logits[kept].softmax(-1), optimum) > 0.05, "there is something to learn"

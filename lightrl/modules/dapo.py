"""DAPO: GRPO with a higher upper clip, the mean over tokens, and no KL."""

from __future__ import annotations

from typing import Any

from jsonargparse import lazy_instance

from lightrl.models.spec import ModelSpec
from lightrl.modules.advantages import AdvantageEstimator, GroupNorm
from lightrl.modules.aggregation import Aggregation, TokenMean
from lightrl.modules.kl import KLPenalty
from lightrl.modules.losses import PolicyLoss, PPOClip
from lightrl.modules.ppo import PPOLightningModule

__all__ = ["DAPOLightningModule"]


class DAPOLightningModule(PPOLightningModule):
    """Decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, https://arxiv.org/abs/2503.14476).

    `PPOLightningModule` with the paper's settings: no critic, `A = (r - mean_group) / std_group`, the ratio clipped to
    [0.8, 1.28], the mean over all tokens of the optimizer's batch, no KL, one pass over each rollout (in 16
    mini-batches there: set `minibatch_size`). Two of its parts belong to the data module and are set there: dynamic
    sampling (`RolloutDataModule(max_refills=...)`) and the soft over-long punishment (the reward `SoftOverlong`).

    Args:
        actor: the policy: a folder or hub name, or a `ModelSpec`.
        advantage: estimator of advantages.
        loss: per-token policy loss.
        aggregation: how token losses become one number.
        kl: penalty against the reference; None for none.
        kl_coef: its coefficient; without effect where `kl` is None.
        whiten_advantages: scale advantages once more over the rollout.
        ppo_epochs: passes over each rollout.
        kwargs: the other arguments of `PPOLightningModule`.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = lazy_instance(GroupNorm),  # noqa: B008
        loss: PolicyLoss = lazy_instance(PPOClip, eps_high=0.28),  # noqa: B008
        aggregation: Aggregation = lazy_instance(TokenMean),  # noqa: B008
        kl: KLPenalty | None = None,
        kl_coef: float = 0.0,
        whiten_advantages: bool = False,
        ppo_epochs: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            actor,
            critic=None,
            advantage=advantage,
            loss=loss,
            aggregation=aggregation,
            kl=kl,
            kl_coef=kl_coef,
            whiten_advantages=whiten_advantages,
            ppo_epochs=ppo_epochs,
            **kwargs,
        )

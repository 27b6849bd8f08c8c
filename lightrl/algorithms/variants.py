"""Named algorithms: PPO with the settings of a paper."""

from __future__ import annotations

from typing import Any

from lightrl.algorithms.ppo import PPOLightningModule
from lightrl.models.spec import ModelSpec
from lightrl.objectives.estimators import RLOO, AdvantageEstimator, GroupRelative, ReinforcePlusPlus
from lightrl.objectives.loss_terms import (
    Aggregation,
    ConstantLength,
    KLInLoss,
    KLInReward,
    KLPenalty,
    PolicyLoss,
    PPOClip,
    SequenceMean,
    SequenceSum,
    TokenMean,
)


class CriticFreeLightningModule(PPOLightningModule):
    """Base of the algorithms below: no critic, no whitening, one pass over each rollout."""

    default_group_size = 8

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = RLOO(),
        whiten_advantages: bool = False,
        ppo_epochs: int = 1,
        **kwargs: Any,
    ) -> None:
        if "critic" in kwargs:
            raise ValueError(f"critic={kwargs['critic']!r}: {type(self).__name__} has no critic. Remove the argument.")
        super().__init__(
            actor,
            advantage=advantage,
            critic=None,
            whiten_advantages=whiten_advantages,
            ppo_epochs=ppo_epochs,
            **kwargs,
        )


class GRPOLightningModule(CriticFreeLightningModule):
    """Group relative policy optimization (GRPO).

    `PPOLightningModule` with the paper's settings: no critic, `A = (r - mean_group) / std_group`, the k3 KL penalty in
    the loss (coefficient 0.04), the mean over sequences of token means, and one update per rollout.

    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = GroupRelative(),
        aggregation: Aggregation = SequenceMean(),
        kl: KLPenalty | None = KLInLoss(coef=0.04),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantage=advantage, aggregation=aggregation, kl=kl, **kwargs)


class DrGRPOLightningModule(GRPOLightningModule):
    """Dr. GRPO (GRPO done right).

    `GRPOLightningModule` with the paper's settings: `A = r - mean_group`, the token sum divided by a constant, and no
    KL penalty. The constant is the paper's generation budget of 3000 tokens. Set it to your `max_new_tokens`.

    Source: Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = GroupRelative(scale="none"),
        aggregation: Aggregation = ConstantLength(length=3000),
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantage=advantage, aggregation=aggregation, kl=kl, **kwargs)


class DAPOLightningModule(GRPOLightningModule):
    """Decoupled clip and dynamic sampling policy optimization (DAPO).

    `GRPOLightningModule` with the paper's settings: the ratio clipped to [0.8, 1.28], the mean over all tokens of the
    mini-batch, and no KL penalty. The paper makes 16 updates per rollout; set `minibatch_size` to do the same.

    Set two parts of the paper in the data module: dynamic sampling (`dynamic_sampling_rounds`) and soft overlong
    punishment (the reward `SoftOverlong`).

    Source: Yu et al. 2025, https://arxiv.org/abs/2503.14476.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        loss: PolicyLoss = PPOClip(eps_high=0.28),
        aggregation: Aggregation = TokenMean(),
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, loss=loss, aggregation=aggregation, kl=kl, **kwargs)


class RLOOLightningModule(CriticFreeLightningModule):
    """REINFORCE leave-one-out (RLOO).

    `PPOLightningModule` with the paper's settings: no critic, `A = r - mean of the others`, the k1 KL penalty in the
    reward, token sums, and one on-policy update per rollout. With one update, the clipped loss has the gradient of
    REINFORCE.

    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 3.2.
    """

    def __init__(self, actor: str | ModelSpec, *, aggregation: Aggregation = SequenceSum(), **kwargs: Any) -> None:
        super().__init__(actor, aggregation=aggregation, **kwargs)


class ReinforcePlusPlusLightningModule(CriticFreeLightningModule):
    """REINFORCE++.

    `PPOLightningModule` with the paper's settings: no critic, returns normalized over all tokens of the rollout as
    advantages, the k1 KL penalty in the reward (coefficient 0.01), PPO's clip at 0.2, the mean over tokens, and one
    pass over each rollout. One completion per prompt is enough.

    For the variant with groups, set `advantage` to `ReinforcePlusPlusBaseline` and `kl` to `KLInLoss("k2")`.

    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262, section 3.
    """

    default_group_size = 1

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = ReinforcePlusPlus(),
        kl: KLPenalty | None = KLInReward(coef=0.01),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantage=advantage, kl=kl, **kwargs)

"""Named algorithms: PPO with other settings."""

from __future__ import annotations

from typing import Any

from lightrl.algorithms.ppo import PPOLightningModule
from lightrl.models.spec import ModelSpec
from lightrl.objectives.aggregation import Aggregation, ConstantLength, SequenceMean, SequenceSum, TokenMean
from lightrl.objectives.estimators import RLOO, AdvantageEstimator, GroupRelative, ReinforcePlusPlus
from lightrl.objectives.kl import KLInLoss, KLInReward, KLPenalty
from lightrl.objectives.policy_losses import CPG, GSPO
from lightrl.objectives.ppo_clip import PolicyLoss, PPOClip


class CriticFreeLightningModule(PPOLightningModule):
    """What the algorithms below share: no critic, no whitening, one pass over each rollout."""

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
            raise ValueError(f"critic={kwargs['critic']!r}: {type(self).__name__} has no critic. Drop the argument.")
        super().__init__(
            actor,
            advantage=advantage,
            critic=None,
            whiten_advantages=whiten_advantages,
            ppo_epochs=ppo_epochs,
            **kwargs,
        )


class GRPOLightningModule(CriticFreeLightningModule):
    """Group relative policy optimization (Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1).

    `PPOLightningModule` with the paper's settings: no critic, `A = (r - mean_group) / std_group`, k3 in the loss with
    coefficient 0.04, the mean over sequences of the mean over tokens, one update per rollout.
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
    """GRPO done right (Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2).

    `GRPOLightningModule` with the paper's settings: `A = r - mean_group`, the sum over tokens divided by a constant
    (the paper's generation budget, 3000 tokens; take your `max_new_tokens`), no KL.
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
    """Decoupled clip and dynamic sampling policy optimization (Yu et al. 2025, https://arxiv.org/abs/2503.14476).

    `GRPOLightningModule` with the paper's settings: the ratio clipped to [0.8, 1.28], the mean over all tokens of the
    optimizer's batch, no KL (the paper makes 16 updates per rollout: set `minibatch_size`). Two of its parts belong to
    the data module and are set there: dynamic sampling (`RolloutDataModule(dynamic_sampling_rounds=...)`) and the
    soft over-long
    punishment (the reward `SoftOverlong`).
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


class GSPOLightningModule(GRPOLightningModule):
    """Group sequence policy optimization (Zheng et al. 2025, https://arxiv.org/abs/2507.18071, section 4.1 and 5.1).

    `GRPOLightningModule` with the paper's settings: the length-normalized ratio of the sequence clipped to
    [1 - 3e-4, 1 + 4e-4], no KL. With one update per rollout the ratio is 1 and nothing is clipped: set `minibatch_size`
    (the paper makes 4).
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        loss: PolicyLoss = GSPO(),
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, loss=loss, kl=kl, **kwargs)


class CPGDLightningModule(GRPOLightningModule):
    """Clipped policy gradient with drift (Liu et al. 2025, https://arxiv.org/abs/2505.12504).

    `GRPOLightningModule` with the settings of the paper and its code: the log-ratio clipped to [log 0.8, log 1.2], the
    drift penalty with coefficient 0.01 and its ratio bounded at 3, no KL to a reference. A rollout's first update
    is REINFORCE's; clip and drift act from the second on: set `minibatch_size` (its code makes 8) or `ppo_epochs`.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        loss: PolicyLoss = CPG(drift_coef=0.01),
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, loss=loss, kl=kl, **kwargs)


class RLOOLightningModule(CriticFreeLightningModule):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 3.2).

    `PPOLightningModule` with the paper's settings: no critic, `A = r - mean of the others`, k1 in the reward, summed
    over the sequence, one on-policy update per rollout, where the clipped loss has the gradient of REINFORCE.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        aggregation: Aggregation = SequenceSum(),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, aggregation=aggregation, **kwargs)


class ReinforcePlusPlusLightningModule(CriticFreeLightningModule):
    """REINFORCE++ (Hu et al. 2025, https://arxiv.org/abs/2501.03262, section 3).

    `PPOLightningModule` with the paper's settings: no critic, `A_t` the return from token t on, normalized over all
    tokens of the rollout, k1 in the reward with coefficient 0.01, PPO's clip at 0.2, the mean over tokens, one pass
    over each rollout. One completion per prompt is enough. Its form for groups is `ReinforcePlusPlusBaseline` as the
    advantage with `KLInLoss("k2")` as the KL.
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

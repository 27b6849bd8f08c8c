"""Named algorithms without a critic, each with the settings of a paper."""

from __future__ import annotations

from typing import Any

from lightrl.algorithms.policy_gradient import GRPOLightningModule, PolicyGradientLightningModule
from lightrl.models.spec import ModelSpec
from lightrl.objectives.estimators import AdvantageEstimator, GroupRelative
from lightrl.objectives.loss_terms import (
    Aggregation,
    ConstantLength,
    KLInReward,
    KLPenalty,
    PolicyLoss,
    PPOClip,
    SequenceSum,
    TokenMean,
)
from lightrl.objectives.policy_losses import CPG, GSPO
from lightrl.objectives.special_estimators import RLOO, ReinforcePlusPlus


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


class RLOOLightningModule(PolicyGradientLightningModule):
    """REINFORCE leave-one-out (RLOO).

    The paper's settings: `A = r - mean of the others`, the k1 KL penalty in the reward (coefficient 0.05), token sums,
    and one on-policy update per rollout. With one update, the clipped loss has the gradient of REINFORCE.

    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 3.2.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = RLOO(),
        aggregation: Aggregation = SequenceSum(),
        kl: KLPenalty | None = KLInReward(coef=0.05),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantage=advantage, aggregation=aggregation, kl=kl, **kwargs)


class ReinforcePlusPlusLightningModule(PolicyGradientLightningModule):
    """REINFORCE++.

    The paper's settings: advantages are returns normalized over all tokens of the rollout. The k1 KL penalty is in the
    reward, with coefficient 0.01. PPO's clip is 0.2, and each rollout gets one pass with the mean over tokens. One
    completion per prompt is enough.

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


class GSPOLightningModule(GRPOLightningModule):
    """Group sequence policy optimization (GSPO).

    `GRPOLightningModule` with the paper's settings: the length-normalized sequence ratio clipped to
    [1 - 3e-4, 1 + 4e-4], and no KL penalty. With one update per rollout, the ratio is 1 and clipping has no effect. Set
    `minibatch_size` for several updates; the paper makes 4.

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, sections 4.1 and 5.1.
    """

    def __init__(
        self, actor: str | ModelSpec, *, loss: PolicyLoss = GSPO(), kl: KLPenalty | None = None, **kwargs: Any
    ) -> None:
        super().__init__(actor, loss=loss, kl=kl, **kwargs)


class CPGDLightningModule(GRPOLightningModule):
    """Clipped policy gradient with policy drift (CPGD).

    `GRPOLightningModule` with the settings of the paper and its code. The log-ratio is clipped to [log 0.8, log 1.2].
    The drift penalty has the coefficient 0.01 and a ratio of at most 3. The KL penalty is off. The first
    update of a rollout equals REINFORCE. The clip and the drift take effect from the second update on, so set
    `minibatch_size` (the paper's code makes 8 updates) or `ppo_epochs`.

    Source: Liu et al. 2025, https://arxiv.org/abs/2505.12504.
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

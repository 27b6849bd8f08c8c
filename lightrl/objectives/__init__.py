"""Components of an algorithm: advantage estimators, policy losses, aggregations, KL penalties, and divergences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.compat.arguments import lazy_names

if TYPE_CHECKING:
    from lightrl.objectives.divergences import Divergence, ForwardKL, JensenShannon, ReverseKL
    from lightrl.objectives.estimators import AdvantageEstimator, AdvantageInput, GroupRelative, SequenceEstimator
    from lightrl.objectives.loss_terms import (
        Aggregation,
        ConstantLength,
        KLInLoss,
        KLInReward,
        KLPenalty,
        LossInput,
        PolicyLoss,
        PPOClip,
        SequenceMean,
        SequenceSum,
        TokenMean,
    )
    from lightrl.objectives.off_policy import (
        VESPO,
        GeometricRejection,
        OffPolicyCorrection,
        OffPolicySequenceMask,
        RolloutRatio,
    )
    from lightrl.objectives.policy_losses import CISPO, CPG, DPPO, GMPO, GSPO, SAPO, RLOOSequence, SequenceClip
    from lightrl.objectives.special_estimators import (
        GAE,
        GDPO,
        OPO,
        RLOO,
        GiGPO,
        MaxRL,
        PassAtK,
        Reinforce,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        TurnGAE,
        TurnReturns,
        Turns,
    )

__all__ = [
    "CISPO",
    "CPG",
    "DPPO",
    "GAE",
    "GDPO",
    "GMPO",
    "GSPO",
    "OPO",
    "RLOO",
    "SAPO",
    "VESPO",
    "AdvantageEstimator",
    "AdvantageInput",
    "Aggregation",
    "ConstantLength",
    "Divergence",
    "ForwardKL",
    "GeometricRejection",
    "GiGPO",
    "GroupRelative",
    "JensenShannon",
    "KLInLoss",
    "KLInReward",
    "KLPenalty",
    "LossInput",
    "MaxRL",
    "OffPolicyCorrection",
    "OffPolicySequenceMask",
    "PPOClip",
    "PassAtK",
    "PolicyLoss",
    "RLOOSequence",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "ReverseKL",
    "RolloutRatio",
    "SequenceClip",
    "SequenceEstimator",
    "SequenceMean",
    "SequenceSum",
    "TokenMean",
    "TurnGAE",
    "TurnReturns",
    "Turns",
]

_MODULES = ("loss_terms", "estimators", "off_policy", "policy_losses", "special_estimators", "divergences")
__getattr__ = lazy_names(__name__, _MODULES, __all__)

"""What does not go together is refused with both names; the rest is let through."""

from __future__ import annotations

import pytest

from lightrl.objectives.advantages import (
    GAE,
    GDPO,
    RLOO,
    AdvantageEstimator,
    GroupRelative,
    MaxRL,
    PassAtK,
    ReinforcePlusPlus,
)
from lightrl.objectives.combinations import refuse_combination
from lightrl.objectives.kl import KLInLoss, KLInReward


@pytest.mark.parametrize("advantage", [MaxRL(), PassAtK(2), GDPO()], ids=lambda a: type(a).__name__)
def test_kl_in_the_reward(advantage: AdvantageEstimator) -> None:
    with pytest.raises(ValueError, match=rf"{type(advantage).__name__} with kl=KLInReward"):
        refuse_combination(advantage, KLInReward(), whiten=False)
    refuse_combination(advantage, KLInLoss("k2"), whiten=False)
    refuse_combination(advantage, None, whiten=False)


@pytest.mark.parametrize(
    "advantage",
    [GDPO(), ReinforcePlusPlus(), RLOO(normalize=True), GroupRelative("batch")],
    ids=lambda a: type(a).__name__,
)
def test_two_normalisations(advantage: AdvantageEstimator) -> None:
    with pytest.raises(ValueError, match=rf"{type(advantage).__name__} with whiten_advantages=True"):
        refuse_combination(advantage, None, whiten=True)
    refuse_combination(advantage, None, whiten=False)


@pytest.mark.parametrize("advantage", [GAE(), RLOO(), GroupRelative("group")], ids=lambda a: type(a).__name__)
def test_the_rest_combines(advantage: AdvantageEstimator) -> None:
    for kl in (None, KLInReward(), KLInLoss()):
        for whiten in (True, False):
            refuse_combination(advantage, kl, whiten=whiten)

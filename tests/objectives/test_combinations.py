"""What does not go together is refused with both names; the rest is let through."""

from __future__ import annotations

import pytest

from lightrl.objectives import (
    GAE,
    GDPO,
    RLOO,
    AdvantageEstimator,
    GroupRelative,
    KLInLoss,
    KLInReward,
    MaxRL,
    PassAtK,
    ReinforcePlusPlus,
)


@pytest.mark.parametrize("advantage", [MaxRL(), PassAtK(2), GDPO()], ids=lambda a: type(a).__name__)
def test_kl_in_the_reward(advantage: AdvantageEstimator) -> None:
    with pytest.raises(ValueError, match=rf"{type(advantage).__name__} with kl=KLInReward"):
        advantage.refuse_combination(KLInReward(), whiten=False)
    advantage.refuse_combination(KLInLoss("k2"), whiten=False)
    advantage.refuse_combination(None, whiten=False)


@pytest.mark.parametrize(
    "advantage",
    [GDPO(), ReinforcePlusPlus(), RLOO(normalize=True), GroupRelative("batch")],
    ids=lambda a: type(a).__name__,
)
def test_two_normalisations(advantage: AdvantageEstimator) -> None:
    with pytest.raises(ValueError, match=rf"{type(advantage).__name__} with whiten_advantages=True"):
        advantage.refuse_combination(None, whiten=True)
    advantage.refuse_combination(None, whiten=False)


@pytest.mark.parametrize("advantage", [GAE(), RLOO(), GroupRelative("group")], ids=lambda a: type(a).__name__)
def test_the_rest_combines(advantage: AdvantageEstimator) -> None:
    for kl in (None, KLInReward(), KLInLoss()):
        for whiten in (True, False):
            advantage.refuse_combination(kl, whiten=whiten)

"""Which estimators, KL placements and whitening do not go together: refused when a module is built, with both names.

Everything else combines: any estimator with any loss, aggregation and KL in the loss.
"""

from __future__ import annotations

from lightrl.modules.advantages import AdvantageEstimator
from lightrl.modules.kl import KLInReward, KLPenalty
from lightrl.types import class_name

__all__ = ["refuse_combination"]


def refuse_combination(advantage: AdvantageEstimator, kl: KLPenalty | None, *, whiten: bool) -> None:
    """Raises for a combination in which one part would be lost or done twice.

    Args:
        advantage: the estimator.
        kl: where the KL goes; None without one.
        whiten: whether advantages are whitened after the estimator.

    Raises:
        ValueError: a KL in the reward with an estimator that takes scores for success or failure, or that does not
            read the summed rewards; whitening after an estimator that ends with a normalisation of its own.
    """
    name = class_name(advantage)
    if isinstance(kl, KLInReward):
        way_out = "Use KLInLoss('k3', ratio_correction=True) or no KL."
        if advantage.needs_binary_scores:
            raise ValueError(
                f"advantage={name} with kl=KLInReward: {name} takes a score for success or failure, and a KL inside "
                f"the score would corrupt it. {way_out}"
            )
        if advantage.needs_reward_parts:
            raise ValueError(
                f"advantage={name} with kl=KLInReward: {name} reads each reward function's own rewards, and a KL in "
                f"their sum would be lost. {way_out}"
            )
    if whiten and advantage.normalizes:
        raise ValueError(
            f"advantage={name} with whiten_advantages=True: {name} already normalises over the batch, and a second "
            "normalisation would hide the first. Set whiten_advantages=False."
        )

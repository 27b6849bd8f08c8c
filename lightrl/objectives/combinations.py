"""Which parts do not go together, refused with both names.

Everything else combines: any estimator with any loss, aggregation and KL in the loss.
"""

from __future__ import annotations

from lightrl.objectives.advantages import AdvantageEstimator
from lightrl.objectives.kl import KLInReward, KLPenalty

__all__ = ["refuse_combination", "refuse_shaped_rewards"]


def refuse_shaped_rewards(advantage: AdvantageEstimator, shaping: str) -> None:
    """Refuses what changes the summed reward for estimators that do not read it.

    Args:
        advantage: the estimator. shaping: the argument or callback, as the user wrote it.

    Raises:
        ValueError: the estimator reads each function's own rewards, so that the change would be lost, or each turn's,
            which the change would leave as they are.
    """
    name = type(advantage).__name__
    if advantage.needs_turns:
        raise ValueError(
            f"{shaping} with advantage={name}: {name} gives turns credit for their own rewards, and a change of the "
            "sum alone would land on the last turn. Drop it, scale the rewards themselves, or take RLOO."
        )
    if advantage.needs_reward_parts:
        raise ValueError(
            f"{shaping} with advantage={name}: {name} reads each reward function's own rewards, and a change of their "
            "sum would be lost. Drop it, or take GroupRelative."
        )


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
    name = type(advantage).__name__
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

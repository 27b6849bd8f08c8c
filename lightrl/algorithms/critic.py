"""Settings of the critic."""

from __future__ import annotations

from dataclasses import dataclass

from lightrl.compat.arguments import above, at_least
from lightrl.models.spec import ModelSpec


@dataclass
class CriticSpec:
    """Where the critic's values come from, and how they are learnt.

    Args:
        model: backbone of the critic; None starts from the actor's model.
        shared: a value head on the actor's own backbone instead of a second one; `model` is then not used.
        lr: learning rate of the critic's parameters, 1e-10 to 100; None takes the optimizer's.
        loss_coef: weight of the critic's loss, at least 0.
        clip: range of the clipped value loss, 1e-10 to 1e6, in units of value; None is the plain squared error.
        warmup_rollouts: this many first rollouts train the critic only.

    Raises:
        ValueError: a value is out of range, or a shared critic is given a model.
    """

    model: ModelSpec | None = None
    shared: bool = False
    lr: float | None = None
    loss_coef: float = 0.5
    clip: float | None = 0.2
    warmup_rollouts: int = 0

    def __post_init__(self) -> None:
        if self.shared and self.model is not None:
            raise ValueError("CriticSpec(shared=True, model=...): a shared critic has no model of its own; drop one.")
        at_least("CriticSpec.loss_coef", self.loss_coef, 0)
        at_least("CriticSpec.warmup_rollouts", self.warmup_rollouts, 0)
        above("CriticSpec.lr", self.lr, or_none="(null) for the optimizer's")
        above("CriticSpec.clip", self.clip, or_none="(null) to turn it off")

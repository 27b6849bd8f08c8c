"""Control of the module's `entropy_coef`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightrl.algorithms.hooks import RLCallback
from lightrl.compat.arguments import above
from lightrl.ops.entropy import adaptive_entropy_coef


class AdaptiveEntropy(RLCallback):
    """Keeps the policy's entropy from falling below a target by moving the weight of the entropy bonus.

    After each rollout with mean token entropy e the coefficient c moves by `step`: up where `e <= target`, else down,
    within [minimum, maximum]. The next rollout is trained with `entropy_coef = c` where `e <= target` and with 0
    elsewhere: a policy with entropy enough gets no bonus. It replaces the module's own `entropy_coef`, and has rows
    without an advantage run, too, which the module otherwise leaves out where they have no gradient. A rollout of
    which nothing is trained has no entropy and leaves all as it is.

    Args:
        target: entropy in nats per token, above 0 and at most 1e3.
        step: change of the coefficient per rollout, above 0 and at most 1e3.
        start: first coefficient.
        minimum: lower bound of the coefficient, at least 0.
        maximum: upper bound of the coefficient, at most 1e3.

    Raises:
        ValueError: a value is out of range.

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312, section 4. There the entropy is that of the step to come;
        here it is `policy/entropy` of the rollout before, so that no forward pass is added.
    """

    reads_old_logprobs = False

    def __init__(
        self, target: float = 0.2, step: float = 0.005, start: float = 0.0, minimum: float = 0.0, maximum: float = 1.0
    ) -> None:
        if not 0 <= minimum <= start <= maximum:
            raise ValueError(
                f"AdaptiveEntropy: minimum={minimum}, start={start}, maximum={maximum}: needs 0 <= minimum <= start "
                "<= maximum."
            )
        self.target = above("AdaptiveEntropy.target", target)
        self.step = above("AdaptiveEntropy.step", step)
        self.minimum = minimum
        self.maximum = maximum
        self.coef = start
        self.active = False

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Sets the coefficient of the first rollout, or of the one after a checkpoint."""
        self._apply(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Moves the coefficient by the rollout's entropy."""
        entropy = outputs.get("policy/entropy")
        if entropy is None:
            return
        self.coef = adaptive_entropy_coef(
            self.coef, entropy, self.target, step=self.step, minimum=self.minimum, maximum=self.maximum
        )
        self.active = entropy <= self.target
        self._apply(pl_module)

    def _apply(self, pl_module: Any) -> None:
        pl_module.set_entropy_coef(self.coef if self.active else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The coefficient, and whether it is in use."""
        return {"coef": self.coef, "active": self.active}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them."""
        self.coef, self.active = state_dict["coef"], state_dict["active"]

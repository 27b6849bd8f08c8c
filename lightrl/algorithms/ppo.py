"""PPO: the training step of `policy_gradient.py` with a critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightrl.algorithms.policy_gradient import PolicyGradientLightningModule
from lightrl.models.reward import ValueModel, new_value_head
from lightrl.models.spec import ModelSpec
from lightrl.objectives.estimators import AdvantageEstimator
from lightrl.objectives.loss_terms import KLInReward, KLPenalty
from lightrl.objectives.special_estimators import GAE
from lightrl.ops.baselines import clipped_value_loss
from lightrl.records import Experience, MicroBatch, ModelOutputs, Rollouts

if TYPE_CHECKING:
    from lightrl.models.reward import RewardModelSpec


@dataclass(frozen=True)
class CriticSpec:
    """Critic (value model) and its loss.

    Args:
        model: Backbone of the critic. Defaults to the policy's model.
        shared: Put a value head on the policy's backbone instead of using a second one. Incompatible with `model`.
        lr: Learning rate of the critic's parameters. Defaults to the optimizer's.
        loss_coef: Weight of the critic's loss.
        clip: Clip range of the value loss, in units of value. None uses the plain squared error.
        warmup_rollouts: Number of initial rollouts that train only the critic.

    Raises:
        ValueError: A shared critic has a model.
    """

    model: ModelSpec | None = None
    shared: bool = False
    lr: float | None = None
    loss_coef: float = 0.5
    clip: float | None = 0.2
    warmup_rollouts: int = 0

    def __post_init__(self) -> None:
        if self.shared and self.model is not None:
            raise ValueError("CriticSpec.model with shared=True: a shared critic uses the policy's model. Remove one.")


class PPOLightningModule(PolicyGradientLightningModule):
    """Proximal policy optimization (PPO) with verifiable rewards, reward models, or both.

    Adds a critic to `PolicyGradientLightningModule`, and to the loss of a mini-batch its mean over the M trained
    tokens:

        critic.loss_coef * sum_t value_t / M

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347.

    Args:
        critic: Value model. None disables it and requires an advantage estimator that doesn't use values.

    Raises:
        ValueError: Two arguments are incompatible.
    """

    default_group_size = 1
    critic: ValueModel | None

    def __init__(
        self,
        actor: str | ModelSpec,
        critic: CriticSpec | None = CriticSpec(),
        reference: str | ModelSpec | None = None,
        reward_models: list[RewardModelSpec] | None = None,
        *,
        advantage: AdvantageEstimator = GAE(),
        kl: KLPenalty | None = KLInReward(coef=0.05),
        ppo_epochs: int = 2,
        whiten_advantages: bool = True,
        **kwargs: Any,
    ) -> None:
        if critic is not None and not advantage.needs_critic:
            raise ValueError(
                f"critic with advantage={type(advantage).__name__}: the estimator doesn't use values. Set critic=None "
                "(null in YAML)."
            )
        self.critic_spec = critic
        super().__init__(
            actor,
            reference,
            reward_models,
            advantage=advantage,
            kl=kl,
            ppo_epochs=ppo_epochs,
            whiten_advantages=whiten_advantages,
            **kwargs,
        )

    # ---- models and optimizer ----------------------------------------------------------------------------------

    def build_actor(self, in_shards: bool) -> None:
        """Also builds the critic, or its head on the policy's backbone."""
        super().build_actor(in_shards)
        spec, self.critic = self.critic_spec, None
        if spec is not None and spec.shared:
            self.actor.value_head = new_value_head(self.actor.lm)
        elif spec is not None:
            self.critic = ValueModel.from_spec(spec.model or self.actor_spec, in_shards=in_shards)

    @property
    def trained_models(self) -> list[Any]:
        return [model for model in (self.actor, self.critic) if model is not None]

    @property
    def saved_specs(self) -> dict[str, ModelSpec]:
        spec = self.critic_spec
        own = {} if spec is None or spec.shared else {"critic": spec.model or self.actor_spec}
        return super().saved_specs | own

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Adds the group `critic`."""
        (policy,) = super().parameter_groups()
        valued = self.actor.value_head if self.critic is None else self.critic
        if valued is None or self.critic_spec is None:
            return [policy]
        lr = {} if self.critic_spec.lr is None else {"lr": self.critic_spec.lr}
        values = [p for p in valued.parameters() if p.requires_grad]
        others = {id(p) for p in values}
        policy["params"] = [p for p in policy["params"] if id(p) not in others]
        return [policy, {"params": values, "name": "critic", **lr}]

    @property
    def in_critic_warmup(self) -> bool:
        """Whether only the critic is trained."""
        spec = self.critic_spec
        return spec is not None and self.trainer.fit_loop.total_batch_idx < spec.warmup_rollouts

    def step_optimizer(self) -> None:
        """Steps the optimizer.

        In the critic's warm-up, the rates of all other groups are 0, since DeepSpeed steps every parameter. This also
        stops decoupled weight decay.
        """
        others = [group for group in self._optimizer.param_groups if group.get("name") != "critic"]
        frozen = [(group, group["lr"]) for group in others if self.in_critic_warmup]
        for group, _ in frozen:
            group["lr"] = 0.0
        try:
            super().step_optimizer()
        finally:
            for group, rate in frozen:
                group["lr"] = rate

    # ---- values ------------------------------------------------------------------------------------------------

    def evaluate_models(self, rollouts: Rollouts) -> ModelOutputs:
        """Also computes the critic's values."""
        outputs, critic = super().evaluate_models(rollouts), self.critic
        if critic is not None:
            outputs.values = self.batched(critic, lambda x: {"values": critic(x)}, rollouts)["values"]
        return outputs

    def skips_zero_advantages(self, rows: Experience) -> bool:
        return self.critic_spec is None and super().skips_zero_advantages(rows)

    def other_losses(self, rows: Experience, out: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Adds the critic's loss, `value`."""
        losses, metrics = super().other_losses(rows, out)
        values = out.get("values") if self.critic is None else self.critic(rows)
        if self.critic_spec is None or values is None or rows.values is None or rows.returns is None:
            return losses, metrics
        clip = self.critic_spec.clip
        loss, clipped = clipped_value_loss(values, rows.values, rows.returns, rows.response_mask, clip)
        own = {"value": self.critic_spec.loss_coef * loss}
        return own | losses, {**metrics, "loss/value": loss, "value/clip_fraction": clipped}

    def total_loss(self, micro: MicroBatch, losses: dict[str, Tensor]) -> Tensor:
        """Counts only the critic's loss in its warm-up. The others keep their graph for the strategy."""
        if self.in_critic_warmup:
            losses = {name: loss if name == "value" else 0.0 * loss for name, loss in losses.items()}
        return super().total_loss(micro, losses)

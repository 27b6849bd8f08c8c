"""PPO as a LightningModule: one training step, five hooks.

Read it top to bottom: what it owns, how one rollout becomes updates, then the hooks in the order in which they run.
What differs between algorithms (estimator, loss, aggregation, KL) is an object given to the constructor.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightrl.algorithms import evaluation
from lightrl.algorithms.batches import (
    batched_forward,
    cut_micro_batches,
    cut_minibatches,
    policy_forward,
    shape_rewards,
    start_experience,
    turn_anchors,
    value_forward,
    whiten_and_clip,
    widest_layout,
)
from lightrl.algorithms.hooks import RLCallback, rl_callbacks
from lightrl.algorithms.saving import SavesPretrained
from lightrl.algorithms.schedule import LRSchedule, make_optimizer, refuse_factories, with_schedule
from lightrl.arguments import (
    MAX_REWARD,
    MOST_ENTROPY_COEF,
    above,
    at_least,
    coefficient,
    fraction,
    instance_of,
    require_model_folder,
    sensible,
    whole_number,
)
from lightrl.compat.jsonargparse import deferred, realized
from lightrl.compat.lightning import is_compiled, run_seed
from lightrl.distributed import random_states, strategies
from lightrl.distributed.metrics import MetricSums
from lightrl.distributed.reduction import Reduction
from lightrl.models.loading import require_model, return_router_logits
from lightrl.models.lora import adapter_config, keep_reference, named_adapter_weights, named_hf_weights
from lightrl.models.policy import PolicyModel, ValueModel
from lightrl.models.reward import RewardModel, RewardModelSpec
from lightrl.models.spec import ModelSpec
from lightrl.objectives.advantages import GAE, AdvantageEstimator
from lightrl.objectives.aggregation import Aggregation, TokenMean
from lightrl.objectives.kl import KLInLoss, KLInReward, KLPenalty
from lightrl.objectives.losses import PolicyLoss, PPOClip
from lightrl.objectives.off_policy import OffPolicyCorrection
from lightrl.objectives.trajectories import TrajectoryLayout, first_rows, last_rows
from lightrl.ops.entropy import top_entropy_mask
from lightrl.ops.losses import clipped_value_loss
from lightrl.records import Experience, Rollouts, Routes, SupervisedBatch
from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.rollout.learner import RolloutLearner
from lightrl.storage import require_entries

__all__ = ["CriticSpec", "PPOLightningModule"]

log = logging.getLogger(__name__)


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
        coefficient("CriticSpec.loss_coef", self.loss_coef)
        at_least("CriticSpec.warmup_rollouts", self.warmup_rollouts, 0)
        above("CriticSpec.lr", self.lr, or_none="(null) for the optimizer's")
        sensible("CriticSpec.lr", self.lr, LEAST, MOST_RATE, "no critic learns at such a rate")
        above("CriticSpec.clip", self.clip, or_none="(null) to turn it off")
        sensible("CriticSpec.clip", self.clip, LEAST, 1e6, "nothing, or everything, would be clipped")


WHOLE_FROM_ONE = ("ppo_epochs", "micro_batch_tokens", "max_skipped_updates")
REFUSED_CALLBACKS = {
    "BatchSizeFinder": "micro_batch_tokens bounds the memory; `lightrl plan` says what fits.",
    "GradientAccumulationScheduler": "micro_batch_tokens and prompts_per_rollout say what is accumulated.",
    "LearningRateFinder": "the loss of a rollout says nothing about its rate; compare runs by eval/reward.",
    "StochasticWeightAveraging": "take lightrl.callbacks.EMA, whose average is evaluated and exported.",
    "WeightAveraging": "take lightrl.callbacks.EMA, whose average is evaluated and exported.",
}
MOST_NORM = 1e6
MOST_RATE = 100.0
LEAST = 1e-10
"""Smallest bound and rate of which anything is left in float32."""
ABOVE_ZERO_OR_NONE = ("max_grad_norm", "advantage_clip", "reward_clip")


class PPOLightningModule(RolloutLearner, SavesPretrained):
    """Fine-tunes a policy by PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) on scored rollouts.

    One Lightning batch is one rollout (`Rollouts`, from `RolloutDataModule` or any loader that yields them). Each is
    turned into experience and used for `ppo_epochs` x mini-batches of updates. Per mini-batch the loss is

        sum_t w_t (policy_t + kl.coef * kl_t - entropy_coef * entropy_t) / N
            + critic.loss_coef * sum_t value_t / M + ptx_coef * mean_t nll_t (supervised rows)

    with w and N from `aggregation`, counted over the whole mini-batch, all micro-batches and ranks, so no split into
    micro-batches, layouts or ranks changes a gradient. It differs from the usual PPO for language models in that no
    end-of-sequence is ever invented, advantages skip masked tokens, and log-probs are those of the sampling
    distribution (temperature inside). What counts, averages or compares attempts works on trajectories, so that into
    how many rows one was cut changes nothing.

    A trajectory has a reward if any reward function or reward model scored it and nothing failed on its way; its
    reward is the weighted sum of those that did. One without is in no loss, no normaliser and no baseline.

    Args:
        actor: the policy: a folder or hub name, or a `ModelSpec` with LoRA, dtype, layout and so on; from Python also a
            live model with its `tokenizer`, which is trained itself (`ModelSpec.of`, which takes LoRA and so on too).
        critic: where values come from; None builds no critic (needs an advantage estimator that uses none).
        reference: model of the KL term; None takes a frozen copy of the actor's model (with LoRA: the actor without
            its adapter, or with the one in `lora.adapter`). Nothing is built where `kl` is None.
        reward_models: sequence-classification models that add to the rewards of the data module's functions. They
            read the last row of a trajectory.
        advantage: estimator of advantages and returns.
        loss: per-token policy loss.
        aggregation: how token losses become one number.
        kl: penalty against the reference, in the reward or in the loss, with its coefficient; None for none.
        entropy_coef: weight of the entropy bonus.
        whiten_advantages: shift and scale advantages to mean 0, std 1 over all response tokens of the rollout.
        advantage_clip: bound on |advantage| after whitening; None is off.
        reward_clip: bound on |trajectory reward| before the KL penalty; None is off.
        mask_truncated: leave completions that `max_new_tokens` cut off out of all losses and their normalisers. They
            keep their place in the baselines of the others.
        top_entropy_fraction: fraction of the rollout's tokens, those of highest entropy over all ranks, that the
            policy loss trains, in (0, 1] (https://arxiv.org/abs/2506.01939: 0.2); the normaliser counts all tokens as
            in the paper, and KL, entropy bonus and critic see all. 1 is off.
        ppo_epochs: passes over each rollout.
        minibatch_size: trajectories per optimizer step, over all ranks; must divide the rollout. None: all of them.
        micro_batch_tokens: most tokens in one forward and backward; only memory and speed depend on it.
        optimizer: called with the parameter groups `actor` and `critic`.
        lr_scheduler: `{name: cosine, warmup: 0.03}` (`LRSchedule`, over all updates of the run), or what is called
            with the optimizer; stepped after every update. None keeps the rate constant.
        max_grad_norm: bound on the joint gradient norm of actor and critic; None is off.
        aux_loss_coef: weight of a mixture-of-experts model's own load-balancing loss, over the tokens that a
            micro-batch runs (so it, alone, depends on the split a little); 0 is off.
        ptx_coef: weight of the supervised loss on the data module's `ptx` rows, a mean over their completion tokens
            (InstructGPT's PPO-ptx, https://arxiv.org/abs/2203.02155 eq. 2, which sums over tokens); 0 is off.
        off_policy_correction: with the data module's `staleness`, wrap the loss in `OffPolicyCorrection` unless it
            reads the engine's log-probs already. False does not wrap it.
        max_skipped_updates: updates in a row with a non-finite loss or gradient after which the run stops.
        success_reward: a completion counts as solved in `eval/pass@k` from this reward on.
        tokenizer: of a live `actor`, or its processor; None for any other, whose folder has it.

    Raises:
        ValueError: a value is out of range or two arguments exclude each other; the message names them.
    """

    actor: PolicyModel
    critic: ValueModel | None
    reference: PolicyModel | None
    reward_models: nn.ModuleDict

    def __init__(
        self,
        actor: str | ModelSpec,
        critic: CriticSpec | None = CriticSpec(),  # noqa: B008 - never changed; a dataclass default is shown by --help
        reference: str | ModelSpec | None = None,
        reward_models: list[RewardModelSpec] | None = None,
        *,
        advantage: AdvantageEstimator = deferred(GAE),  # noqa: B008
        loss: PolicyLoss = deferred(PPOClip),  # noqa: B008
        aggregation: Aggregation = deferred(TokenMean),  # noqa: B008
        kl: KLPenalty | None = deferred(KLInReward, coef=0.05),  # noqa: B008
        entropy_coef: float = 0.0,
        whiten_advantages: bool = True,
        advantage_clip: float | None = None,
        reward_clip: float | None = None,
        mask_truncated: bool = False,
        top_entropy_fraction: float = 1.0,
        ppo_epochs: int = 2,
        minibatch_size: int | None = None,
        micro_batch_tokens: int = 16384,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-6, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | LRSchedule | None = None,
        max_grad_norm: float | None = 1.0,
        aux_loss_coef: float = 0.0,
        ptx_coef: float = 0.0,
        off_policy_correction: bool = True,
        max_skipped_updates: int = 5,
        success_reward: float = 1.0,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # frozen models stay out of checkpoints; `state_dict` says why
        self.actor_spec = ModelSpec.given(actor, tokenizer)
        self.critic_spec = instance_of("critic", critic, CriticSpec, or_none="for no critic")
        self.reference_spec = None if reference is None else ModelSpec.given(reference, argument="reference")
        self.reward_model_specs = self._given_reward_models(reward_models)
        self.advantage = realized(advantage, "advantage", AdvantageEstimator)
        self.loss = realized(loss, "loss", PolicyLoss)
        self.aggregation = realized(aggregation, "aggregation", Aggregation)
        self.kl = realized(kl, "kl", KLInReward, KLInLoss, or_none="for no KL")  # the two places where it can act
        self.entropy_coef = entropy_coef
        self.whiten_advantages = whiten_advantages
        self.advantage_clip = advantage_clip
        self.reward_clip = reward_clip
        self.mask_truncated = mask_truncated
        self.top_entropy_fraction = top_entropy_fraction
        self.ppo_epochs = ppo_epochs
        self.minibatch_size = minibatch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.max_grad_norm = max_grad_norm
        self.aux_loss_coef = aux_loss_coef
        self.ptx_coef = ptx_coef
        self.off_policy_correction = off_policy_correction
        self.max_skipped_updates = max_skipped_updates
        self.success_reward = success_reward
        self.num_skipped_updates = 0
        self.skipped_in_a_row = 0
        self.seed = run_seed()
        self._rl_callbacks: list[RLCallback] = []
        self._routes_noted = False
        self._restored_rng: list[Any] | None = None
        self._eval_sums = MetricSums()
        refuse_factories(optimizer, lr_scheduler)
        self._refuse_arguments()

    @staticmethod
    def _given_reward_models(specs: list[RewardModelSpec] | None) -> list[RewardModelSpec]:
        if not isinstance(specs, list | tuple | None):
            raise ValueError(f"reward_models={specs!r}: give a list of RewardModelSpec, also of one.")
        return [instance_of(f"reward_models[{i}]", spec, RewardModelSpec) for i, spec in enumerate(specs or [])]

    def _refuse_arguments(self) -> None:
        """Raises a ValueError for numbers out of range and for parts that do not go together."""
        advantage = type(self.advantage).__name__
        if self.advantage.needs_critic and self.critic_spec is None:
            raise ValueError(
                f"advantage={advantage} needs a critic but critic=None: give a CriticSpec or another estimator "
                "(GroupRelative, RLOO, ...)."
            )
        if self.critic_spec is not None and not self.advantage.needs_critic:
            raise ValueError(
                f"advantage={advantage} uses no critic, so the one given by `critic` would never be trained: set "
                "critic=None (null in YAML)."
            )
        self.advantage.refuse_combination(self.kl, whiten=self.whiten_advantages)
        if self.reward_clip is not None:
            self.advantage.refuse_shaped_rewards(f"reward_clip={self.reward_clip}")
        coefficient("ptx_coef", self.ptx_coef)
        coefficient("aux_loss_coef", self.aux_loss_coef)
        coefficient("entropy_coef", self.entropy_coef, -MOST_ENTROPY_COEF, high=MOST_ENTROPY_COEF)
        if self.max_grad_norm is not None and self.max_grad_norm > MOST_NORM:
            raise ValueError(f"max_grad_norm={self.max_grad_norm:g}: would never clip; None (null) turns clipping off.")
        for name in WHOLE_FROM_ONE:
            whole_number(name, getattr(self, name), 1)
        whole_number("minibatch_size", self.minibatch_size, 1, or_none="(null in YAML) to turn it off")
        for name in ABOVE_ZERO_OR_NONE:
            above(name, getattr(self, name), or_none="(null in YAML) to turn it off")
            sensible(name, getattr(self, name), LEAST, MAX_REWARD, "everything, or nothing, would be clipped")
        kept = fraction("top_entropy_fraction", self.top_entropy_fraction, "(0, 1]", "; 1 trains every token")
        sensible("top_entropy_fraction", kept, 1e-4, 1, "next to no token would be trained")
        sensible("success_reward", self.success_reward, 0, MAX_REWARD, "no reward is so large")
        if kept < 1 and self.loss.one_ratio_per_trajectory:
            raise ValueError(
                f"top_entropy_fraction={kept} with loss={type(self.loss).__name__}: its one ratio per trajectory "
                "has every token trained, whichever are picked. Take 1, or a loss with a ratio per token (PPOClip)."
            )
        if self.kl is not None and self.actor_spec.random_init and self.reference_spec is None:
            raise ValueError("actor.random_init=True has no weights to make a reference of: set kl=None or reference.")

    # ---- set-up ------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Any]:
        """Lightning's first call: refuses Trainer options that do not go with manual optimisation and rollouts."""
        trainer: Any = self.trainer
        if is_compiled(self):
            raise ValueError(
                "torch.compile(module): a step that samples, scores and updates is no graph to compile. Give the "
                "module itself; a subclass may compile its models in configure_model."
            )
        if trainer.gradient_clip_val is not None:
            raise ValueError(
                f"trainer.gradient_clip_val={trainer.gradient_clip_val}: set the module's "
                f"max_grad_norm={trainer.gradient_clip_val} (null is off), which bounds actor and critic jointly."
            )
        if trainer.gradient_clip_algorithm is not None:
            raise ValueError(
                f"trainer.gradient_clip_algorithm={trainer.gradient_clip_algorithm.value}: the module's max_grad_norm "
                "bounds the joint norm; there is no other way of clipping."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: gradients are accumulated within "
                "a rollout. Set the module's micro_batch_tokens (memory), or a larger prompts_per_rollout (batch)."
            )
        if trainer.overfit_batches:
            raise ValueError(
                f"trainer.overfit_batches={trainer.overfit_batches}: rollouts are sampled again, so no batch comes "
                "twice. To see the same prompts again and again give prompts.limit=N, and eval_prompts the same rows."
            )
        if self.critic_spec is not None and (warmup := self.critic_spec.warmup_rollouts):
            rollouts = self._count_rollouts()
            if warmup > rollouts:
                raise ValueError(
                    f"critic.warmup_rollouts={warmup}: the policy would never be trained in this run's {rollouts} "
                    "rollouts."
                )
            if warmup == rollouts:
                rank_zero_warn(f"critic.warmup_rollouts={warmup}: this run trains the critic alone, not the policy.")
        for callback in trainer.callbacks:
            for base in type(callback).__mro__:
                if base.__name__ in REFUSED_CALLBACKS:
                    raise ValueError(
                        f"callback {type(callback).__name__}: {base.__name__} does not go with manual optimisation: "
                        f"{REFUSED_CALLBACKS[base.__name__]}"
                    )
        return super().configure_callbacks()

    def setup(self, stage: str) -> None:
        """Refuses what cannot work, before any model is loaded, and collects what the callbacks declare."""
        strategies.refuse_unsupported(self.trainer.strategy, str(self.trainer.precision))
        if self.aux_loss_coef and strategies.context_group(self.trainer.strategy) is not None:
            raise ValueError(
                f"aux_loss_coef={self.aux_loss_coef} with context_parallel_size above 1: a rank sees routers of a part "
                "of the tokens only. Set either to its default."
            )
        strategies.set_gradient_clipping(self.trainer.strategy, self.max_grad_norm)
        require_model(self.actor_spec)
        if self.reference_spec is not None:
            require_model(self.reference_spec)
        for spec in self.reward_model_specs:
            require_model_folder(spec.path)
        if stage == "fit" and self.kl is None and self.reference_spec is not None:
            rank_zero_warn(
                f"reference={self.reference_spec.path!r} with kl=None: nothing compares with a reference, so it is not "
                "loaded. Set kl, or leave the reference out."
            )
        self._rl_callbacks = rl_callbacks(self.trainer.callbacks)  # type: ignore[attr-defined]
        if stage == "fit" and self._corrects_off_policy:
            log.info(
                "Samples come from older policies: %s is wrapped in OffPolicyCorrection.", type(self.loss).__name__
            )
            self.loss = OffPolicyCorrection(self.loss)

    @property
    def _corrects_off_policy(self) -> bool:
        """Whether `setup` will wrap the loss, because the data module samples ahead of the update."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        stale = isinstance(data, RolloutDataModule) and data.staleness > 0
        return stale and self.off_policy_correction and not self.loss.reads_engine_logprobs

    def _build_models(self, in_shards: bool = False) -> None:
        critic = self.critic_spec
        shared = critic is not None and critic.shared
        spec = self.actor_spec
        self.actor = PolicyModel.from_spec(spec, trainable=True, in_shards=in_shards, value_head=shared)
        if self.aux_loss_coef:
            return_router_logits(self.actor.lm)
        self.critic = (
            None if critic is None or shared else ValueModel.from_spec(critic.model or spec, in_shards=in_shards)
        )
        self.reference = self._build_reference(in_shards)
        self.reward_models = nn.ModuleDict({m.name: RewardModel.from_spec(m) for m in self.reward_model_specs})

    def _build_reference(self, in_shards: bool) -> PolicyModel | None:
        lora = self.actor_spec.lora
        if self.kl is None:
            return None
        if self.reference_spec is None and lora is not None:
            if lora.adapter is not None:
                keep_reference(self.actor.lm, lora)
            return None
        spec = self.reference_spec or replace(self.actor_spec, lora=None, gradient_checkpointing=False)
        return PolicyModel.from_spec(spec, trainable=False, in_shards=in_shards)

    def _models(self) -> list[Any]:
        return [m for m in (self.actor, self.critic, self.reference, *self.reward_models.values()) if m is not None]

    def configure_optimizers(self) -> Any:
        """One optimizer with the named parameter groups `actor` and `critic` (DeepSpeed takes exactly one)."""
        head = set(self.actor.value_head.parameters()) if self.actor.value_head is not None else set()
        actor = [p for p in self.actor.parameters() if p.requires_grad and p not in head]
        critic = [*head] if self.critic is None else [p for p in self.critic.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": actor, "name": "actor"}]
        if critic and self.critic_spec is not None:
            lr = {} if self.critic_spec.lr is None else {"lr": self.critic_spec.lr}
            groups.append({"params": critic, "name": "critic", **lr})
        optimizer = make_optimizer(self.optimizer_factory, groups, self.trainer.strategy)
        return with_schedule(optimizer, self.lr_scheduler_factory, self.count_updates)

    def count_updates(self) -> float:
        """Optimizer steps that the whole run will make: rollouts x `ppo_epochs` x mini-batches, or `max_steps`.

        Infinite where the run has no end.

        Raises:
            ValueError: mini-batches of a data module whose rollouts have no size that is known.
        """
        data, trainer = self.trainer.datamodule, self.trainer  # type: ignore[attr-defined]
        each = self.ppo_epochs
        if self.minibatch_size is not None:
            if not isinstance(data, RolloutDataModule):
                raise ValueError(
                    f"lr_scheduler by name with minibatch_size={self.minibatch_size}: how many updates a rollout makes "
                    "is known with RolloutDataModule only; give a scheduler class with its number of steps."
                )
            each *= max(data.prompts_per_rollout * data.group_size // self.minibatch_size, 1)
        if trainer.train_dataloader is None:
            trainer.fit_loop.setup_data()
        epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
        steps = math.inf if trainer.max_steps == -1 else trainer.max_steps
        return min(trainer.num_training_batches * epochs * each, steps)

    def _count_rollouts(self) -> float:
        """Rollouts of the whole run, as far as `max_epochs` and the data module say; infinity where they do not."""
        trainer: Any = self.trainer
        each = trainer.datamodule.rollouts_per_epoch if isinstance(trainer.datamodule, RolloutDataModule) else None
        counted = trainer.state.fn == "fit" and each is not None and trainer.max_epochs not in (None, -1)
        return trainer.max_epochs * each if counted else math.inf

    # ---- one rollout -------------------------------------------------------------------------------------------

    def training_step(self, rollouts: Rollouts, batch_idx: int) -> dict[str, float]:
        """Learns from one rollout and returns its metrics, reduced over ranks; callbacks read them as `outputs`."""
        clock, learnt = Stopwatch(), MetricSums()
        with clock.measures("time/experience"):
            experience = self.make_experience(rollouts)
        with clock.measures("time/update"):
            for minibatch in self.minibatches(experience):
                minibatch, finite = self.normalized(minibatch), self._all_finite()
                with strategies.optimizer_window(self.trainer.strategy, self._trained_models):
                    for micro in self.micro_batches(minibatch):
                        supervised = isinstance(micro, SupervisedBatch)
                        loss, values = self.compute_ptx_loss(micro) if supervised else self.compute_loss(micro)
                        self.manual_backward(loss)
                        finite &= torch.isfinite(loss.detach())  # read once per update, not per backward
                        learnt.add(values, micro.response_mask)
                learns = minibatch.num_trained > 0
                learnt.add(self.apply_gradients(finite=bool(finite)) if learns else self._skip_empty_update())
        learnt.add(rollouts.metrics)
        metrics = {**experience.metrics, **self._all_ranks.means(learnt), **clock.seconds, **self._coefficients()}
        self._call_callbacks("on_policy_updated", metrics)
        self.log_dict(metrics, batch_size=len(rollouts))
        return metrics

    @torch.no_grad()
    def make_experience(self, rollouts: Rollouts) -> Experience:
        """Adds old and reference log-probs, values and reward models' scores, then advantages. Hook 1 of 5.

        Args:
            rollouts: B scored rows.

        Returns:
            the same rows with log-probs, values, advantages and the metrics of the rollout.
        """
        reduction = self._all_ranks
        self._note_missing_routes(rollouts)
        self.score(rollouts)
        raw_rewards, sums = rollouts.rewards, MetricSums()
        self._call_callbacks("on_rollout_scored", rollouts)
        experience = start_experience(rollouts)
        self._evaluate_models(experience, rollouts, reduction)
        token_rewards = self._token_rewards(experience, rollouts, sums)
        advantages, experience.returns = self.compute_advantages(experience, token_rewards, rollouts)
        self._finish_advantages(experience, advantages, rollouts, reduction, sums)
        sums.add(evaluation.rollout_metrics(rollouts, experience, raw_rewards))
        experience.metrics = evaluation.add_std(reduction.means(sums))
        experience.metrics |= evaluation.critic_metrics(experience, reduction.sum)
        self._call_callbacks("on_experience_made", experience)
        return experience

    def _note_missing_routes(self, rollouts: Rollouts) -> None:
        """Says, once, that the experts which the engine chose are not replayed, and why."""
        if self._routes_noted or any(routes is not None for routes in rollouts.routes):
            return
        self._routes_noted = True
        if self.actor.has_experts:
            log.warning(
                "Routing replay is off: the policy is a mixture of experts, but its samples came without the experts "
                "that the engine chose for them, so the trainer's routers choose for themselves. TransformersEngine "
                "records them, VLLMEngine on GPUs with engine_args.enable_return_routed_experts=true; servers do not."
            )

    def score(self, rollouts: Rollouts) -> None:
        """Adds the rewards of `reward_models` to `rollouts.rewards` and `reward_parts`, in place.

        A row that no function scored then has the models' rewards only; one whose trajectory failed keeps none. A model
        with `labels` says nothing about rows of others.
        """
        for spec in self.reward_model_specs:
            model: Any = self.reward_models[spec.name]
            scores = model.score(rollouts, self.micro_batch_tokens)[last_rows(rollouts.trajectory_ids)]
            failed = rollouts.failed
            if (applies := spec.applies(rollouts.columns)) is not None:
                failed = [bad or not its for bad, its in zip(failed, applies, strict=True)]
            scores = scores.masked_fill(torch.tensor(failed, device=scores.device), float("nan"))
            rollouts.reward_parts[spec.name], rollouts.reward_weights[spec.name] = scores, spec.weight
            total = rollouts.rewards.nan_to_num(0.0) + spec.weight * scores
            rollouts.rewards = torch.where(scores.isfinite(), total, rollouts.rewards)

    def _evaluate_models(self, experience: Experience, rollouts: Rollouts, reduction: Reduction) -> None:
        """Old and reference log-probs and values, each only where something uses it."""

        def batched(model: Any, forward: Callable[[Any], dict[str, Tensor]]) -> dict[str, Tensor]:
            return batched_forward(forward, experience, self.micro_batch_tokens, reduction.max, model.layout)

        actor, critic, reference = self.actor, self.critic, self.reference
        shared = actor.value_head is not None
        updates = self.ppo_epochs * self._count_minibatches(experience)
        filtered, replaced = self.top_entropy_fraction < 1, self.loss.replaces_old_logprobs
        read = any(callback.reads_old_logprobs for callback in self._rl_callbacks)
        if shared or filtered or (not replaced and (read or updates > 1 or isinstance(self.kl, KLInReward))):
            out = batched(actor, lambda x: policy_forward(actor, x, values=shared, entropy=filtered))
            experience.old_logprobs = out["logprobs"]
            experience.values, experience.entropy = out.get("values"), out.get("entropy")
        if replaced:
            experience.old_logprobs = experience.engine_logprobs
        if critic is not None:
            experience.values = batched(critic, lambda x: {"values": value_forward(critic, x)})["values"]
        if self.kl is not None:
            with actor.as_reference() if reference is None else nullcontext():
                base = reference or actor
                # The reference's routers choose themselves: what the policy's chose is no part of its distribution.
                experience.ref_logprobs = batched(base, lambda x: policy_forward(base, x, routes=()))["logprobs"]

    def _token_rewards(self, experience: Experience, rollouts: Rollouts, sums: MetricSums) -> Tensor:
        """Clips the rewards, writes them and `valid` into the experience; (B, T) with a KL in the reward inside."""
        rewards, bound = rollouts.rewards, self.reward_clip
        if bound is not None:
            clipped = (rewards.abs() > bound).float()
            sums.add({"reward/clip_fraction": clipped[first_rows(rollouts.trajectory_ids)]})
            rewards = rewards.clamp(-bound, bound)
        experience.valid = rewards.isfinite()
        experience.rewards = torch.where(experience.valid, rewards, 0.0)
        old, ref = experience.old_logprobs, experience.ref_logprobs
        if isinstance(self.kl, KLInReward) and old is not None and ref is not None:
            return shape_rewards(experience, rollouts.turn_rewards, self.kl(old, ref), self.kl.coef)
        return shape_rewards(experience, rollouts.turn_rewards, None)

    def compute_advantages(
        self, experience: Experience, token_rewards: Tensor, rollouts: Rollouts
    ) -> tuple[Tensor, Tensor | None]:
        """Advantages and returns from per-token rewards. Hook 2 of 5.

        Args:
            experience: rows with `values` where there is a critic.
            token_rewards: (B, T) float32, the score on the last response token, the KL penalty already inside.
            rollouts: the same rows, for estimators that look at each reward function on its own.

        Returns:
            advantages (B, T), 0 off the mask; returns (B, T) or None.
        """
        layout = TrajectoryLayout(experience.trajectory_ids, experience.response_mask)
        of_turns: dict[str, Tensor | None] = {}
        if self.advantage.needs_turns:
            ids = experience.turn_ids
            of_turns["turn_ids"] = None if ids is None else layout.join(ids)
        if self.advantage.needs_anchors:
            anchors = turn_anchors(rollouts)
            of_turns["anchors"] = None if anchors is None else layout.join(anchors)
        advantages, returns = self.advantage(
            layout.join(token_rewards),
            layout.mask,
            layout.join(experience.group_ids),
            values=None if experience.values is None else layout.join(experience.values),
            valid=layout.join(experience.valid),
            reward_parts={name: layout.join(part) for name, part in rollouts.reward_parts.items()},
            part_weights=rollouts.reward_weights,
            all_sum=self.all_sum,
            **of_turns,
        )
        return layout.split(advantages), None if returns is None else layout.split(returns)

    def _finish_advantages(
        self, experience: Experience, advantages: Tensor, rollouts: Rollouts, reduction: Reduction, sums: MetricSums
    ) -> None:
        """Takes rows without reward and truncated ones out, whitens, clips and filters advantages, and writes them.

        A token that the entropy filter leaves out gets advantage 0, so that its policy loss is 0 and it still counts
        in the normaliser. Statistics of the whitening are those of all trained tokens.
        """
        trained = experience.valid & ~rollouts.truncated if self.mask_truncated else experience.valid
        mask = experience.response_mask = experience.response_mask & trained.unsqueeze(1)
        advantages, metrics = whiten_and_clip(
            advantages, experience, whiten=self.whiten_advantages, clip=self.advantage_clip, all_sum=reduction.sum
        )
        sums.add(metrics, mask)
        if experience.entropy is not None:
            keep = top_entropy_mask(experience.entropy, mask, self.top_entropy_fraction, all_sum=reduction.sum)
            sums.add({"policy/top_entropy": experience.entropy[keep]})
            advantages = advantages * keep
        experience.advantages = advantages
        layout = TrajectoryLayout(experience.trajectory_ids, mask)
        sums.add({"advantage/nonzero_fraction": (layout.join(advantages) != 0).any(1).float()})

    def minibatches(self, experience: Experience) -> Iterator[Experience]:
        """`ppo_epochs` x mini-batches, the same number on every rank. Hook 3 of 5.

        Groups stay together where the mini-batch of a rank holds a multiple of the group size.
        """
        count = self._count_minibatches(experience)
        for epoch in range(self.ppo_epochs):
            yield from cut_minibatches(
                experience, count, seed=random_states.derived_seed(self.seed, self.policy_version, epoch)
            )

    def _count_minibatches(self, experience: Experience) -> int:
        """Optimizer steps per pass over a rollout. Collective where `minibatch_size` is given."""
        size, ranks = self.minibatch_size, self.trainer.world_size
        if size is None:
            return 1
        if size % ranks:
            raise ValueError(
                f"minibatch_size={size} counts sequences over all ranks and cannot be shared by {ranks}: take a "
                f"multiple of {ranks}."
            )
        own = len(experience.trajectory_ids.unique())
        total = int(self.all_sum(torch.tensor(float(own))))
        if total % size:
            raise ValueError(
                f"minibatch_size={size} does not divide the rollout's {total} sequences (prompts x group size, over "
                f"all ranks): take a divisor of {total}, or null for one update per epoch."
            )
        return total // size

    def normalized(self, minibatch: Experience) -> Experience:
        """The mini-batch with what its summed losses are divided by, counted over all ranks. Collective."""
        mask, ptx = minibatch.response_mask, minibatch.supervised
        learnt = mask.new_zeros(()) if ptx is None else ptx.response_mask.sum()
        count = self.aggregation.count(TrajectoryLayout(minibatch.trajectory_ids, mask).mask)
        counts = torch.stack([count.double(), mask.sum().double(), learnt.double()])
        ranks = self.trainer.world_size
        counts = self.all_sum(counts)
        policy, tokens, supervised = (max(x, 1.0) / ranks for x in counts.tolist())
        ptx = None if ptx is None else replace(ptx, normalizer=supervised)
        trained = int(counts[1] + counts[2])
        return replace(minibatch, normalizer=policy, token_normalizer=tokens, num_trained=trained, supervised=ptx)

    def micro_batches(self, minibatch: Experience) -> Iterator[Any]:
        """Cuts a mini-batch by tokens; gradients are reduced over ranks in the last one.

        Supervised rows come first, since DDP wants every trained model in the backward that reduces.

        Args:
            minibatch: rows of one optimizer step, with normalizers.
        """
        reduction = self._all_ranks
        layout = TrajectoryLayout(minibatch.trajectory_ids, minibatch.response_mask)
        minibatch = replace(minibatch, loss_weights=layout.split(self.aggregation.weights(layout.mask)))
        skip = self._zero_rows_are_free
        budget, widest, micros = self.micro_batch_tokens, widest_layout(*self._trained_models), list[Any]()
        if minibatch.supervised is not None:
            micros += cut_micro_batches(minibatch.supervised, budget, reduction.max, layout=widest)
        micros += cut_micro_batches(
            minibatch,
            budget,
            reduction.max,
            skip_zero=skip,
            whole_trajectories=self.loss.needs_whole_trajectories,
            layout=widest,
        )
        for i, micro in enumerate(micros):
            last = i == len(micros) - 1
            with strategies.backward_scope(self.trainer.strategy, self._trained_models, last=last):
                yield micro

    @property
    def _trained_models(self) -> list[PolicyModel | ValueModel]:
        return [model for model in (self.actor, self.critic) if model is not None]

    @property
    def _zero_rows_are_free(self) -> bool:
        """Whether a row whose advantages are all 0 has no gradient and no reader, so that it need not be run.

        What a subclass does in a `compute_loss` of its own is not known, so there all rows are run.
        """
        if type(self).compute_loss is not PPOLightningModule.compute_loss:
            return False
        terms = (self.critic_spec is not None, isinstance(self.kl, KLInLoss), self.entropy_coef, self.aux_loss_coef)
        read = any(callback.reads_entropy for callback in self._rl_callbacks)
        return not any(terms) and not read and self.loss.zero_advantage_is_zero_loss

    def compute_loss(self, minibatch: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        """The joint loss of actor and critic on one micro-batch. Hook 4 of 5; pure given the micro-batch.

        Args:
            minibatch: rows with `normalizer`, `token_normalizer` and `loss_weights` of their mini-batch, which make
                micro-batch losses add up.

        Returns:
            scalar with graph; metrics, (B, T) ones are averaged over the response mask.
        """
        assert minibatch.loss_weights is not None, "weights are those of the whole mini-batch, see `micro_batches`"
        mask, critic = minibatch.response_mask, self.critic_spec
        shared = self.actor.value_head is not None
        out = policy_forward(self.actor, minibatch, entropy=True, values=shared, **self._also_wanted(minibatch))
        logprobs, entropy = out["logprobs"], out["entropy"]
        old = logprobs.detach() if minibatch.old_logprobs is None else minibatch.old_logprobs
        token_loss, metrics = self._policy_loss(out, old, minibatch)
        metrics = {**metrics, "loss/policy": token_loss, "policy/entropy": entropy}
        if isinstance(self.kl, KLInLoss) and minibatch.ref_logprobs is not None:
            penalty = self.kl(logprobs, old, minibatch.ref_logprobs)
            token_loss = token_loss + self.kl.coef * penalty
            metrics["loss/kl"] = penalty
            metrics["kl/ref"] = old - minibatch.ref_logprobs
        if self.entropy_coef:
            token_loss = token_loss - self.entropy_coef * entropy
        loss = (minibatch.loss_weights * token_loss).sum() / minibatch.normalizer
        if self.in_critic_warmup:
            loss = loss * 0.0  # keeps the graph: every rank and every wrapper sees the same backward
        if critic is not None and minibatch.values is not None and minibatch.returns is not None:
            values = out["values"] if self.critic is None else value_forward(self.critic, minibatch)
            value_loss, clipped = clipped_value_loss(values, minibatch.values, minibatch.returns, mask, critic.clip)
            loss = loss + critic.loss_coef * value_loss.sum() / minibatch.token_normalizer
            metrics |= {"loss/value": value_loss, "value/clip_fraction": clipped}
        if self.aux_loss_coef and "aux_loss" in out:
            loss = loss + self.aux_loss_coef * out["aux_loss"] * mask.sum() / minibatch.token_normalizer
            metrics["loss/aux"] = out["aux_loss"]
        return loss, metrics

    def _also_wanted(self, rows: Experience) -> dict[str, Any]:
        """Further arguments of the actor's forward, for losses of subclasses."""
        return {}

    def _policy_loss(self, out: dict[str, Tensor], old: Tensor, rows: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        """(B, T) token losses from the actor's output; losses over whole responses get a trajectory as one row."""
        layout = TrajectoryLayout(rows.trajectory_ids, rows.response_mask, rows.on_host("trajectory_ids"))
        answer = self.loss(
            layout.join(out["logprobs"]),
            layout.join(old),
            layout.join(rows.advantages),
            layout.mask,
            engine_logprobs=layout.join(rows.engine_logprobs),
        )
        loss, metrics = self._refuse_other_losses(answer, layout.mask)
        moved = {name: layout.split(x) if x.shape == layout.mask.shape else x for name, x in metrics.items()}
        return layout.split(loss), moved

    def _refuse_other_losses(self, answer: Any, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What the loss answered, if it is what `PolicyLoss` says; a scalar would be weighed as if it were tokens."""
        name = f"loss={type(self.loss).__name__}"
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            raise ValueError(f"{name}: it must return two things, (B, T) token losses and a dictionary of metrics.")
        loss, metrics = answer
        if not isinstance(loss, Tensor) or loss.shape != mask.shape:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"{name}: it returned {shape} for {tuple(mask.shape)} tokens: give a loss per token, not summed up; "
                "`aggregation` does that."
            )
        for metric, value in metrics.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name}: its metric {metric!r} is a {type(value).__name__}: give a tensor, (B, T).")
        return loss, metrics

    def compute_ptx_loss(self, rows: SupervisedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The supervised loss of one micro-batch of rows, `ptx_coef` times -log pi summed over `normalizer`."""
        loss = -policy_forward(self.actor, rows)["logprobs"]
        weight = 0.0 if self.in_critic_warmup else self.ptx_coef
        return weight * loss.sum() / rows.normalizer, {"loss/ptx": loss}

    def apply_gradients(self, *, finite: bool) -> dict[str, Tensor | float]:
        """Clips, steps and schedules, or skips on all ranks together when something is not finite. Hook 5 of 5.

        Args:
            finite: whether this rank's losses of the mini-batch were all finite.

        Returns:
            `optim/skipped_updates` (0 or 1), `optim/lr_*`, `optim/grad_norm` of a step that was taken, and with
            float16 autocast `optim/loss_scale`, by which the losses were multiplied.

        Raises:
            RuntimeError: `max_skipped_updates` updates in a row were skipped.
        """
        strategy, optimizer = self.trainer.strategy, self._optimizer
        scaler = strategies.loss_scaler(self.trainer.precision_plugin)
        scale = 1.0 if scaler is None else scaler.get_scale()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        norm = strategies.clip_gradients(strategy, trained, self.max_grad_norm, scale)
        overflow = norm is not None and not bool(torch.isfinite(norm))
        lost, overflow = self._all_ranks.max(torch.tensor([float(not finite), float(overflow)])).bool().tolist()
        skip = lost or overflow
        metrics: dict[str, Tensor | float] = self._learning_rates()
        if not skip:
            with strategies.frozen_group(optimizer, "actor") if self.in_critic_warmup else nullcontext():
                optimizer.step()
            norm, skip = strategies.after_step(strategy, norm)
        if not skip:
            schedulers: Any = self.lr_schedulers() or []
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                scheduler.step()
        elif scaler is not None:
            strategies.lower_scale(scaler)
        self._drop_gradients(used=not skip)
        self._count_skips(skip, norm, searching=scale > 1 and not lost)
        if scaler is not None:
            metrics["optim/loss_scale"] = scale
        if norm is not None and not skip:
            metrics["optim/grad_norm"] = norm
        return {"optim/skipped_updates": float(skip), **metrics}

    def _skip_empty_update(self) -> dict[str, Tensor | float]:
        """Skips an update that trains no token on any rank: momentum and weight decay would move the weights.

        The metric tells of it; it is not held against the run.
        """
        rank_zero_warn(
            "An update was skipped: none of its tokens is left to train (no rewards, or all masked). "
            "optim/skipped_updates counts such updates."
        )
        self._drop_gradients(used=False)
        return {"optim/skipped_updates": 1.0, **self._learning_rates()}

    def _drop_gradients(self, *, used: bool) -> None:
        if not used:
            strategies.discard_gradients(self.trainer.strategy)
        self._optimizer.zero_grad()

    def _learning_rates(self) -> dict[str, Tensor | float]:
        groups = self._optimizer.param_groups
        names = ["policy" if (name := group.get("name", "actor")) == "actor" else name for group in groups]
        return {f"optim/lr_{name}": float(group["lr"]) for name, group in zip(names, groups, strict=True)}

    @property
    def _optimizer(self) -> Any:
        return self.optimizers()

    def _count_skips(self, skip: bool, norm: Tensor | None, *, searching: bool) -> None:
        """Counts a skipped update; one after which a smaller loss scale is tried is not held against the run."""
        if not (skip and searching):
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
        self.num_skipped_updates += skip
        if self.skipped_in_a_row >= self.max_skipped_updates:
            raise RuntimeError(
                f"{self.skipped_in_a_row} updates in a row had a non-finite loss or gradient norm (the last norm: "
                f"{None if norm is None else norm.item()}). Lower the learning rate, check the scale of the rewards, "
                "or raise max_skipped_updates. The weights are those of the last finite update."
            )

    def _all_finite(self) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=self.device)

    def _coefficients(self) -> dict[str, float]:
        """The coefficients in use, which callbacks may move."""
        kl = {} if self.kl is None else {"kl/coef": float(self.kl.coef)}
        return kl | ({"policy/entropy_coef": float(self.entropy_coef)} if self.entropy_coef else {})

    # ---- evaluation --------------------------------------------------------------------------------------------

    def validation_step(self, rollouts: Rollouts, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds one batch of evaluation rollouts; rows that only keep an idle rank busy do not count."""
        self.score(rollouts)
        if not rollouts.filler:
            self._eval_sums.add(evaluation.eval_metrics(rollouts, self.success_reward))

    def on_validation_epoch_end(self) -> None:
        """Logs `eval/*`, exact means over all rows or groups and ranks."""
        sums, self._eval_sums = self._eval_sums, MetricSums()
        self.log_dict(self._all_ranks.means(sums))

    def test_step(self, rollouts: Rollouts, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As `validation_step`, for `lightrl test`."""
        self.validation_step(rollouts, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """As `on_validation_epoch_end`."""
        self.on_validation_epoch_end()

    def predict_step(self, rollouts: Rollouts, batch_idx: int) -> list[dict[str, Any]]:
        """One record per completion: prompt, completion, rewards, and the row's columns."""
        self.score(rollouts)
        return evaluation.records(rollouts, getattr(self.trainer.datamodule, "tokenizer", None))  # type: ignore[attr-defined]

    # ---- what callbacks and data modules read ------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps behind the actor's weights; names them for engines."""
        return int(self.trainer.global_step)

    @property
    def needs_groups(self) -> bool:
        """Whether the advantage compares the attempts at one prompt."""
        return self.advantage.needs_groups

    def refuse_group_size(self, size: int) -> None:
        """Refuses groups that are too small for the advantage."""
        self.advantage.refuse_group_size(size)

    @property
    def compares_engine_logprobs(self) -> bool:
        """Whether the loss, or the one that `setup` will wrap around it, reads the engine's log-probs."""
        return self.loss.reads_engine_logprobs or self._corrects_off_policy

    @property
    def needs_rewards(self) -> bool:
        """Whether it learns nothing from completions that nothing scores."""
        return True

    @property
    def scores_rollouts(self) -> bool:
        """Whether there are reward models."""
        return bool(self.reward_model_specs)

    @property
    def in_critic_warmup(self) -> bool:
        """Whether the actor is still frozen."""
        return self.critic_spec is not None and (
            self.trainer.fit_loop.total_batch_idx < self.critic_spec.warmup_rollouts
        )

    def set_kl_coef(self, coef: float) -> None:
        """Changes the coefficient of the KL penalty, from the next rollout on.

        Raises:
            ValueError: there is no KL penalty.
        """
        if self.kl is None:
            raise ValueError("set_kl_coef with kl=None: there is no KL term. Set kl (KLInReward or KLInLoss).")
        self.kl.coef = coef

    def set_entropy_coef(self, coef: float) -> None:
        """Changes the weight of the entropy bonus, from the next rollout on."""
        self.entropy_coef = coef

    def named_policy_weights(self, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every actor parameter, LoRA merged, one at a time, or of trained ones.

        Collective under FSDP2 and ZeRO-3: every rank iterates to the end. Tied parameters come once.
        """
        gather = strategies.gather_parameter(self._strategy())
        return named_hf_weights(self.actor, gather, trained_only=trained_only)

    @property
    def trained_model(self) -> tuple[PolicyModel, ModelSpec]:
        """The actor."""
        return self.actor, self.actor_spec

    def policy_adapter(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
        """The actor's LoRA adapter in peft's format: (name, full tensor) one at a time, and its configuration."""
        assert self.actor_spec.lora is not None, "only an actor with LoRA has an adapter"
        gather = strategies.gather_parameter(self._strategy())
        return named_adapter_weights(self.actor, gather), adapter_config(self.actor, self.actor_spec.lora)

    @torch.no_grad()
    def token_logprobs(self, token_ids: Tensor, routes: Sequence[Routes | None] = ()) -> Tensor:
        """See `RolloutLearner.token_logprobs`."""
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        response = mask.clone()
        response[:, 0] = False
        with self.trainer.precision_plugin.forward_context():
            logprobs: Tensor = self.actor(token_ids, mask, response, routes=routes).logprobs
        return logprobs

    @torch.no_grad()
    def evaluate_policy(self, rows: Experience) -> dict[str, Tensor]:
        """`logprobs` and `entropy` of the current policy, for callbacks. Collective.

        Args:
            rows: B rows of a rollout.

        Returns:
            each (B, T) float32, 0 off the response mask.
        """
        actor, reduction = self.actor, self._all_ranks
        return batched_forward(
            lambda x: policy_forward(actor, x, entropy=True), rows, self.micro_batch_tokens, reduction.max, actor.layout
        )

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""
        return self._all_ranks.sum(tensor)

    def all_max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks."""
        return self._all_ranks.max(tensor)

    @property
    def _all_ranks(self) -> Reduction:
        return Reduction(self.trainer.strategy, self.device)

    def _call_callbacks(self, hook: str, payload: Any) -> None:
        """Calls one of LightRL's own hooks on the callbacks that take part in training."""
        for callback in self._rl_callbacks:
            getattr(callback, hook)(self.trainer, self, payload)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What cannot be loaded from where it came from.

        Dropped: the reward models; the reference, unless a callback moves it; and frozen parameters of actor and critic
        (the base of a LoRA run, `freeze`d layers), unless they were drawn at random, so that nothing else has them.
        """
        state = super().state_dict(*args, **kwargs)
        moves = any(callback.moves_reference for callback in self._rl_callbacks)
        frozen: set[str] = set()
        if not self.actor_spec.random_init:
            named = self.named_parameters(remove_duplicate=False)
            frozen = {name for name, parameter in named if not parameter.requires_grad}
        if moves:
            frozen = {name for name in frozen if not name.startswith("reference.")}
        dropped = ("reward_models.",) if moves else ("reward_models.", "reference.")
        return {name: value for name, value in state.items() if not name.startswith(dropped) and name not in frozen}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds how the models are built, the counters, and the random generators' states. Collective."""
        models = {"actor": self.actor_spec}
        if self.critic_spec is not None and not self.critic_spec.shared:
            models["critic"] = self.critic_spec.model or self.actor_spec
        checkpoint["lightrl"] = {
            **self._description(models),
            "seed": self.seed,
            "num_skipped_updates": int(self.num_skipped_updates),
            "skipped_in_a_row": int(self.skipped_in_a_row),
            "rng": random_states.collect(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores them, after a check that the checkpoint is one of this module's.

        Raises:
            ValueError: it was written by another class or format, or lacks parameters that are trained here.
        """
        super().on_load_checkpoint(checkpoint)
        if self.trainer.training:
            stored = checkpoint["lightrl"]
            counts = {"seed": int, "num_skipped_updates": int, "skipped_in_a_row": int, "rng": list}
            require_entries(stored, counts, "lightrl")
            self.seed = stored["seed"]
            self.num_skipped_updates = stored["num_skipped_updates"]
            self.skipped_in_a_row = stored["skipped_in_a_row"]
            self._restored_rng = stored["rng"]

    def on_train_start(self) -> None:
        """Puts the random generators back as late as possible, so that set-up does not advance them."""
        if self._restored_rng is not None:
            random_states.restore(self._restored_rng)
            self._restored_rng = None


class Stopwatch:
    """Adds up seconds by name.

    Attributes:
        seconds: metric name -> seconds so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measures(self, name: str) -> Iterator[None]:
        """Within it time counts under that name."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

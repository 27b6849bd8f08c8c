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
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightrl.algorithms import evaluation
from lightrl.algorithms.batches import (
    batched_forward,
    checked_loss,
    cut_micro_batches,
    cut_minibatches,
    one_per_token,
    policy_forward,
    shape_rewards,
    turn_anchors,
    value_forward,
    whiten_and_clip,
    widest_layout,
)
from lightrl.algorithms.checks import check_arguments, check_trainer
from lightrl.algorithms.hooks import RLCallback, may_move_reference, reads_all_rows, rl_callbacks
from lightrl.algorithms.saving import SavesPretrained
from lightrl.algorithms.schedule import (
    LRSchedule,
    NamedSchedule,
    make_optimizer,
    set_named_rates,
    with_schedule,
)
from lightrl.algorithms.settings import CriticSpec, ExtraLosses, Shaping, Updates
from lightrl.algorithms.shaping import RewardCopy, copy_rewards, credits_that_miss
from lightrl.compat.lightning import forget_step_metrics, run_seed
from lightrl.distributed import states, strategies
from lightrl.distributed.reduction import MetricSums, Reduction
from lightrl.distributed.states import fingerprint
from lightrl.models.loading import require_model, return_router_logits
from lightrl.models.lora import adapter_config, keep_reference, named_adapter_weights, named_hf_weights
from lightrl.models.policy import PolicyModel, ValueModel
from lightrl.models.reward import RewardModel, RewardModelSpec, require_reward_model
from lightrl.models.spec import ModelSpec
from lightrl.objectives.aggregation import Aggregation, TokenMean
from lightrl.objectives.estimators import GAE, AdvantageEstimator, AdvantageInput
from lightrl.objectives.kl import KLInLoss, KLInReward, KLPenalty
from lightrl.objectives.off_policy import AutomaticCorrection
from lightrl.objectives.ppo_clip import LossInput, PolicyLoss, PPOClip
from lightrl.objectives.trajectories import TrajectoryLayout, first_rows, last_rows
from lightrl.ops.entropy import top_entropy_mask
from lightrl.ops.losses import clipped_value_loss
from lightrl.records import Advantages, Experience, MicroBatch, ModelOutputs, Rollouts, Routes, SupervisedBatch
from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.rollout.learner import RolloutLearner

STEP = ("training_step", "micro_batches", "compute_loss", "forward_policy", "policy_loss")
"""Hooks between mini-batches and the gradient."""

WEIGHTS = "lightrl/weights"
"""Name under which the weights of tokens travel with their rows into micro-batches."""

log = logging.getLogger(__name__)


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
            live model, which is trained itself: `ModelSpec.of(model, tokenizer)`.
        critic: where values come from; None builds no critic (needs an advantage estimator that uses none).
        reference: model of the KL term; None takes a frozen copy of the actor's model (with LoRA: the actor without
            its adapter, or with the one in `lora.adapter`). Nothing is built where `kl` is None.
        reward_models: sequence-classification models that add to the rewards of the data module's functions. They
            read the last row of a trajectory.
        advantage: estimator of advantages and returns.
        loss: per-token policy loss.
        aggregation: how token losses become one number.
        kl: penalty against the reference, in the reward or in the loss, with its coefficient; None for none.
        ppo_epochs: Passes over each rollout.
        whiten_advantages: Shift and scale advantages to mean 0, std 1 over all response tokens of the rollout.
        updates: Size of mini-batches and micro-batches, and bounds on updates; see `Updates`.
        shaping: Clips of rewards and advantages, and which tokens are trained; see `Shaping`.
        extra_losses: Weights of entropy bonus, supervised loss, and load-balancing loss; see `ExtraLosses`.
        optimizer: called with the parameter groups `actor` and `critic`.
        lr_scheduler: `{name: cosine, warmup: 0.03}` (`LRSchedule`, over all updates of the run), or what is called
            with the optimizer; stepped after every update. None keeps the rate constant.
        success_reward: a completion counts as solved in `eval/pass@k` from this reward on.

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
        critic: CriticSpec | None = CriticSpec(),
        reference: str | ModelSpec | None = None,
        reward_models: list[RewardModelSpec] | None = None,
        *,
        advantage: AdvantageEstimator = GAE(),
        loss: PolicyLoss = PPOClip(),
        aggregation: Aggregation = TokenMean(),
        kl: KLPenalty | None = KLInReward(coef=0.05),
        ppo_epochs: int = 2,
        whiten_advantages: bool = True,
        updates: Updates = Updates(),
        shaping: Shaping = Shaping(),
        extra_losses: ExtraLosses = ExtraLosses(),
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-6, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | LRSchedule | None = None,
        success_reward: float = 1.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # frozen models stay out of checkpoints; `state_dict` says why
        self.actor_spec = ModelSpec.given(actor)
        self.critic_spec = critic
        self.reference_spec = None if reference is None else ModelSpec.given(reference, argument="reference")
        self.reward_model_specs = list(reward_models or [])
        self.advantage = advantage
        self.loss = loss
        self.aggregation = aggregation
        self.kl = copy(kl)  # callbacks move its coefficient
        self.ppo_epochs = ppo_epochs
        self.whiten_advantages = whiten_advantages
        self.updates = updates
        self.shaping = shaping
        self.extra_losses = extra_losses
        self.entropy_coef = extra_losses.entropy_coef  # callbacks move it
        self.ptx_coef = extra_losses.ptx_coef
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.success_reward = success_reward
        self.num_skipped_updates = 0
        self.skipped_in_a_row = 0
        self.seed = run_seed()
        self._routes_noted = False
        self._restored_rng: list[Any] | None = None
        self._eval_sums = MetricSums()
        self._logged: set[str] = set()  # in the step before
        self._updates_made = 0  # of the rollout at hand
        self._missed_credits: frozenset[str] = frozenset()
        self._transferred: tuple[Any, RewardCopy | None] = None, None
        self._stale_loss: PolicyLoss | None = None
        self._reference_at_start: int | None = None
        self._frozen_at_start: dict[str, int] | None = None
        check_arguments(self)

    # ---- set-up ------------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Any]:
        """Lightning's first call: rejects Trainer options that do not go with manual optimization and rollouts."""
        check_trainer(self, self.trainer)
        return super().configure_callbacks()

    def setup(self, stage: str) -> None:
        """Refuses what cannot work, before any model is loaded, and collects what the callbacks declare."""
        strategies.refuse_unsupported(self.trainer.strategy, str(self.trainer.precision))
        if self.extra_losses.aux_loss_coef and strategies.context_group(self.trainer.strategy) is not None:
            raise ValueError(
                f"aux_loss_coef={self.extra_losses.aux_loss_coef} with context_parallel_size above 1: a rank sees "
                "routers of a part of the tokens only. Set either to its default."
            )
        strategies.set_gradient_clipping(self.trainer.strategy, self.updates.max_grad_norm)
        require_model(self.actor_spec)
        if self.reference_spec is not None:
            require_model(self.reference_spec)
        for spec in self.reward_model_specs:
            require_reward_model(spec)
        if stage == "fit" and self.kl is None and self.reference_spec is not None:
            rank_zero_warn(
                f"reference={self.reference_spec.path!r} with kl=None: nothing compares with a reference, so it is not "
                "loaded. Set kl, or leave the reference out."
            )
        rl_callbacks(self._callbacks())
        if stage == "fit" and self._corrects_off_policy and not isinstance(self.loss, AutomaticCorrection):
            log.info("Samples come from older policies: OffPolicyCorrection weights %s.", type(self.loss).__name__)
            self.loss = AutomaticCorrection(self.loss)

    @property
    def _corrects_off_policy(self) -> bool:
        """Whether `setup` will wrap the loss, because the data module samples ahead of the update."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        stale = isinstance(data, RolloutDataModule) and data.staleness > 0
        return stale and self.updates.off_policy_correction and self.loss.engine_use in ("unused", None)

    def build_models(self, in_shards: bool = False) -> None:
        """Sets actor, critic, reference, and reward models; empty ones if ranks fill in their parts (`in_shards`)."""
        critic = self.critic_spec
        shared = critic is not None and critic.shared
        spec = self.actor_spec
        self.actor = PolicyModel.from_spec(spec, trainable=True, in_shards=in_shards, value_head=shared)
        if self.extra_losses.aux_loss_coef:
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

    def models(self) -> list[Any]:
        """The models that the strategy shards."""
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
        return with_schedule(optimizer, self.lr_scheduler_factory, self.schedule_position)

    def schedule_position(self) -> tuple[float, float]:
        """How far a learning-rate schedule by name is: (updates so far, updates of the whole run).

        Counted in rollouts, so that it holds for a `minibatches` that makes another number of updates: these share one
        rate. A run that ends at `max_steps` first counts its steps.

        Raises:
            ValueError: mini-batches of a data module whose rollouts have no known size.
        """
        trainer: Any = self.trainer
        data, each = trainer.datamodule, self.ppo_epochs
        if self.updates.minibatch_size is not None:
            if not isinstance(data, RolloutDataModule):
                raise ValueError(
                    f"lr_scheduler by name with minibatch_size={self.updates.minibatch_size}: how many updates a "
                    "rollout makes is known with RolloutDataModule only. Pass a scheduler class with its steps."
                )
            each *= max(data.prompts_per_rollout * data.group_size // self.updates.minibatch_size, 1)
        if trainer.train_dataloader is None:
            trainer.fit_loop.setup_data()
        epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
        steps = math.inf if trainer.max_steps == -1 else trainer.max_steps
        updates = trainer.num_training_batches * epochs * each
        if steps < updates:
            return float(trainer.global_step), float(steps)
        rollouts = trainer.current_epoch * trainer.num_training_batches + max(trainer.fit_loop.batch_idx, 0)
        return float(rollouts * each + min(self._updates_made, each - 1)), updates

    # ---- one rollout -------------------------------------------------------------------------------------------

    def note_rewards(self, rollouts: Rollouts) -> None:
        """See `RolloutLearner.note_rewards`."""
        self._transferred = rollouts, copy_rewards(rollouts)

    def training_step(self, rollouts: Rollouts, batch_idx: int) -> dict[str, float]:
        """Learns from one rollout and returns its metrics, reduced over ranks; callbacks read them as `outputs`."""
        clock, measured = Stopwatch(), MetricSums()
        with clock.measures("time/experience"):
            experience = self.make_experience(rollouts)
        with clock.measures("time/update"):
            self._updates_made = 0
            for minibatch in self.minibatches(experience):
                if self._updates_made and minibatch.old_logprobs is None and not self.loss.replaces_old_logprobs:
                    raise RuntimeError(
                        "A second update of a rollout without old_logprobs: a callback with reads_old_logprobs=False, "
                        "or a change of ppo_epochs after make_experience, made more than one. Set reads_old_logprobs."
                    )
                self._update(minibatch, measured)
                self._updates_made += 1
        measured.add(rollouts.metrics)
        metrics = {**experience.metrics, **self._all_ranks.means(measured), **clock.seconds, **self._coefficients()}
        self._call_callbacks("on_policy_updated", metrics)
        forget_step_metrics(self.trainer, self._logged - metrics.keys())
        self._logged = set(metrics)
        self.log_dict(metrics, batch_size=len(rollouts))
        return metrics

    def _update(self, minibatch: Experience, measured: MetricSums) -> None:
        """One optimizer step."""
        finite, trains = torch.ones((), dtype=torch.bool, device=self.device), False
        with strategies.optimizer_window(self.trainer.strategy, self._trained_models):
            for micro in self.micro_batches(minibatch):
                rows, trains = micro.rows, True
                if isinstance(rows, SupervisedBatch):
                    losses, metrics = self.compute_ptx_loss(rows)
                else:
                    losses, metrics = self.compute_loss(rows)
                loss = micro.total(losses, only="value" if self.in_critic_warmup else None)
                self.manual_backward(loss)
                finite &= torch.isfinite(loss.detach())  # read once per update, not per backward
                measured.add(metrics, rows.response_mask)
        measured.add(self.apply_gradients(finite=bool(finite)) if trains else self._skip_empty_update())

    # ---- hook 1: make_experience, and its parts in the order in which they run ---------------------------------

    @torch.no_grad()
    def make_experience(self, rollouts: Rollouts) -> Experience:
        """Scores a rollout, evaluates the models on it, and computes advantages.

        Its parts are hooks too, and run one after the other: `score`, `evaluate_models`, `compute_advantages`.
        Callbacks get the rollout after `score` and the experience at the end.

        Args:
            rollouts: B scored rows.

        Returns:
            The same rows with log-probs, values, advantages, and metrics of the rollout.
        """
        transferred, copied = self._transferred
        missed = credits_that_miss(copied, rollouts) if transferred is rollouts and copied else frozenset[str]()
        self._transferred = None, None
        copied = copy_rewards(rollouts)
        self.score(rollouts)
        missed |= credits_that_miss(copied, rollouts) & {"parts"}  # what it adds is of whole trajectories
        given = copy_rewards(rollouts)
        self._call_callbacks("on_rollout_scored", rollouts)
        self._missed_credits = missed | credits_that_miss(given, rollouts)
        self.note_weight_changes()  # since they sampled the rollout
        outputs = self.evaluate_models(rollouts)
        found = self.compute_advantages(rollouts, outputs)
        experience, sums = self._join(rollouts, outputs, found)
        sums.add(evaluation.rollout_metrics(rollouts, outputs, given.rewards))
        experience.metrics = evaluation.with_std(rollouts, given.rewards, sums, self._all_ranks.means)
        experience.metrics |= evaluation.critic_metrics(experience, self.all_sum)
        self._call_callbacks("on_experience_made", experience)
        return experience

    def score(self, rollouts: Rollouts) -> None:
        """Adds the rewards of `reward_models` to `rollouts.rewards` and `reward_parts`, in place.

        A row that no function scored then has the models' rewards only; one whose trajectory failed keeps none. A model
        with `labels` says nothing about rows of others.
        """
        for spec in self.reward_model_specs:
            model: Any = self.reward_models[spec.name]
            scores = model.score(rollouts, self.updates.micro_batch_tokens)[last_rows(rollouts.trajectory_ids)]
            failed = rollouts.failed
            if (applies := spec.applies(rollouts.columns)) is not None:
                failed = [bad or not its for bad, its in zip(failed, applies, strict=True)]
            scores = scores.masked_fill(torch.tensor(failed, device=scores.device), float("nan"))
            rollouts.reward_parts[spec.name], rollouts.reward_weights[spec.name] = scores, spec.weight
            total = rollouts.rewards.nan_to_num(0.0) + spec.weight * scores
            rollouts.rewards = torch.where(scores.isfinite(), total, rollouts.rewards)

    def evaluate_models(self, rollouts: Rollouts) -> ModelOutputs:
        """Runs policy, critic, and reference over a rollout.

        The policy's log-probs are skipped only if this class knows that they are not needed: exactly one update
        follows, so the update computes them itself. A subclass that overrides a hook, or a callback that does not
        declare `reads_old_logprobs = False`, gets them.
        """
        self._note_missing_routes(rollouts)
        actor, critic, reference = self.actor, self.critic, self.reference
        shared, filtered = actor.value_head is not None, self.shaping.top_entropy_fraction < 1
        outputs = ModelOutputs()
        if shared or filtered or self._needs_old_logprobs(rollouts):
            wanted = {"values": shared, "entropy": filtered}
            out = self.batched(actor, lambda x: policy_forward(actor, x, **wanted), rollouts)
            outputs = ModelOutputs(out["logprobs"], values=out.get("values"), entropy=out.get("entropy"))
        if self.loss.replaces_old_logprobs:
            outputs.old_logprobs = rollouts.engine_logprobs
        if critic is not None:
            outputs.values = self.batched(critic, lambda x: {"values": value_forward(critic, x)}, rollouts)["values"]
        if self.kl is not None:
            with actor.as_reference() if reference is None else nullcontext():
                base = reference or actor
                # The reference's routers choose themselves: what the policy's chose is no part of its distribution.
                out = self.batched(base, lambda x: policy_forward(base, x, routes=()), rollouts)
                outputs.ref_logprobs = out["logprobs"]
        return outputs

    def compute_advantages(self, rollouts: Rollouts, outputs: ModelOutputs) -> Advantages:
        """Advantages and returns from the rewards and the models' outputs.

        Args:
            rollouts: B scored rows.
            outputs: Of the models, with `values` if there is a critic.

        Returns:
            Advantages before whitening and clipping, and the targets of the critic.
        """
        rewards = rollouts.rewards
        if self.shaping.reward_clip is not None:
            rewards = rewards.clamp(-self.shaping.reward_clip, self.shaping.reward_clip)
        valid = rewards.isfinite()
        rewards = torch.where(valid, rewards, 0.0)
        layout = TrajectoryLayout(rollouts.trajectory_ids, rollouts.response_mask)
        token_rewards = shape_rewards(rollouts, rewards, valid, layout)
        if isinstance(self.kl, KLInReward) and outputs.old_logprobs is not None and outputs.ref_logprobs is not None:
            penalty = one_per_token("kl", self.kl, self.kl(outputs.old_logprobs, outputs.ref_logprobs), token_rewards)
            token_rewards = token_rewards - self.kl.coef * penalty * rollouts.response_mask
        anchors = turn_anchors(rollouts)
        given = AdvantageInput(
            layout.join(token_rewards),
            layout.mask,
            layout.join(rollouts.group_ids),
            values=None if outputs.values is None else layout.join(outputs.values),
            valid=layout.join(valid),
            reward_parts={name: layout.join(part) for name, part in rollouts.reward_parts.items()},
            part_weights=rollouts.reward_weights,
            turn_ids=None if rollouts.turn_ids is None else layout.join(rollouts.turn_ids),
            anchors=None if anchors is None else layout.join(anchors),
            all_sum=self.all_sum,
        )
        advantages, returns = self.advantage(given)
        self._check_credit(given)
        returns = None if returns is None else layout.split(returns)
        return Advantages(layout.split(advantages), returns, rewards, valid)

    def _check_credit(self, given: AdvantageInput) -> None:
        """Rejects a change of the rewards that the estimator, by what it has read, did not see."""
        credit = self.advantage.credit or given.credit
        if credit in self._missed_credits:
            change = "on_rollout_scored: a callback, or a hook before it, that changes rewards"
            self.advantage.refuse_shaped_rewards(change, credit)
            raise ValueError(
                "on_rollout_scored: a callback changed rollouts.reward_parts but not rollouts.rewards, which "
                f"advantage={type(self.advantage).__name__} reads. Change rollouts.rewards by the same amount."
            )
        if self.shaping.reward_clip is not None:
            self.advantage.refuse_shaped_rewards(f"reward_clip={self.shaping.reward_clip}", credit)
        if isinstance(self.kl, KLInReward) and credit == "parts":
            self.advantage.refuse_shaped_rewards("kl=KLInReward", credit)

    def _join(self, rollouts: Rollouts, outputs: ModelOutputs, found: Advantages) -> tuple[Experience, MetricSums]:
        """The experience: untrained rows off the mask, advantages whitened and clipped, tokens filtered by entropy."""
        reduction, sums = self._all_ranks, MetricSums()
        trained = found.valid & ~rollouts.truncated if self.shaping.mask_truncated else found.valid
        mask = rollouts.response_mask & trained.unsqueeze(1)
        advantages, metrics = whiten_and_clip(
            found.advantages,
            mask,
            whiten=self.whiten_advantages,
            clip=self.shaping.advantage_clip,
            all_sum=reduction.sum,
        )
        sums.add(metrics, mask)
        if self.shaping.reward_clip is not None:
            clipped = (rollouts.rewards.abs() > self.shaping.reward_clip).float()
            sums.add({"reward/clip_fraction": clipped[first_rows(rollouts.trajectory_ids)]})
        keep = None
        if self.shaping.top_entropy_fraction < 1 and outputs.entropy is not None:
            keep = top_entropy_mask(outputs.entropy, mask, self.shaping.top_entropy_fraction, all_sum=reduction.sum)
            sums.add({"policy/top_entropy": outputs.entropy[keep]})
        layout = TrajectoryLayout(rollouts.trajectory_ids, mask)
        sums.add({"advantage/nonzero_fraction": (layout.join(advantages) != 0).any(1).float()})
        names = (
            *("token_ids", "attention_mask", "group_ids", "trajectory_ids", "turn_ids", "engine_logprobs"),
            *("temperature", "supports", "routes", "inputs", "supervised"),
        )
        experience = Experience(
            **{name: getattr(rollouts, name) for name in names},
            response_mask=mask,
            advantages=advantages,
            returns=found.returns,
            rewards=found.rewards,
            valid=found.valid,
            old_logprobs=outputs.old_logprobs,
            ref_logprobs=outputs.ref_logprobs,
            values=outputs.values,
            entropy=outputs.entropy,
            in_policy_loss=keep,
            is_stale=self._is_stale(rollouts),
            token_extras=outputs.token_extras,
            row_extras=outputs.row_extras,
        )
        return experience.with_host_of(rollouts), sums

    # ---- hooks 2 and 3: what one optimizer step, and one forward and backward pass, get ------------------------

    def minibatches(self, experience: Experience) -> Iterator[Experience]:
        """`ppo_epochs` x mini-batches, each for one optimizer step, the same number on every rank.

        Groups stay together where the mini-batch of a rank holds a multiple of the group size.
        """
        count = self._count_minibatches(experience)
        for epoch in range(self.ppo_epochs):
            yield from cut_minibatches(
                experience, count, seed=states.derived_seed(self.seed, int(self.trainer.global_step), epoch)
            )

    def micro_batches(self, minibatch: Experience) -> Iterator[MicroBatch]:
        """Cuts a mini-batch by tokens, and weights its tokens so that the micro-batches' losses add up to its own.

        Gradients are reduced over ranks in the last one. Supervised rows come first, since DDP needs every trained
        model in the backward pass that reduces. Nothing comes if no rank has a token to train.
        """
        reduction, mask, ptx = self._all_ranks, minibatch.response_mask, minibatch.supervised
        layout = TrajectoryLayout(minibatch.trajectory_ids, mask)
        weights = layout.split(self._aggregation_weights(layout.mask))
        learned = mask.new_zeros(()) if ptx is None else ptx.response_mask.sum()
        counts = torch.stack([self._aggregation_count(layout.mask), mask.sum().double(), learned.double()])
        counts = reduction.sum(counts)
        if not bool(counts[1:].any()):
            return
        ranks = self.trainer.world_size
        policy, tokens, supervised = (ranks / max(x, 1.0) for x in counts.tolist())
        budget, widest, micros = (
            self.updates.micro_batch_tokens,
            widest_layout(*self._trained_models),
            list[MicroBatch](),
        )
        if ptx is not None:
            parts = cut_micro_batches(ptx, budget, reduction.max, layout=widest)
            micros += [MicroBatch(part, None, self.ptx_coef * supervised) for part in parts]
        weighed = replace(minibatch, token_extras={**minibatch.token_extras, WEIGHTS: weights * policy})
        for part in cut_micro_batches(
            weighed,
            budget,
            reduction.max,
            skip_zero=self._zero_rows_are_free(minibatch),
            whole_trajectories=self._loss_of(minibatch).needs_whole_trajectories,
            layout=widest,
        ):
            extras = dict(part.token_extras)
            micros.append(MicroBatch(replace(part, token_extras=extras), extras.pop(WEIGHTS), tokens))
        for i, micro in enumerate(micros):
            with strategies.backward_scope(self.trainer.strategy, self._trained_models, last=i == len(micros) - 1):
                yield micro

    # ---- hook 4: compute_loss, and its parts -------------------------------------------------------------------

    def compute_loss(self, rows: Experience) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The losses per token of actor and critic on one micro-batch.

        LightRL averages them over the whole mini-batch: `policy` (with KL and entropy bonus inside) by `aggregation`,
        every other loss as a mean over trained tokens. To add a loss of your own, add a name, or a (b, T) term to
        `policy`.

        Args:
            rows: b rows of the mini-batch.

        Returns:
            Losses, name -> (b, T) with graph; metrics, of which (b, T) ones are averaged over the response mask.
        """
        out = self.forward_policy(rows, entropy=True, values=self.actor.value_head is not None)
        logprobs, entropy = out["logprobs"], out["entropy"]
        policy, metrics = self.policy_loss(rows, out)
        metrics = {**metrics, "loss/policy": policy, "policy/entropy": entropy}
        if not self._updates_made and (rows.old_logprobs is None or self.loss.replaces_old_logprobs):
            gap = torch.where(rows.response_mask, rows.engine_logprobs - logprobs.detach(), 0.0)
            metrics |= {"kl/engine": gap, "kl/engine_gap_max": gap.abs()}
        if isinstance(self.kl, KLInLoss) and rows.ref_logprobs is not None:
            old = logprobs.detach() if rows.old_logprobs is None else rows.old_logprobs
            penalty = one_per_token("kl", self.kl, self.kl(logprobs, old, rows.ref_logprobs), logprobs)
            policy = policy + self.kl.coef * penalty
            metrics["loss/kl"] = penalty
            if rows.old_logprobs is None:
                metrics["kl/ref"] = old - rows.ref_logprobs
        if self.entropy_coef:
            policy = policy - self.entropy_coef * entropy
        losses = {"policy": policy}
        if self.critic_spec is not None and rows.values is not None and rows.returns is not None:
            values = out["values"] if self.critic is None else value_forward(self.critic, rows)
            mask, clip = rows.response_mask, self.critic_spec.clip
            value_loss, clipped = clipped_value_loss(values, rows.values, rows.returns, mask, clip)
            losses["value"] = self.critic_spec.loss_coef * value_loss
            metrics |= {"loss/value": value_loss, "value/clip_fraction": clipped}
        if self.extra_losses.aux_loss_coef and "aux_loss" in out:
            losses["aux"] = (self.extra_losses.aux_loss_coef * out["aux_loss"]).expand_as(logprobs)
            metrics["loss/aux"] = out["aux_loss"]
        return losses, metrics

    def forward_policy(self, rows: Experience, **wanted: Any) -> dict[str, Tensor]:
        """The actor's forward pass of `compute_loss`: `logprobs` and the `wanted` fields of `PolicyOutput`, (b, T)."""
        return policy_forward(self.actor, rows, **wanted)

    def policy_loss(self, rows: Experience, out: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """(b, T) policy losses and metrics from the actor's output, by `loss`; a trajectory is one row to it."""
        layout = TrajectoryLayout(rows.trajectory_ids, rows.response_mask, rows.on_host("trajectory_ids"))
        logprobs, loss = out["logprobs"], self._loss_of(rows)
        old = logprobs.detach() if rows.old_logprobs is None else rows.old_logprobs
        if rows.in_policy_loss is not None:  # the others keep their value and lose their gradient, whatever the loss
            logprobs = torch.where(rows.in_policy_loss, logprobs, logprobs.detach())
        given = LossInput(
            layout.join(logprobs),
            layout.join(old),
            layout.join(rows.advantages),
            layout.mask,
            engine_logprobs=layout.join(rows.engine_logprobs),
            ref_logprobs=None if rows.ref_logprobs is None else layout.join(rows.ref_logprobs),
            entropy=layout.join(out["entropy"]) if "entropy" in out else None,
        )
        token_loss, metrics = checked_loss(loss, loss(given), layout.mask)
        moved = {name: layout.split(x) if x.shape == layout.mask.shape else x for name, x in metrics.items()}
        return layout.split(token_loss), moved

    def compute_ptx_loss(self, rows: SupervisedBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The supervised losses of one micro-batch, -log pi of each token; `ptx_coef` weighs them."""
        loss = -policy_forward(self.actor, rows)["logprobs"]
        return {"ptx": loss}, {"loss/ptx": loss}

    # ---- hook 5 ------------------------------------------------------------------------------------------------

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
        norm = strategies.clip_gradients(strategy, trained, self.updates.max_grad_norm, scale)
        overflow = norm is not None and not bool(torch.isfinite(norm))
        lost, overflow = self._all_ranks.max(torch.tensor([float(not finite), float(overflow)])).bool().tolist()
        skip = lost or overflow
        set_named_rates(self.lr_schedulers())
        metrics: dict[str, Tensor | float] = self._learning_rates()
        if not skip:
            with strategies.frozen_group(optimizer, "actor") if self.in_critic_warmup else nullcontext():
                optimizer.step()
            norm, skip = strategies.after_step(strategy, norm)
        if not skip:
            schedulers: Any = self.lr_schedulers() or []
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                if not isinstance(scheduler, NamedSchedule):
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
        if self.skipped_in_a_row >= self.updates.max_skipped_updates:
            raise RuntimeError(
                f"{self.skipped_in_a_row} updates in a row had a non-finite loss or gradient norm (the last norm: "
                f"{None if norm is None else norm.item()}). Lower the learning rate, check the scale of the rewards, "
                "or raise max_skipped_updates. The weights are those of the last finite update."
            )

    def _coefficients(self) -> dict[str, float]:
        """The coefficients in use, which callbacks may move."""
        kl = {} if self.kl is None else {"kl/coef": float(self.kl.coef)}
        return kl | ({"policy/entropy_coef": float(self.entropy_coef)} if self.entropy_coef else {})

    # ---- what the step may leave out, and how ------------------------------------------------------------------

    def batched(self, model: Any, forward: Callable[[Any], dict[str, Tensor]], rows: Any) -> dict[str, Tensor]:
        """Runs `forward` over micro-batches of rows that `model` reads; (B, T) results, 0 off the response mask.

        Every rank calls `forward` equally often, as sharded models need.
        """
        return batched_forward(forward, rows, self.updates.micro_batch_tokens, self.all_max, model.layout)

    def _runs_own(self, *hooks: str) -> bool:
        """Whether none of the hooks is overridden outside of this package."""
        own = all(getattr(type(self), hook).__module__.startswith("lightrl.") for hook in hooks)
        return own and not vars(self).keys() & set(hooks)

    def _needs_old_logprobs(self, rows: Any) -> bool:
        """Whether the policy has to be evaluated before the updates. False only if exactly one update follows."""
        if self.loss.replaces_old_logprobs:
            return False
        hooks = (*STEP, "make_experience", "evaluate_models", "compute_advantages", "minibatches")
        several = self.ppo_epochs * self._count_minibatches(rows) > 1
        read = any(callback.reads_old_logprobs for callback in self._rl_callbacks)
        return several or read or isinstance(self.kl, KLInReward) or not self._runs_own(*hooks)

    def _zero_rows_are_free(self, rows: Experience) -> bool:
        """Whether a row whose advantages are all 0 has no gradient and no reader, so that it need not be run.

        True only if every part that is involved knows it: a subclass's hook, or anybody's callback that does not
        declare `reads_all_rows = False`, has all rows run.
        """
        if not self._runs_own(*STEP) or any(reads_all_rows(callback) for callback in self._callbacks()):
            return False
        terms = (
            self.critic_spec is not None,
            isinstance(self.kl, KLInLoss),
            self.entropy_coef,
            self.extra_losses.aux_loss_coef,
        )
        return not any(terms) and self._loss_of(rows).zero_advantage_is_zero_loss

    def _callbacks(self) -> list[Any]:
        return list(self.trainer.callbacks)  # type: ignore[attr-defined]

    @property
    def _rl_callbacks(self) -> list[RLCallback]:
        return rl_callbacks(self._callbacks())

    def _loss_of(self, rows: Experience) -> PolicyLoss:
        """The loss of these rows, corrected if older weights sampled them."""
        corrected = self.loss.engine_use in ("compared", "ratio")
        if not rows.is_stale or corrected or not self.updates.off_policy_correction:
            return self.loss
        if self._stale_loss is None:
            rank_zero_warn(
                "A rollout was sampled by older weights than those that learn from it: something changed them in "
                "between. OffPolicyCorrection weights such rollouts."
            )
            self._stale_loss = AutomaticCorrection(self.loss)
        return self._stale_loss

    def _is_stale(self, rollouts: Rollouts) -> bool:
        """Whether older weights sampled a rollout; unknown, and taken for no, without a `RolloutDataModule`."""
        known = isinstance(self.trainer.datamodule, RolloutDataModule)  # type: ignore[attr-defined]
        return known and rollouts.policy_version != self.policy_version

    def _aggregation_weights(self, mask: Tensor) -> Tensor:
        weights = one_per_token("aggregation", self.aggregation, self.aggregation.weights(mask), mask)
        return torch.where(mask, weights.float(), torch.zeros_like(mask, dtype=torch.float32))

    def _aggregation_count(self, mask: Tensor) -> Tensor:
        count = self.aggregation.count(mask)
        if not isinstance(count, Tensor) or count.ndim:
            raise ValueError(f"aggregation={type(self.aggregation).__name__}: `count` must return a scalar tensor.")
        return count.double()

    def _note_missing_routes(self, rollouts: Rollouts) -> None:
        """Warns once that the experts which the engine chose are not replayed, and why."""
        if self._routes_noted or any(routes is not None for routes in rollouts.routes):
            return
        self._routes_noted = True
        if self.actor.has_experts:
            log.warning(
                "Routing replay is off: the policy is a mixture of experts, but its samples came without the experts "
                "that the engine chose for them, so the trainer's routers choose for themselves. TransformersEngine "
                "records them, VLLMEngine on GPUs with engine_args.enable_return_routed_experts=true; servers do not."
            )

    def _count_minibatches(self, rows: Any) -> int:
        """Optimizer steps per pass over a rollout. Collective if `minibatch_size` is given."""
        size, ranks = self.updates.minibatch_size, self.trainer.world_size
        if size is None:
            return 1
        if size % ranks:
            raise ValueError(
                f"minibatch_size={size} counts sequences over all ranks and cannot be shared by {ranks}: take a "
                f"multiple of {ranks}."
            )
        own = len(rows.trajectory_ids.unique())
        total = int(self.all_sum(torch.tensor(float(own))))
        if total % size:
            raise ValueError(
                f"minibatch_size={size} does not divide the rollout's {total} sequences (prompts x group size, over "
                f"all ranks): take a divisor of {total}, or null for one update per epoch."
            )
        return total // size

    @property
    def _trained_models(self) -> list[PolicyModel | ValueModel]:
        return [model for model in (self.actor, self.critic) if model is not None]

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
        """Number of changes of the actor's weights, optimizer steps and others; names them for engines."""
        return int(self.trainer.global_step) + self.outside_changes

    @property
    def needs_groups(self) -> bool:
        """Whether the advantage compares the attempts at one prompt."""
        return self.advantage.needs_groups

    def refuse_group_size(self, size: int) -> None:
        """Refuses groups that are too small for the advantage."""
        self.advantage.refuse_group_size(size)

    @property
    def compares_engine_logprobs(self) -> bool:
        """Whether the loss, or the correction that `setup` will wrap around it, may read the engine's log-probs."""
        return self.loss.engine_use != "unused" or self._corrects_off_policy

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
        actor = self.actor
        return self.batched(actor, lambda x: policy_forward(actor, x, entropy=True), rows)

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

        Dropped: the reward models; the reference, unless something has changed it; and parameters of actor and critic
        that were built frozen (the base of a LoRA run, `freeze`d layers), unless they were drawn at random or something
        has changed them.
        """
        state = super().state_dict(*args, **kwargs)
        moves = self._saves_reference()
        frozen: set[str] = set()
        if not self.actor_spec.random_init:
            frozen = {name for name, parameter in self._trainable_parameters() if self._is_as_built(name, parameter)}
        dropped = ("reward_models.",) if moves else ("reward_models.", "reference.")
        return {name: value for name, value in state.items() if not name.startswith(dropped) and name not in frozen}

    def _trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters of the models that may be trained, frozen ones included."""
        named = self.named_parameters(remove_duplicate=False)
        return [(name, p) for name, p in named if not name.startswith(("reward_models.", "reference."))]

    def _is_as_built(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter has been frozen from the start and, as far as ranks agree on it, unchanged."""
        if parameter.requires_grad or self._frozen_at_start is None:
            return not parameter.requires_grad
        before = self._frozen_at_start.get(name)
        return before is not None and (self._is_in_parts or fingerprint([parameter]) == before)

    @property
    def _is_in_parts(self) -> bool:
        """Whether each rank holds other parts of the weights; False without a trainer."""
        try:
            return isinstance(self.trainer.strategy, ModelParallelStrategy | DeepSpeedStrategy)
        except RuntimeError:
            return False

    def _saves_reference(self) -> bool:
        """Whether a checkpoint needs the reference: it is no longer the model that it was built from.

        FSDP2 asks for the names before it loads, so there it is saved whenever something may move it.
        """
        reference: Any = getattr(self, "reference", None)
        if reference is None or self._reference_at_start is None:
            return False
        try:
            sharded = isinstance(self.trainer.strategy, ModelParallelStrategy)
        except RuntimeError:  # built without a trainer
            sharded = False
        if not sharded:
            return fingerprint(reference) != self._reference_at_start
        own = type(self).__module__.startswith("lightrl.")
        return not own or any(may_move_reference(callback) for callback in self._callbacks())

    def configure_model(self) -> None:
        """Builds and shards the models, and remembers what the reference and frozen parameters began as."""
        super().configure_model()
        if self.reference is not None and self._reference_at_start is None:
            self._reference_at_start = fingerprint(self.reference)
        if self._frozen_at_start is None:
            named = self._trainable_parameters()
            self._frozen_at_start = {name: fingerprint([p]) for name, p in named if not p.requires_grad}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds how the models are built, the counters, and the random generators' states. Collective."""
        models = {"actor": self.actor_spec}
        if self.critic_spec is not None and not self.critic_spec.shared:
            models["critic"] = self.critic_spec.model or self.actor_spec
        checkpoint["lightrl"] = {
            **self._description(models),
            "seed": self.seed,
            "outside_changes": int(self.outside_changes),
            "num_skipped_updates": int(self.num_skipped_updates),
            "skipped_in_a_row": int(self.skipped_in_a_row),
            "rng": states.collect_random_states(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores them, after a check that the checkpoint is one of this module's.

        Raises:
            ValueError: it was written by another class or format, or lacks parameters that are trained here.
        """
        super().on_load_checkpoint(checkpoint)
        if self.trainer.training:
            stored = checkpoint["lightrl"]
            self.seed = stored["seed"]
            self.outside_changes = stored.get("outside_changes", 0)
            self.num_skipped_updates = stored["num_skipped_updates"]
            self.skipped_in_a_row = stored["skipped_in_a_row"]
            self._restored_rng = stored["rng"]

    def on_train_start(self) -> None:
        """Puts the random generators back as late as possible, so that set-up does not advance them."""
        if self._restored_rng is not None:
            states.restore_random_states(self._restored_rng)
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

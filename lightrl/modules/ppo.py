"""PPO as a LightningModule: one training step, five hooks.

Read it top to bottom: what it owns, how one rollout becomes updates, then the hooks in the order in which they run.
Everything that is a matter of taste (estimator, loss, aggregation, KL) is an object given to the constructor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jsonargparse import lazy_instance
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightrl.models.loading import load_causal_lm, put_out_router_logits, require_model_folder
from lightrl.models.lora import adapter_config, named_adapter_weights, named_hf_weights
from lightrl.models.policy import PolicyModel, ValueModel
from lightrl.models.reward import RewardModel, RewardModelSpec
from lightrl.models.spec import ModelSpec
from lightrl.modules import checkpoints, evaluation, off_policy, random_states, strategies, streaming, updates
from lightrl.modules.advantages import GAE, AdvantageEstimator
from lightrl.modules.aggregation import Aggregation, TokenMean
from lightrl.modules.combinations import check_arguments
from lightrl.modules.experience import (
    count_minibatches,
    cut_micro_batches,
    cut_minibatches,
    evaluate_models,
    finish_advantages,
    policy_forward,
    set_rewards,
    value_forward,
    whole_logprobs,
    widest_layout,
    with_normalizers,
    zero_rows_are_free,
)
from lightrl.modules.kl import KLInLoss, KLInReward, KLPenalty
from lightrl.modules.losses import PolicyLoss, PPOClip
from lightrl.modules.metrics import MetricSums
from lightrl.modules.updates import parameter_groups, step_or_skip
from lightrl.ops.losses import clipped_value_loss
from lightrl.types import Experience, Rollouts, SupervisedBatch, realized, run_seed

__all__ = ["CriticSpec", "PPOLightningModule"]


@dataclass
class CriticSpec:
    """Where the critic's values come from.

    Args:
        model: backbone of the critic; None starts from the actor's model.
        shared: a value head on the actor's own backbone instead of a second one; `model` is then not used.
    """

    model: ModelSpec | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        if self.shared and self.model is not None:
            raise ValueError("CriticSpec(shared=True, model=...): a shared critic has no model of its own; drop one.")


class PPOLightningModule(LightningModule):
    """Fine-tunes a policy by PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) on scored rollouts.

    One Lightning batch is one rollout (`Rollouts`, from `RolloutDataModule` or any loader that yields them). Each is
    turned into experience and used for `ppo_epochs` x mini-batches of updates. Per mini-batch the loss is

        sum_t w_t (policy_t + kl_coef * kl_t - entropy_coef * entropy_t) / N + vf_coef * sum_t value_t / M
            + ptx_coef * mean_t nll_t (supervised rows)

    with w and N from `aggregation`, counted over the whole mini-batch, all micro-batches and ranks, so no split into
    micro-batches, layouts or ranks changes a gradient. It differs from the usual PPO for language models in that no
    end-of-sequence is ever invented, advantages skip masked tokens, and log-probs are those of the sampling
    distribution (temperature inside).

    Args:
        actor: the policy: a folder or hub name, or a `ModelSpec` with LoRA, dtype, layout and so on.
        critic: where values come from; None builds no critic (needs an advantage estimator that uses none).
        reference: model of the KL term; None takes a frozen copy of the actor's model (with LoRA: the actor without
            its adapter). Nothing is built where `kl` is None.
        reward_models: sequence-classification models that add to the rewards of the data module's functions.
        advantage: estimator of advantages and returns.
        loss: per-token policy loss.
        aggregation: how token losses become one number.
        kl: penalty against the reference, in the reward or in the loss; None for none.
        kl_coef: its coefficient, at least 0. Callbacks may change the attribute `kl_coef` while training.
        entropy_coef: weight of the entropy bonus.
        vf_coef: weight of the critic's loss.
        value_clip: range of the clipped value loss, in units of value; None is the plain squared error.
        whiten_advantages: shift and scale advantages to mean 0, std 1 over all response tokens of the rollout.
        advantage_clip: bound on |advantage| after whitening; None is off.
        reward_clip: bound on |sequence reward| before the KL penalty; None is off.
        mask_truncated: leave completions that `max_new_tokens` cut off out of all losses and their normalisers. They
            keep their place in the baselines of the others.
        top_entropy_fraction: fraction of the rollout's tokens, those of highest entropy over all ranks, that the
            policy loss trains, in (0, 1] (https://arxiv.org/abs/2506.01939: 0.2); the normaliser counts all tokens as
            in the paper, and KL, entropy bonus and critic see all. 1 is off.
        ppo_epochs: passes over each rollout.
        minibatch_size: sequences per optimizer step, over all ranks; must divide the rollout. None: the whole rollout.
        micro_batch_tokens: most tokens in one forward and backward; only memory and speed depend on it.
        optimizer: called with the parameter groups `actor` and `critic`.
        critic_lr: learning rate of the critic's group; None takes the optimizer's.
        lr_scheduler: called with the optimizer; stepped after every update. None keeps the rate constant.
        max_grad_norm: bound on the joint gradient norm of actor and critic; None is off.
        critic_warmup_rollouts: this many first rollouts train the critic only.
        aux_loss_coef: weight of a mixture-of-experts model's own load-balancing loss, over the tokens that a
            micro-batch runs (so it, alone, depends on the split a little); 0 is off.
        ptx_coef: weight of the supervised loss on the data module's `ptx` rows, a mean over their completion tokens
            (InstructGPT's PPO-ptx, https://arxiv.org/abs/2203.02155 eq. 2, which sums over tokens); 0 is off.
        max_skipped_updates: updates in a row with a non-finite loss or gradient after which the run stops.
        success_reward: a completion counts as solved in `eval/pass@k` from this reward on.

    Raises:
        ValueError: a value is out of range or two arguments exclude each other; the message names them.
    """

    actor: PolicyModel
    critic: ValueModel | None
    reference: PolicyModel | None
    reward_models: nn.ModuleDict
    piece_sums: MetricSums | None = None  # while pieces of a streamed rollout are worked on

    def __init__(
        self,
        actor: str | ModelSpec,
        critic: CriticSpec | None = CriticSpec(),  # noqa: B008 - never changed; a dataclass default is shown by --help
        reference: str | ModelSpec | None = None,
        reward_models: list[RewardModelSpec] | None = None,
        *,
        advantage: AdvantageEstimator = lazy_instance(GAE),  # noqa: B008
        loss: PolicyLoss = lazy_instance(PPOClip),  # noqa: B008
        aggregation: Aggregation = lazy_instance(TokenMean),  # noqa: B008
        kl: KLPenalty | None = lazy_instance(KLInReward),  # noqa: B008
        kl_coef: float = 0.05,
        entropy_coef: float = 0.0,
        vf_coef: float = 0.5,
        value_clip: float | None = 0.2,
        whiten_advantages: bool = True,
        advantage_clip: float | None = None,
        reward_clip: float | None = None,
        mask_truncated: bool = False,
        top_entropy_fraction: float = 1.0,
        ppo_epochs: int = 2,
        minibatch_size: int | None = None,
        micro_batch_tokens: int = 16384,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-6, weight_decay=0.0),
        critic_lr: float | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_grad_norm: float | None = 1.0,
        critic_warmup_rollouts: int = 0,
        aux_loss_coef: float = 0.0,
        ptx_coef: float = 0.0,
        max_skipped_updates: int = 5,
        success_reward: float = 1.0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # frozen models stay out of checkpoints; `state_dict` says why
        self.actor_spec = ModelSpec(actor) if isinstance(actor, str) else actor
        self.critic_spec = critic
        self.reference_spec = ModelSpec(reference) if isinstance(reference, str) else reference
        self.reward_model_specs = reward_models or []
        self.advantage, self.loss = realized(advantage), realized(loss)
        self.aggregation, self.kl = realized(aggregation), realized(kl)
        self.kl_coef, self.entropy_coef, self.vf_coef, self.value_clip = kl_coef, entropy_coef, vf_coef, value_clip
        self.whiten_advantages, self.advantage_clip, self.reward_clip = whiten_advantages, advantage_clip, reward_clip
        self.ppo_epochs, self.minibatch_size, self.micro_batch_tokens = ppo_epochs, minibatch_size, micro_batch_tokens
        self.optimizer_factory, self.critic_lr, self.lr_scheduler_factory = optimizer, critic_lr, lr_scheduler
        self.max_grad_norm, self.critic_warmup_rollouts = max_grad_norm, critic_warmup_rollouts
        self.mask_truncated, self.top_entropy_fraction = mask_truncated, top_entropy_fraction
        self.aux_loss_coef, self.ptx_coef, self.max_skipped_updates = aux_loss_coef, ptx_coef, max_skipped_updates
        self.success_reward = success_reward
        self.num_skipped_updates = self.skipped_in_a_row = 0
        self.reference_moves = False  # a callback that moves the reference sets it, so that checkpoints hold it
        self.entropy_is_read = False  # a callback that reads `policy/entropy` sets it, so that it is that of all rows
        self.seed = run_seed()
        self._restored_rng: list[Any] | None = None
        self._eval_sums = MetricSums()
        check_arguments(self)

    # ---- set-up ------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuses what cannot work, before any model is loaded."""
        strategies.refuse_unsupported(self.trainer.strategy, str(self.trainer.precision))
        strategies.set_gradient_clipping(self.trainer.strategy, self.max_grad_norm)
        for spec in (self.actor_spec, self.reference_spec, *self.reward_model_specs):
            if spec is not None:
                require_model_folder(spec.path)

    def configure_model(self) -> None:
        """Builds and shards the models; every rank together, once."""
        if "actor" in self._modules:
            return
        strategy = self.trainer.strategy
        _zero3_config = strategies.keep_zero3_config(strategy)
        critic = self.critic_spec
        shared = critic is not None and critic.shared
        spec = self.actor_spec
        lm = load_causal_lm(spec, trainable=True)
        if self.aux_loss_coef:
            put_out_router_logits(lm)
        self.actor = PolicyModel(lm, value_head=shared, layout=spec.layout)
        self.critic = None if critic is None or shared else ValueModel.from_spec(critic.model or spec)
        self.reference = self._build_reference()
        self.reward_models = nn.ModuleDict({m.name: RewardModel.from_spec(m) for m in self.reward_model_specs})
        for model in self._models():
            strategies.shard_model(model, model.blocks(), self)

    def _build_reference(self) -> PolicyModel | None:
        if self.kl is None or (self.reference_spec is None and self.actor_spec.lora is not None):
            return None
        spec = self.reference_spec or replace(self.actor_spec, lora=None, gradient_checkpointing=False)
        return PolicyModel(load_causal_lm(spec, trainable=False), layout=spec.layout)

    def _models(self) -> list[Any]:
        return [m for m in (self.actor, self.critic, self.reference, *self.reward_models.values()) if m is not None]

    def configure_optimizers(self) -> Any:
        """One optimizer with the named parameter groups `actor` and `critic` (DeepSpeed takes exactly one)."""
        optimizer = self.optimizer_factory(parameter_groups(self))
        if self.lr_scheduler_factory is None:
            return optimizer
        return [optimizer], [self.lr_scheduler_factory(optimizer)]

    # ---- one rollout -------------------------------------------------------------------------------------------

    def training_step(self, rollouts: Rollouts, batch_idx: int) -> dict[str, float]:
        """Learns from one rollout and returns its metrics, reduced over ranks; callbacks read them as `outputs`."""
        if hasattr(rollouts, "pieces"):
            return streaming.streamed_step(self, rollouts)
        start = time.perf_counter()
        experience = self.make_experience(rollouts)
        made = time.perf_counter()
        sums = MetricSums()
        for minibatch in self.minibatches(experience):
            finite = torch.ones((), dtype=torch.bool, device=self.device)  # read once per update, not per backward
            with strategies.optimizer_window(self.trainer.strategy):
                for micro in self.micro_batches(minibatch):
                    supervised = isinstance(micro, SupervisedBatch)
                    loss, values = self.compute_ptx_loss(micro) if supervised else self.compute_loss(micro)
                    self.manual_backward(loss)
                    finite &= torch.isfinite(loss.detach())
                    sums.add(values, micro.response_mask)
            sums.add(self.apply_gradients(finite=bool(finite)))
        times = {"time/experience": made - start, "time/update": time.perf_counter() - made}
        return updates.report(self, {**experience.metrics, **self._reduce(sums), **times}, len(rollouts))

    @torch.no_grad()
    def make_experience(self, rollouts: Rollouts) -> Experience:
        """Adds what the frozen models and the policy before the update know, then advantages. Hook 1 of 5.

        Args:
            rollouts: B scored sequences.

        Returns:
            the same rows with log-probs, values, advantages and the metrics of the rollout.
        """
        self.score(rollouts)
        raw_rewards = rollouts.rewards
        self._call_callbacks("on_rollout_scored", rollouts)
        experience, sums = evaluate_models(self, rollouts), MetricSums()
        token_rewards = set_rewards(self, experience, rollouts.rewards, sums)
        advantages, experience.returns = self.compute_advantages(experience, token_rewards, rollouts)
        finish_advantages(self, experience, advantages, rollouts, sums)
        sums.add(evaluation.rollout_metrics(rollouts, experience, raw_rewards))
        experience.metrics = evaluation.add_std(self._reduce(sums))
        experience.metrics |= evaluation.critic_metrics(experience, self.all_sum)
        self._call_callbacks("on_experience_made", experience)
        return experience

    def score(self, rollouts: Rollouts) -> None:
        """Adds the rewards of `reward_models` to `rollouts.rewards` and `reward_parts`, in place."""
        for spec in self.reward_model_specs:
            model: Any = self.reward_models[spec.name]
            scores = model.score(rollouts, self.micro_batch_tokens)
            rollouts.reward_parts[spec.name], rollouts.reward_weights[spec.name] = scores, spec.weight
            rollouts.rewards = rollouts.rewards.nan_to_num(0.0) + spec.weight * scores

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
        return self.advantage(
            token_rewards,
            experience.response_mask,
            experience.group_ids,
            values=experience.values,
            valid=experience.valid,
            reward_parts=rollouts.reward_parts,
            part_weights=rollouts.reward_weights,
            all_sum=self.all_sum,
        )

    def minibatches(self, experience: Experience) -> Iterator[Experience]:
        """`ppo_epochs` x mini-batches, the same number on every rank. Hook 3 of 5.

        Groups stay together where the mini-batch of a rank holds a multiple of the group size.
        """
        count = count_minibatches(self, len(experience))
        for epoch in range(self.ppo_epochs):
            yield from cut_minibatches(
                experience, count, seed=random_states.derived_seed(self.seed, self.policy_version, epoch)
            )

    def micro_batches(self, minibatch: Experience) -> Iterator[Any]:
        """Cuts a mini-batch by tokens and sets its normalisers; gradients are reduced over ranks in the last one.

        Supervised rows come first, since DDP wants every trained model in the backward that reduces.
        """
        minibatch = with_normalizers(self, minibatch)
        trained = [model for model in (self.actor, self.critic) if model is not None]
        budget, layout, pieces = self.micro_batch_tokens, widest_layout(*trained), list[Any]()
        if minibatch.supervised is not None:
            pieces += cut_micro_batches(minibatch.supervised, budget, self.all_max, layout=layout)
        skip = zero_rows_are_free(self)
        pieces += cut_micro_batches(minibatch, budget, self.all_max, skip_zero=skip, layout=layout)
        for i, piece in enumerate(pieces):
            with strategies.backward_scope(self.trainer.strategy, trained, last=i == len(pieces) - 1):
                yield piece

    def compute_loss(self, minibatch: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        """The joint loss of actor and critic on one micro-batch. Hook 4 of 5; pure given the micro-batch.

        Args:
            minibatch: rows with `normalizer` and `token_normalizer` set, which make micro-batch losses add up.

        Returns:
            scalar with graph; metrics, (B, T) ones are averaged over the response mask.
        """
        mask = minibatch.response_mask
        shared = self.actor.value_head is not None
        out = policy_forward(self.actor, minibatch, entropy=True, values=shared)
        logprobs, entropy = out["logprobs"], out["entropy"]
        old = logprobs.detach() if minibatch.old_logprobs is None else minibatch.old_logprobs
        token_loss, metrics = self.loss(
            logprobs, old, minibatch.advantages, mask, engine_logprobs=minibatch.engine_logprobs
        )
        metrics = {**metrics, "loss/policy": token_loss, "policy/entropy": entropy}
        if isinstance(self.kl, KLInLoss) and minibatch.ref_logprobs is not None:
            penalty = self.kl(logprobs, old, minibatch.ref_logprobs)
            token_loss = token_loss + self.kl_coef * penalty
            metrics["loss/kl"] = penalty
            metrics["kl/ref"] = old - minibatch.ref_logprobs
        if self.entropy_coef:
            token_loss = token_loss - self.entropy_coef * entropy
        loss = (self.aggregation.weights(mask) * token_loss).sum() / minibatch.normalizer
        if self.in_critic_warmup:
            loss = loss * 0.0  # keeps the graph: every rank and every wrapper sees the same backward
        if minibatch.values is not None and minibatch.returns is not None:
            values = out["values"] if self.critic is None else value_forward(self.critic, minibatch)
            value_loss, clipped = clipped_value_loss(values, minibatch.values, minibatch.returns, mask, self.value_clip)
            loss = loss + self.vf_coef * value_loss.sum() / minibatch.token_normalizer
            metrics |= {"loss/value": value_loss, "value/clip_fraction": clipped}
        if self.aux_loss_coef and "aux_loss" in out:
            loss = loss + self.aux_loss_coef * out["aux_loss"] * mask.sum() / minibatch.token_normalizer
            metrics["loss/aux"] = out["aux_loss"]
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
            metrics of the step.

        Raises:
            RuntimeError: `max_skipped_updates` updates in a row were skipped.
        """
        return step_or_skip(self, finite=finite)

    # ---- evaluation --------------------------------------------------------------------------------------------

    def validation_step(self, rollouts: Rollouts, batch_idx: int) -> None:
        """Adds one batch of evaluation rollouts; rows that only keep an idle rank busy do not count."""
        self.score(rollouts)
        if not rollouts.filler:
            self._eval_sums.add(evaluation.eval_metrics(rollouts, self.success_reward))

    def on_validation_epoch_end(self) -> None:
        """Logs `eval/*`, exact means over all rows or groups and ranks."""
        sums, self._eval_sums = self._eval_sums, MetricSums()
        self.log_dict(self._reduce(sums))

    def test_step(self, rollouts: Rollouts, batch_idx: int) -> None:
        """As `validation_step`, for `lightrl test`."""
        self.validation_step(rollouts, batch_idx)

    def on_test_epoch_end(self) -> None:
        """As `on_validation_epoch_end`."""
        self.on_validation_epoch_end()

    def predict_step(self, rollouts: Rollouts, batch_idx: int) -> list[dict[str, Any]]:
        """One record per completion: prompt, completion, rewards, and the row's columns."""
        self.score(rollouts)
        return evaluation.records(rollouts)

    # ---- what callbacks and data modules read ------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps behind the actor's weights; names them for engines."""
        return int(self.trainer.global_step)

    @property
    def in_critic_warmup(self) -> bool:
        """Whether the actor is still frozen."""
        return self.trainer.fit_loop.total_batch_idx < self.critic_warmup_rollouts

    def refuse_streaming(self) -> None:
        """Raises a ValueError with the reason if learning from groups one by one would change the update."""
        streaming.refuse(self)

    def correct_off_policy(self) -> None:
        """Wraps a loss that does not read the engine's log-probs in `OffPolicyCorrection`."""
        self.loss = off_policy.corrected(self.loss)

    def named_policy_weights(self, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every actor parameter, LoRA merged, one at a time, or of trained ones.

        Collective under FSDP2 and ZeRO-3: every rank iterates to the end. Tied parameters come once.
        """
        gather = strategies.gather_parameter(self.trainer.strategy)
        return named_hf_weights(self.actor, gather, trained_only=trained_only)

    def policy_adapter(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
        """The actor's LoRA adapter in peft's format: (name, full tensor) one at a time, and its configuration."""
        assert self.actor_spec.lora is not None, "only an actor with LoRA has an adapter"
        gather = strategies.gather_parameter(self.trainer.strategy)
        return named_adapter_weights(self.actor, gather), adapter_config(self.actor, self.actor_spec.lora)

    @torch.no_grad()
    def token_logprobs(self, token_ids: Tensor) -> Tensor:
        """Log-probs at temperature 1 of all tokens but the first of each row; (B, T) in, (B, T) out, for the canary."""
        with self.trainer.precision_plugin.forward_context():
            return whole_logprobs(self.actor, token_ids)

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks; of a piece of a streamed rollout, which ranks work on one by one, this rank's own."""
        return tensor if self.piece_sums is not None else strategies.all_sum(self.trainer.strategy, tensor)

    def all_max(self, tensor: Tensor) -> Tensor:
        """Maximum over ranks, or of this rank as in `all_sum`."""
        return tensor if self.piece_sums is not None else strategies.all_max(self.trainer.strategy, tensor)

    def _reduce(self, sums: MetricSums) -> dict[str, float]:
        if self.piece_sums is not None:
            self.piece_sums.merge(sums)
            return {}
        return sums.reduce(self.all_sum, self.all_max, self.device)

    def _call_callbacks(self, hook: str, payload: Any) -> None:
        """Calls LightRL's own hooks on any callback that defines them; pieces of a rollout are not shown to them."""
        for callback in self.trainer.callbacks if self.piece_sums is None else []:  # type: ignore[attr-defined]
            function = getattr(callback, hook, None)
            if function is not None:
                function(self.trainer, self, payload)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What cannot be loaded from where it came from: see `lightrl.modules.checkpoints.trained_state`."""
        return checkpoints.trained_state(self, super().state_dict(*args, **kwargs))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the module's class, the coefficients that callbacks move, and the random generators' states."""
        checkpoints.save_extras(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes that over, after a check that the checkpoint is one of this module's."""
        self._restored_rng = checkpoints.load_extras(self, checkpoint)

    def on_train_start(self) -> None:
        """Puts the random generators back as late as possible, so that set-up does not advance them."""
        if self._restored_rng is not None:
            random_states.restore(self._restored_rng)
            self._restored_rng = None

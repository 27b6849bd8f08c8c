"""The training step of all algorithms, and GRPO. The steps that turn one rollout into updates:

    training_step
        make_experience: score, evaluate_models, compute_advantages
        minibatches
            micro_batches
                compute_loss: forward_policy, policy_loss
            apply_gradients

Each step is a method that you can override. The estimator, loss, aggregation, and KL penalty are objects. `ppo.py` adds
a critic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lightrl.algorithms.base import RLLightningModule
from lightrl.algorithms.experience import (
    count_minibatches,
    cut_minibatches,
    estimate_advantages,
    join_experience,
    keeps_credit,
    one_per_token,
    trajectory_loss,
    weighted_micro_batches,
)
from lightrl.algorithms.module import ExtraLosses, Shaping, Updates, require_matching_parts
from lightrl.compat.lightning import forget_step_metrics
from lightrl.distributed import strategies
from lightrl.distributed.strategies import MetricSums
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.objectives.estimators import AdvantageEstimator, GroupRelative
from lightrl.objectives.loss_terms import (
    Aggregation,
    KLInLoss,
    KLInReward,
    KLPenalty,
    PolicyLoss,
    PPOClip,
    SequenceMean,
    TokenMean,
)
from lightrl.records import Advantages, Experience, MicroBatch, ModelOutputs, Rollouts, RowBatch
from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.rollout.learner import reads_all_rows

if TYPE_CHECKING:
    from lightrl.algorithms.schedules import LRSchedule
    from lightrl.models.reward import RewardModelSpec

STEP = ["training_step", "micro_batches", "compute_loss", "forward_policy", "policy_loss", "other_losses", "total_loss"]
"""Hooks between the mini-batch and its gradient."""

log = logging.getLogger(__name__)


def policy_forward(model: PolicyModel, rows: RowBatch, **wanted: Any) -> dict[str, Tensor]:
    """Runs the policy and returns `logprobs` and the `wanted` fields of `PolicyOutput`, each (b, t)."""
    return {name: value for name, value in model(rows, **wanted)._asdict().items() if value is not None}


class PolicyGradientLightningModule(RLLightningModule):
    """Base of the algorithms, which set its arguments to a paper's values.

    Each Lightning batch is one rollout (`Rollouts`), from `RolloutDataModule` or any data loader that yields them. It
    is used for `ppo_epochs` passes over its mini-batches. The loss of a mini-batch is

        sum_t w_t (policy_t + kl.coef * kl_t - entropy_coef * entropy_t) / N + ptx_coef * mean_t nll_t (supervised)

    `aggregation` sets w and N, counted over all micro-batches and ranks. Gradients therefore do not depend on the
    micro-batch size, the layout, or the number of ranks. Log-probs refer to the sampling distribution, including
    the temperature. No end-of-sequence token is appended to truncated completions.

    A trajectory's reward is the weighted sum over the reward functions and models that scored it. Unscored and failed
    trajectories are excluded from all losses, normalizers, and baselines.

    Args:
        actor: Policy to train. A model directory, a model ID, or a `ModelSpec` (LoRA, dtype, layout, ...). To train a
            model that is already loaded, use `ModelSpec.of(model, tokenizer)`.
        reference: Model for the KL penalty. Defaults to a frozen copy of the policy. With LoRA, defaults to the policy
            without its adapter. Not loaded if `kl` is None.
        reward_models: Sequence-classification models whose scores are added to the rewards of the data module. They
            read the last row of a trajectory.
        advantage: Estimator of advantages and returns.
        loss: Policy loss per token.
        aggregation: Reduction of token losses to a scalar.
        kl: KL penalty against the reference, in the reward or in the loss. None disables it.
        ppo_epochs: Number of passes over each rollout.
        whiten_advantages: Normalize advantages to mean 0 and std 1 over all response tokens of the rollout.
        updates: Mini-batch and micro-batch sizes, gradient clipping, and limits on skipped updates.
        shaping: Clipping of rewards and advantages, and filters on trained tokens.
        extra_losses: Weights of the entropy bonus, the supervised loss, and the load-balancing loss.
        optimizer: Callable that builds the optimizer from the parameter group `policy` and, with a critic, `critic`.
        lr_scheduler: `LRSchedule` over all updates of the run, such as `{name: cosine, warmup: 0.03}`, or a callable
            that builds a scheduler from the optimizer. Stepped after each update that isn't skipped. Default: constant.

    Raises:
        ValueError: Two arguments are incompatible.
    """

    default_group_size = 8

    def __init__(
        self,
        actor: str | ModelSpec,
        reference: str | ModelSpec | None = None,
        reward_models: list[RewardModelSpec] | None = None,
        *,
        advantage: AdvantageEstimator,
        loss: PolicyLoss = PPOClip(),
        aggregation: Aggregation = TokenMean(),
        kl: KLPenalty | None = None,
        ppo_epochs: int = 1,
        whiten_advantages: bool = False,
        updates: Updates = Updates(),
        shaping: Shaping = Shaping(),
        extra_losses: ExtraLosses = ExtraLosses(),
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-6, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | LRSchedule | None = None,
    ) -> None:
        super().__init__()
        self.actor_spec = ModelSpec.given(actor)
        self.reference_spec = None if reference is None else ModelSpec.given(reference)
        self.reward_model_specs = list(reward_models or [])
        self.advantage = advantage
        self.loss = loss
        self.aggregation = aggregation
        self.kl = copy(kl)  # callbacks change its coefficient
        self.ppo_epochs = ppo_epochs
        self.whiten_advantages = whiten_advantages
        self.updates = updates
        self.shaping = shaping
        self.extra_losses = extra_losses
        self.entropy_coef = extra_losses.entropy_coef  # callbacks change it
        self.ptx_coef = extra_losses.ptx_coef
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self._correction: PolicyLoss | None = None
        self._logged = set[str]()  # metrics of the previous step
        require_matching_parts(self)

    # ---- one rollout -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Also checks that mini-batches divide the rollout."""
        super().setup(stage)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        size = self.updates.minibatch_size if stage == "fit" and self._runs_own("minibatches") else None
        if size is not None and isinstance(data, RolloutDataModule):
            count_minibatches(size, data.prompts_per_rollout * data.group_size, self.trainer.world_size)

    def training_step(self, rollouts: Rollouts, batch_idx: int) -> dict[str, float]:
        """Trains on one rollout and returns its metrics, reduced over ranks; callbacks read them as `outputs`."""
        if not isinstance(rollouts, Rollouts):
            raise TypeError(f"A batch must be `Rollouts`, as from RolloutDataModule, not {type(rollouts).__name__}.")
        began, measured = time.perf_counter(), MetricSums()
        experience = self.make_experience(rollouts)
        made = time.perf_counter()
        self.updates_made = 0
        for minibatch in self.minibatches(experience):
            self._update(minibatch, measured)
            self.updates_made += 1
        seconds = {"time/experience": made - began, "time/update": time.perf_counter() - made}
        measured.add(rollouts.metrics)
        metrics = {**experience.metrics, **self.means(measured), **seconds}
        if self.kl is not None:
            metrics["kl/coef"] = float(self.kl.coef)
        if self.entropy_coef:
            metrics["policy/entropy_coef"] = float(self.entropy_coef)
        self._call_callbacks("on_policy_updated", metrics)
        forget_step_metrics(self.trainer, self._logged - metrics.keys())
        self._logged = set(metrics)
        self.log_dict(metrics, batch_size=len(rollouts))
        return metrics

    def _update(self, minibatch: Experience, measured: MetricSums) -> None:
        if self.updates_made and minibatch.old_logprobs is None and not self.loss.replaces_old_logprobs:
            raise RuntimeError(
                "old_logprobs=None in the second update of a rollout: the module skipped them because it expected one "
                "update. Set reads_old_logprobs=True in callbacks, and don't change ppo_epochs after make_experience."
            )
        finite, trains = torch.ones((), dtype=torch.bool, device=self.device), False
        with self.gradients.window():
            for micro in self.micro_batches(minibatch):
                trains = True
                if micro.policy_weights is None:
                    losses, metrics = self.compute_ptx_loss(micro.rows)
                else:
                    losses, metrics = self.compute_loss(micro.rows)
                loss = self.total_loss(micro, losses)
                self.manual_backward(loss)
                finite &= torch.isfinite(loss.detach())  # synchronizes once per update, not per backward pass
                measured.add(metrics, micro.rows.response_mask)
        measured.add(self.apply_gradients(finite=bool(finite)) if trains else self._skip_empty_update())

    # ---- experience --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def make_experience(self, rollouts: Rollouts) -> Experience:
        """Scores a rollout, evaluates the models on it, and computes advantages. Each step is a hook.

        Calls the callbacks' `on_rollout_scored` after `score` and `on_experience_made` at the end.
        """
        self.score(rollouts)
        raw_rewards = rollouts.rewards.clone()
        with keeps_credit(self.advantage, rollouts):
            self._call_callbacks("on_rollout_scored", rollouts)
        self.note_weight_changes()  # since the rollout was sampled
        outputs = self.evaluate_models(rollouts)
        found = self.compute_advantages(rollouts, outputs)
        # Other data loaders may set any `policy_version`.
        is_own = isinstance(self.trainer.datamodule, RolloutDataModule)  # type: ignore[attr-defined]
        experience = join_experience(
            rollouts,
            outputs,
            found,
            raw_rewards,
            self.shaping,
            whiten=self.whiten_advantages,
            is_stale=is_own and rollouts.policy_version != self.policy_version,
            all_sum=self.all_sum,
            means=self.means,
        )
        self._call_callbacks("on_experience_made", experience)
        return experience

    def evaluate_models(self, rollouts: Rollouts) -> ModelOutputs:
        """Runs the policy and the reference over a rollout.

        Skips the policy's log-probs only if exactly one update follows, which computes them. They are never skipped if
        a subclass overrides a hook, or if a callback doesn't declare `reads_old_logprobs = False`.
        """
        self._note_missing_routes(rollouts)
        actor, reference = self.actor, self.reference
        wanted = {"values": actor.value_head is not None, "entropy": self.shaping.top_entropy_fraction < 1}
        outputs = ModelOutputs()
        if any(wanted.values()) or self._needs_old_logprobs(rollouts):
            out = self.batched(actor, lambda x: policy_forward(actor, x, **wanted), rollouts)
            outputs = ModelOutputs(out["logprobs"], values=out.get("values"), entropy=out.get("entropy"))
        if self.loss.replaces_old_logprobs:
            outputs.old_logprobs = rollouts.engine_logprobs
        if self.kl is not None:
            with actor.as_reference() if reference is None else nullcontext():
                base = reference or actor
                # The reference routes tokens itself: with the policy's routes, it would have a different distribution.
                out = self.batched(base, lambda x: policy_forward(base, replace(x, routes=[])), rollouts)
                outputs.ref_logprobs = out["logprobs"]
        return outputs

    def compute_advantages(self, rollouts: Rollouts, outputs: ModelOutputs) -> Advantages:
        """Computes advantages of B scored sequences, before whitening and clipping, and the targets of a critic."""
        return estimate_advantages(rollouts, outputs, self.advantage, self.kl, self.shaping.reward_clip, self.all_sum)

    # ---- mini-batches and micro-batches ------------------------------------------------------------------------

    def minibatches(self, experience: Experience) -> Iterator[Experience]:
        """Yields the mini-batches of `ppo_epochs` passes, one per optimizer step, the same number on every rank.

        Groups stay together if each rank's mini-batch size is a multiple of the group size.
        """
        count = self._count_minibatches(experience)
        for epoch in range(self.ppo_epochs):
            seed = strategies.derived_seed(self.seed, int(self.trainer.global_step), epoch)
            yield from cut_minibatches(experience, count, seed=seed)

    def micro_batches(self, minibatch: Experience) -> Iterator[MicroBatch]:
        """Splits a mini-batch by tokens. The losses of the micro-batches sum to the loss of the mini-batch.

        Each micro-batch is yielded inside the strategy's context for one backward pass. The last one reduces gradients
        over ranks. Yields nothing if no rank has a trainable token.
        """
        skip_zero = self.skips_zero_advantages(minibatch)
        whole_trajectories = self._loss_of(minibatch).needs_whole_trajectories
        micros = weighted_micro_batches(self, minibatch, skip_zero=skip_zero, whole_trajectories=whole_trajectories)
        for i, micro in enumerate(micros):
            with self.gradients.backward(last=i == len(micros) - 1):
                yield micro

    def skips_zero_advantages(self, rows: Experience) -> bool:
        """Whether to skip sequences whose advantages are all 0.

        True only if nothing needs them: no hook is overridden, and every callback declares `reads_all_rows = False`.
        """
        if not self._runs_own(*STEP) or any(reads_all_rows(callback) for callback in self._callbacks()):
            return False
        terms = (isinstance(self.kl, KLInLoss), self.entropy_coef, self.extra_losses.aux_loss_coef)
        return not any(terms) and self._loss_of(rows).zero_advantage_is_zero_loss

    # ---- losses ------------------------------------------------------------------------------------------------

    def compute_loss(self, rows: Experience) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Computes the token losses on one micro-batch.

        LightRL reduces them over the whole mini-batch: `policy` (including KL and entropy) by `aggregation`, all other
        losses as means over trained tokens. To add a loss, add a key, or add a (b, T) term to `policy`.

        Args:
            rows: b sequences of the mini-batch.

        Returns:
            Losses by name, each (b, T) with graph; and metrics. (b, T) metrics are averaged over the response mask.
        """
        out = self.forward_policy(rows, entropy=True, values=self.actor.value_head is not None)
        logprobs, entropy = out["logprobs"], out["entropy"]
        policy, metrics = self.policy_loss(rows, out)
        metrics = {**metrics, "loss/policy": policy, "policy/entropy": entropy}
        if not self.updates_made and (rows.old_logprobs is None or self.loss.replaces_old_logprobs):
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
        losses, others = self.other_losses(rows, out)
        return {"policy": policy, **losses}, {**metrics, **others}

    def other_losses(self, rows: Experience, out: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Computes the losses besides `policy`, and metrics, from the result of `forward_policy`."""
        if "aux_loss" not in out:
            return {}, {}
        loss = (self.extra_losses.aux_loss_coef * out["aux_loss"]).expand_as(out["logprobs"])
        return {"aux": loss}, {"loss/aux": out["aux_loss"]}

    def total_loss(self, micro: MicroBatch, losses: dict[str, Tensor]) -> Tensor:
        """Computes the scalar loss of a micro-batch."""
        return micro.total(losses)

    def forward_policy(self, rows: Experience, **wanted: Any) -> dict[str, Tensor]:
        """Runs the policy for `compute_loss`: `logprobs` and the `wanted` fields of `PolicyOutput`, each (b, T)."""
        return policy_forward(self.actor, rows, **wanted)

    def policy_loss(self, rows: Experience, out: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes (b, T) policy losses and metrics with `loss`, which reads each trajectory as one row."""
        return trajectory_loss(self._loss_of(rows), rows, out)

    def compute_ptx_loss(self, rows: RowBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Computes the supervised loss, -log pi of each token, on one micro-batch; weighted by `ptx_coef`."""
        loss = -policy_forward(self.actor, rows)["logprobs"]
        return {"ptx": loss}, {"loss/ptx": loss}

    # ---- the optimizer's step ----------------------------------------------------------------------------------

    def apply_gradients(self, *, finite: bool) -> dict[str, Tensor | float]:
        """Clips gradients and steps the optimizer and scheduler, or skips the update on all ranks if not finite.

        Args:
            finite: Whether all losses of this rank's mini-batch were finite.

        Returns:
            `optim/skipped_updates` (0 or 1), `optim/lr_*`, `optim/grad_norm` if a step was taken, and with float16
            autocast `optim/loss_scale`.

        Raises:
            RuntimeError: `max_skipped_updates` consecutive updates were skipped.
        """
        scaler = self.trainer.scaler  # of float16
        scale = 1.0 if scaler is None else scaler.get_scale()
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        norm = self.gradients.clip(trained, self.updates.max_grad_norm, scale)
        overflow = norm is not None and not bool(torch.isfinite(norm))
        lost, overflow = self.all_max(torch.tensor([float(not finite), float(overflow)])).bool().tolist()
        skip = lost or overflow
        named = [each for each in self._schedulers if type(each).__module__.startswith("lightrl.")]
        for scheduler in named:
            scheduler.refresh()
        metrics = self._learning_rates()
        if not skip:
            self.step_optimizer()
            norm, skip = self.gradients.after_step(norm)
        if not skip:
            for scheduler in self._schedulers:
                if scheduler not in named:
                    scheduler.step()
        elif scaler is not None:
            from lightrl.distributed.precision import lower_scale

            lower_scale(scaler)
        if skip:
            self.gradients.discard()
        self._optimizer.zero_grad()
        self._count_skips(skip, norm, searching=scale > 1 and not lost)
        if scaler is not None:
            metrics["optim/loss_scale"] = scale
        if norm is not None and not skip:
            metrics["optim/grad_norm"] = norm
        return {"optim/skipped_updates": float(skip), **metrics}

    def step_optimizer(self) -> None:
        """Steps the optimizer."""
        self._optimizer.step()

    # ---- skipped work ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate_policy(self, rows: Experience) -> dict[str, Tensor]:
        """Computes the current policy's `logprobs` and `entropy`, each (B, T) float32, for callbacks. Collective."""
        actor = self.actor
        return self.batched(actor, lambda x: policy_forward(actor, x, entropy=True), rows)

    def _runs_own(self, *hooks: str) -> bool:
        """Whether no hook in `hooks` is overridden outside this package."""
        own = all(getattr(type(self), hook).__module__.startswith("lightrl.") for hook in hooks)
        return own and not vars(self).keys() & set(hooks)

    def _needs_old_logprobs(self, rows: Rollouts) -> bool:
        """Whether to evaluate the policy before the updates. False only if exactly one update follows."""
        if self.loss.replaces_old_logprobs:
            return False
        hooks = (*STEP, "make_experience", "evaluate_models", "compute_advantages", "minibatches")
        several = self.ppo_epochs * self._count_minibatches(rows) > 1
        read = any(callback.reads_old_logprobs for callback in self._rl_callbacks)
        return several or read or isinstance(self.kl, KLInReward) or not self._runs_own(*hooks)

    def _count_minibatches(self, rows: Any) -> int:
        """Number of optimizer steps per pass over a rollout. Collective if `minibatch_size` is set."""
        size, ranks = self.updates.minibatch_size, self.trainer.world_size
        if size is None:
            return 1
        return count_minibatches(size, int(self.all_sum(torch.tensor(float(len(rows.trajectory_ids.unique()))))), ranks)

    def _loss_of(self, rows: Experience) -> PolicyLoss:
        """Returns the loss for these sequences, with off-policy correction if they were sampled by older weights."""
        own = self.loss.engine_use in ("compared", "ratio") or not self.updates.off_policy_correction
        if not rows.is_stale or own:
            return self.loss
        if self._correction is None:
            from lightrl.objectives.off_policy import OffPolicyCorrection

            log.info(
                "Rollouts sampled by older policies: applying OffPolicyCorrection to %s.", type(self.loss).__name__
            )
            self._correction = OffPolicyCorrection(self.loss)
        return self._correction


class GRPOLightningModule(PolicyGradientLightningModule):
    """Group relative policy optimization (GRPO).

    The paper's settings: `A = (r - mean_group) / std_group`, the k3 KL penalty in the loss (coefficient 0.04), the mean
    over sequences of token means, and one update per rollout.

    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.
    """

    def __init__(
        self,
        actor: str | ModelSpec,
        *,
        advantage: AdvantageEstimator = GroupRelative(),
        aggregation: Aggregation = SequenceMean(),
        kl: KLPenalty | None = KLInLoss(coef=0.04),
        **kwargs: Any,
    ) -> None:
        super().__init__(actor, advantage=advantage, aggregation=aggregation, kl=kl, **kwargs)

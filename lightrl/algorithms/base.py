"""Base class of the RL modules: models, optimizer, evaluation, and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightrl.algorithms.module import ExtraLosses, SavesPretrained, Updates, make_optimizer
from lightrl.compat.lightning import run_seed
from lightrl.distributed import strategies
from lightrl.distributed.strategies import MetricSums, fingerprint
from lightrl.models.packing.micro_batches import run_micro_batches
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.objectives.estimators import AdvantageEstimator
from lightrl.objectives.loss_terms import KLPenalty
from lightrl.records import Rollouts
from lightrl.rollout.learner import RLCallback, RolloutLearner, may_move_reference, require_rl_callbacks

if TYPE_CHECKING:
    from lightrl.models.reward import RewardModelSpec

log = logging.getLogger(__name__)

COUNTERS = ("seed", "outside_changes", "num_skipped_updates", "skipped_in_a_row")  # attributes in checkpoints


class RLLightningModule(SavesPretrained, RolloutLearner):
    """Models, optimizer, evaluation, and checkpoints. `PolicyGradientLightningModule` adds the training step."""

    reference: PolicyModel | None
    reward_models: nn.ModuleDict
    reference_spec: ModelSpec | None
    reward_model_specs: list[RewardModelSpec]
    advantage: AdvantageEstimator
    kl: KLPenalty | None
    updates: Updates
    extra_losses: ExtraLosses
    ppo_epochs: int
    needs_rewards = True
    entropy_coef: float
    optimizer_factory: Callable[..., Any]
    lr_scheduler_factory: Any

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strict_loading = False  # checkpoints omit frozen models, see `state_dict`
        self.seed = run_seed()
        self.num_skipped_updates = 0
        self.skipped_in_a_row = 0
        self.updates_made = 0  # for the current rollout
        self._start: dict[str, int] | None = None
        self._restored_rng: list[Any] | None = None
        self._restored_optimizers: list[str] | None = None
        self._eval_sums = MetricSums()
        self._routes_noted = False

    # ---- models and optimizer ----------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Checks the strategy, the rewards, and the callbacks before loading any model."""
        strategy = self.trainer.strategy
        strategies.check(strategy, str(self.trainer.precision))
        if self.extra_losses.aux_loss_coef and getattr(strategy, "context_group", None) is not None:
            raise ValueError(
                f"aux_loss_coef={self.extra_losses.aux_loss_coef} with context_parallel_size above 1: each rank sees "
                "only part of the tokens that the routers balance. Set aux_loss_coef=0 or context_parallel_size=1."
            )
        scorer = getattr(self.trainer.datamodule, "scorer", self)  # type: ignore[attr-defined]
        if self.advantage.credit == "parts" and scorer is None and not self.reward_model_specs:
            raise ValueError(
                f"advantage={type(self.advantage).__name__} without reward functions: it reads the rewards of each "
                "function, so every advantage would be 0. Set data.rewards."
            )
        require_rl_callbacks(self._callbacks())

    def build_models(self, in_shards: bool = False) -> None:
        """Sets actor, reference, and reward models; empty ones if ranks load their shards (`in_shards`)."""
        spec = self.actor_spec
        if spec.live is not None:
            spec.write_live()
        self.build_actor(in_shards)
        if self.extra_losses.aux_loss_coef:
            from lightrl.models.routing import return_router_logits

            return_router_logits(self.actor.lm)
        base = self.reference_spec
        if base is None and spec.lora is None:  # with LoRA, the reference is the policy without its adapter
            base = replace(spec, gradient_checkpointing=False)
        self.reference = None
        if self.kl is not None and base is not None:
            self.reference = PolicyModel.from_spec(base, trainable=False, in_shards=in_shards)
        self.reward_models = nn.ModuleDict()
        for each in self.reward_model_specs:
            from lightrl.models.reward import RewardModel

            self.reward_models[each.name] = RewardModel.from_spec(each)
        if not in_shards:  # before weights of a checkpoint are loaded
            self._start = self._frozen_fingerprints()

    def build_actor(self, in_shards: bool) -> None:
        """Sets the actor."""
        self.actor = PolicyModel.from_spec(self.actor_spec, trainable=True, in_shards=in_shards)

    def models(self) -> list[Any]:
        frozen = (self.reference, *self.reward_models.values())
        return [*self.trained_models, *(model for model in frozen if model is not None)]

    @property
    def trained_models(self) -> list[Any]:
        """The models with a backward pass."""
        return [self.actor]

    @property
    def gradients(self) -> strategies.Gradients:
        """The gradients of an optimizer step under the run's strategy."""
        strategy = self.trainer.strategy
        if not strategies.shards(strategy):
            return strategies.Gradients(strategy, self.trained_models)
        from lightrl.distributed.sharded import FSDP2Gradients, ZeROGradients

        kind = ZeROGradients if isinstance(strategy, DeepSpeedStrategy) else FSDP2Gradients
        return kind(strategy, self.trained_models)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Returns the optimizer's groups, with the parameters that a subclass adds."""
        return [{"params": [p for p in self.parameters() if p.requires_grad], "name": "policy"}]

    def configure_model(self) -> None:
        """Builds and shards the models, and records the initial state of frozen weights."""
        strategy = self.trainer.strategy
        if isinstance(strategy, DeepSpeedStrategy):
            from lightrl.distributed.sharded import set_gradient_clipping

            set_gradient_clipping(strategy, self.updates.max_grad_norm)
        self._eval_sums = MetricSums()  # without those of an interrupted evaluation
        super().configure_model()
        self._start = self._frozen_fingerprints() if self._start is None else self._start

    def configure_optimizers(self) -> Any:
        """Builds one optimizer, since DeepSpeed supports only one."""
        optimizer = make_optimizer(self.optimizer_factory, self.parameter_groups(), self.trainer.strategy)
        if self.lr_scheduler_factory is None:
            return optimizer
        from lightrl.algorithms.schedules import rollout_position, with_schedule

        return with_schedule(optimizer, self.lr_scheduler_factory, partial(rollout_position, self))

    # ---- evaluation --------------------------------------------------------------------------------------------

    def score(self, rollouts: Rollouts) -> None:
        """Adds the rewards of `reward_models` to `rollouts.rewards` and `reward_parts` in place."""
        for spec in self.reward_model_specs:
            model: Any = self.reward_models[spec.name]
            spec.add_scores(rollouts, model.score(rollouts, self.updates.tokens(self.device.type)))

    def validation_step(self, rollouts: Rollouts, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds one batch of evaluation rollouts; excludes sequences that only keep an idle rank in step."""
        self.score(rollouts)
        if not rollouts.filler:
            from lightrl.algorithms.evaluation import eval_metrics

            evaluation = getattr(self.trainer.datamodule, "evaluation", None)  # type: ignore[attr-defined]
            self._eval_sums.add(eval_metrics(rollouts, getattr(evaluation, "success_reward", 1.0)))

    def on_validation_epoch_end(self) -> None:
        """Logs `eval/*`: exact means over all trajectories or groups and ranks."""
        sums, self._eval_sums = self._eval_sums, MetricSums()
        self.log_dict(self.means(sums))

    def test_step(self, rollouts: Rollouts, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Runs `validation_step`, for `lightrl test`."""
        self.validation_step(rollouts, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def predict_step(self, rollouts: Rollouts, batch_idx: int) -> list[dict[str, Any]]:
        """Returns one record per trajectory: prompt, completion, rewards, and data columns."""
        from lightrl.algorithms.evaluation import records

        self.score(rollouts)
        return records(rollouts, getattr(self.trainer.datamodule, "tokenizer", None))  # type: ignore[attr-defined]

    def _skip_empty_update(self) -> dict[str, Tensor | float]:
        """Skips an update without trainable tokens on any rank: momentum and weight decay would change the weights."""
        rank_zero_warn(
            "Skipped an update: no trainable tokens (all completions unscored or masked). optim/skipped_updates counts "
            "such updates."
        )
        self.gradients.discard()
        self._optimizer.zero_grad()
        return {"optim/skipped_updates": 1.0, **self._learning_rates()}

    def _learning_rates(self) -> dict[str, Tensor | float]:
        return {f"optim/lr_{group.get('name', 'policy')}": float(group["lr"]) for group in self._optimizer.param_groups}

    @property
    def _optimizer(self) -> Any:
        found = self.optimizers()
        if isinstance(found, list):
            raise ValueError("configure_optimizers: Return one optimizer with several parameter groups, not several.")
        return found

    @property
    def _schedulers(self) -> list[Any]:
        return [config.scheduler for config in self.trainer.lr_scheduler_configs]  # type: ignore[attr-defined]

    def _count_skips(self, skip: bool, norm: Tensor | None, *, searching: bool) -> None:
        """Counts a skipped update. Searching for a lower float16 loss scale doesn't count toward the limit."""
        if not (skip and searching):
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skip else 0
        self.num_skipped_updates += skip
        if self.skipped_in_a_row >= self.updates.max_skipped_updates:
            raise RuntimeError(
                f"{self.skipped_in_a_row} updates in a row had a non-finite loss or gradient norm (last norm: "
                f"{None if norm is None else norm.item()}). The weights are from the last finite update. Lower the "
                "learning rate, check the reward scale, or raise max_skipped_updates."
            )

    # ---- interface for the data module and callbacks -----------------------------------------------------------

    @property
    def needs_groups(self) -> bool:
        """Whether the advantage estimator compares the completions of a prompt."""
        return self.advantage.needs_groups

    @property
    def scores_rollouts(self) -> bool:
        """Whether the module has reward models."""
        return bool(self.reward_model_specs)

    def set_kl_coef(self, coef: float) -> None:
        """Sets the coefficient of the KL penalty, effective from the next rollout."""
        assert self.kl is not None, "only a module with a KL penalty has a coefficient"
        self.kl.coef = coef

    def set_entropy_coef(self, coef: float) -> None:
        """Sets the weight of the entropy bonus, effective from the next rollout."""
        self.entropy_coef = coef

    def batched(self, model: Any, forward: Callable[[Any], dict[str, Tensor]], rows: Any) -> dict[str, Tensor]:
        """Runs `forward` over micro-batches; see `run_micro_batches`."""
        return run_micro_batches(forward, rows, self.updates.tokens(self.device.type), model.stream.layout)

    def means(self, sums: MetricSums) -> dict[str, float]:
        """Reduces collected metrics to means and maxima over ranks. Collective."""
        return sums.reduce(self.all_sum, self.all_max, self.device)

    def _callbacks(self) -> list[Any]:
        return list(self.trainer.callbacks)  # type: ignore[attr-defined]

    @property
    def _rl_callbacks(self) -> list[RLCallback]:
        return [callback for callback in self._callbacks() if isinstance(callback, RLCallback)]

    def _call_callbacks(self, hook: str, payload: Any) -> None:
        for callback in self._rl_callbacks:
            getattr(callback, hook)(self.trainer, self, payload)

    def _note_missing_routes(self, rollouts: Rollouts) -> None:
        """Warns once if the engine's expert choices are not replayed."""
        if not self._routes_noted and self.actor.has_experts and all(routes is None for routes in rollouts.routes):
            log.warning(
                "Routing replay is off: the policy is a mixture-of-experts model, but the engine didn't record its "
                "expert choices. Use TransformersEngine, or VLLMEngine on GPUs with "
                "engine_args.enable_return_routed_experts=true. Inference servers don't support it."
            )
        self._routes_noted = True

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def _frozen_fingerprints(self) -> dict[str, int]:
        """Returns the fingerprints of frozen parameters, and of the reference, so that checkpoints can omit them."""
        found = {name: fingerprint([p]) for name, p in self._frozen_parameters()}
        return found if self.reference is None else {**found, "reference.": fingerprint(self.reference)}

    def _frozen_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the named parameters of policy and critic that aren't trained."""
        named = [(name, p) for name, p in self.named_parameters(remove_duplicate=False) if not p.requires_grad]
        return [(name, p) for name, p in named if not name.startswith(("reward_models.", "reference.", "teachers."))]

    def _reference_moved(self, strategy: Strategy | None) -> bool:
        """Whether the reference differs from the model it was built from.

        FSDP2 requests names before it loads, so there the result is True if anything may change the reference.
        """
        if self._start is None or "reference." not in self._start:
            return False
        if not isinstance(strategy, ModelParallelStrategy):
            return fingerprint(self.reference or ()) != self._start["reference."]
        return not type(self).__module__.startswith("lightrl.") or any(map(may_move_reference, self._callbacks()))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the entries that can't be reloaded from their source.

        Omits reward models, teachers, an unchanged reference, and parameters of policy and critic that were built
        frozen (the base of a LoRA run, `freeze`) and are unchanged (not checked for shards). Randomly initialized
        parameters are kept.
        """
        state, start = super().state_dict(*args, **kwargs), self._start
        try:
            strategy: Any = self.trainer.strategy
        except RuntimeError:  # built without a trainer
            strategy = None
        frozen = [] if self.actor_spec.random_init else self._frozen_parameters()
        if start is not None:
            frozen = [(name, p) for name, p in frozen if name in start]
            if not strategies.shards(strategy):
                frozen = [(name, p) for name, p in frozen if fingerprint([p]) == start[name]]
        moved, omitted = self._reference_moved(strategy), {name for name, _ in frozen}
        dropped = ("reward_models.", "teachers.") if moved else ("reward_models.", "teachers.", "reference.")
        return {name: value for name, value in state.items() if not name.startswith(dropped) and name not in omitted}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the model specs, counters, and random states. Collective."""
        from lightrl.algorithms import run_record

        super().on_save_checkpoint(checkpoint)
        checkpoint["lightrl"] |= {
            **{name: int(getattr(self, name)) for name in COUNTERS},
            "rng": run_record.collect_random_states(),
            "optimizers": self._optimizer_names(),
        }

    def _optimizer_names(self) -> list[str]:
        """Class names of the run's optimizers without the wrappers of strategies."""
        from lightrl.algorithms.run_record import innermost

        return [type(innermost(optimizer)).__name__ for optimizer in self.trainer.optimizers]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores counters and random states. Raises a ValueError if the checkpoint doesn't match this module."""
        super().on_load_checkpoint(checkpoint)
        if self.trainer.training:
            stored = checkpoint["lightrl"]
            for name in COUNTERS:
                setattr(self, name, stored[name])
            self._restored_rng = stored["rng"]
            self._restored_optimizers = stored.get("optimizers")

    def on_train_start(self) -> None:
        """Restores random states as late as possible, so that setup doesn't advance them.

        Raises a ValueError if the checkpoint has the state of a different optimizer, which torch would load silently.
        """
        super().on_train_start()
        stored, self._restored_optimizers = self._restored_optimizers, None
        if stored is not None and stored != (own := self._optimizer_names()):
            raise ValueError(
                f"optimizer={', '.join(own)}: the checkpoint has the state of {', '.join(stored)}. Resume with that "
                "optimizer, or start a new run from the checkpoint's weights (lightrl export)."
            )
        if self._restored_rng is not None:
            from lightrl.algorithms.run_record import restore_random_states

            restore_random_states(self._restored_rng)
            self._restored_rng = None

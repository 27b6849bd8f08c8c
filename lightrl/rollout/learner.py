"""The module that is trained on rollouts, callbacks for rollouts, and the engine that follows the module's weights."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightrl.compat.lightning import KeepsHooks
from lightrl.compat.transformers import as_saved
from lightrl.distributed import strategies
from lightrl.distributed.strategies import fingerprint
from lightrl.engines.base import TOLERANCE, Engine, StaleWeightsError
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.models.turns import harmless_id, placeholder_ids
from lightrl.records import EngineContext, Experience, GenerationRequest, Rollouts, RowBatch, SamplingParams
from lightrl.rollout.collector import ScoredGroup

if TYPE_CHECKING:
    from lightrl.records import Routes


class RolloutLearner(LightningModule, ABC):
    """Base class of modules trained on rollouts: the interface for the data module, the engine host, and callbacks."""

    actor: PolicyModel  # the policy, available after `configure_model`
    actor_spec: ModelSpec  # the policy's model, whose tokenizer, processor, and dtype data module and engine also use
    ptx_coef: float = 0.0  # coefficient of the SFT loss; 0 disables it
    default_group_size: int = 1  # trajectories per prompt unless the data module sets it
    needs_rewards: bool = False  # completions without a reward can't be used for training
    outside_changes: int = 0  # weight changes that were not optimizer steps of Lightning
    _noted: tuple[int, int] | None = None

    @property
    def policy_version(self) -> int:
        """Number of changes to the policy's weights, by optimizer steps or otherwise; identifies them for engines."""
        return int(self.trainer.global_step) + self.outside_changes

    def note_weight_changes(self) -> None:
        """Increases `policy_version` if something other than an optimizer step has changed the weights. Collective.

        Called before each generation and each step, so that engines also receive changes made by a callback, a manual
        optimizer step, or an SFT warm start.
        """
        now = self.policy_version, strategies.fingerprint(self.actor)
        changed = self._noted is not None and self._noted[0] == now[0] and self._noted[1] != now[1]
        if bool(self.all_max(torch.tensor(float(changed)))):
            self.outside_changes += 1
        self._noted = self.policy_version, now[1]

    @abstractmethod
    def named_policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, full tensor) for each actor parameter, with LoRA merged.

        Collective if the weights are sharded: every rank must iterate to the end. Tied parameters appear once.
        """

    def policy_adapter(self) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
        """Returns the actor's LoRA adapter in PEFT format: an iterator of (name, full tensor), and its config."""
        from lightrl.models.lora import adapter_config, named_adapter_weights

        assert self.actor_spec.lora is not None, "only an actor with LoRA has an adapter"
        return named_adapter_weights(self.actor), adapter_config(self.actor, self.actor_spec.lora)

    @torch.no_grad()
    def token_logprobs(
        self,
        token_ids: Tensor,
        routes: Sequence[Routes | None] = (),
        *,
        inputs: list[dict[str, Any]] | None = None,
        start: int = 1,
    ) -> Tensor:
        """Computes (B, T) log-probs at temperature 1 of (B, T) tokens without padding, for the weight-sync check.

        `routes` are the experts of each sequence's tokens, and `inputs` B dictionaries of media inputs, by default text
        only. Columns before `start`, the first token to score, at least 1, are undefined.
        """
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        response = mask.clone()
        response[:, :start] = False
        rows: dict[str, Any] = {"token_ids": token_ids, "attention_mask": mask, "response_mask": response}
        with self.trainer.precision_plugin.forward_context():
            logprobs: Tensor = self.actor(RowBatch(**rows, inputs=inputs or [], routes=list(routes))).logprobs
        return logprobs

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sums over ranks."""
        return strategies.all_reduce(self.trainer.strategy, tensor, "sum")

    def all_max(self, tensor: Tensor) -> Tensor:
        """Returns the maximum over ranks."""
        return strategies.all_reduce(self.trainer.strategy, tensor, "max")

    @property
    def needs_groups(self) -> bool:
        """Whether advantages compare the trajectories of a prompt, which requires a group size of at least 2."""
        return False

    @property
    def scores_rollouts(self) -> bool:
        """Whether reward models of the module add to the rewards."""
        return False


HOOKS = ("on_rollout_scored", "on_experience_made", "on_policy_updated")


class RLCallback(KeepsHooks, Callback):
    """A Lightning callback with three more hooks, called in this order for each rollout:

    `on_rollout_scored`, `on_experience_made`, `on_policy_updated`.

    Set the two attributes to False to let the module skip work that the callback doesn't need. Subclasses don't
    inherit them.

    Attributes:
        reads_old_logprobs: Whether the callback may read `experience.old_logprobs` or change the number of updates. If
            False, the module skips that forward pass when it makes exactly one update per rollout.
        reads_all_rows: Whether the callback may read update metrics that depend on every sequence, such as
            `policy/entropy`. If False, the module may skip sequences without a gradient.
    """

    kept_hooks = ("setup", "state_dict", "load_state_dict")
    reads_old_logprobs: bool = True
    reads_all_rows: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Resets the attributes that a subclass doesn't declare."""
        super().__init_subclass__(**kwargs)
        for name in ("reads_old_logprobs", "reads_all_rows"):
            if name not in cls.__dict__:
                setattr(cls, name, True)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Raises a ValueError for modules that never call the hooks, since they don't train on rollouts."""
        if not isinstance(pl_module, RolloutLearner):
            raise ValueError(
                f"callback {type(self).__name__} with {type(pl_module).__name__}: this module doesn't train on "
                "rollouts and would never call it. Remove the callback."
            )

    def on_rollout_scored(self, trainer: Trainer, pl_module: Any, rollouts: Rollouts) -> None:
        """Called after rewards are assigned, before advantages are computed."""

    def on_experience_made(self, trainer: Trainer, pl_module: Any, experience: Experience) -> None:
        """Called after log-probs, values, and advantages are computed, before the first update."""

    def on_policy_updated(self, trainer: Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        """Called after the last update of a rollout, before its metrics are logged."""


def reads_all_rows(callback: Callback) -> bool:
    """Whether a callback may read metrics of every sequence. False for Lightning's, and if declared."""
    if isinstance(callback, RLCallback):
        return callback.reads_all_rows
    return not _is_known(callback) and bool(getattr(callback, "reads_all_rows", True))


def may_move_reference(callback: Callback) -> bool:
    """Whether a callback may change the reference. False for Lightning's and LightRL's own unless declared."""
    return bool(getattr(callback, "moves_reference", not _is_known(callback)))


def _is_known(callback: Callback) -> bool:
    return type(callback).__module__.split(".")[0] in ("lightning", "pytorch_lightning", "lightrl")


def require_rl_callbacks(callbacks: list[Any]) -> None:
    """Rejects a callback with one of LightRL's hooks, which would never be called, that is not an `RLCallback`."""
    for callback in callbacks:
        hooks = [hook for hook in HOOKS if hasattr(callback, hook)]
        if hooks and not isinstance(callback, RLCallback):
            raise ValueError(
                f"callback {type(callback).__name__}: defines {', '.join(hooks)} but is not an RLCallback. Derive it "
                "from lightrl.algorithms.RLCallback."
            )


# ---- the engine --------------------------------------------------------------------------------------------------

NUM_SEQUENCES, NUM_TOKENS = 2, 16
"""Number of sequences that the weight-sync check compares, and of tokens per sequence. Mixture-of-experts models use
additional sequences, about eight tokens per expert, if the engine doesn't replay routes."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class WeightSync(Callback):
    """Pushes the policy's weights to the engine before it generates, whenever they have changed.

    A push happens when the engine's `policy_version` differs from the module's. A resumed run always starts with a
    push, because checkpoints don't store the engine's version. Engines that support LoRA receive only the adapter.
    `RolloutDataModule` uses a default instance unless the trainer has such a callback. Add it to change its settings,
    or a subclass to replace `ensure_synced`.

    After each push, a weight-sync check (the *canary*) compares the log-probs of a few fixed tokens between engine and
    trainer. The tokens come from the run's first prompts, or are random if there are none yet. The run stops if the
    mean difference exceeds `tolerance`, because training on samples from stale weights would fail silently. For prompts
    with media, the check also samples a few tokens and compares their log-probs, which verifies the vision tower and
    its adapters.

    Two more checks detect errors below the tolerance. The engine's log-probs must not be identical to those before
    the push if the trainer's have changed. If the trainer's changed by ten times the last gap, the engine's must have
    changed at least half as much.

    Args:
        canary: Whether to run the check after each push.
        tolerance: Maximum mean absolute difference in nats. Defaults to 5e-4 for a float32 engine, 0.05 for float16,
            and 0.5 for bfloat16 (rounding in a pretrained 135M model is 0.05 to 0.16). Setting it disables the two
            other checks.

    Raises:
        StaleWeightsError: If the log-probs differ by more than the tolerance, from `ensure_synced`.
    """

    def __init__(self, canary: bool = True, tolerance: float | None = None) -> None:
        self.canary = canary
        self.tolerance = tolerance
        self.last_gap: float | None = None
        """Mean absolute log-prob difference in nats of the last check."""
        self.last_media_gap: float | None = None
        """Mean absolute log-prob difference in nats after a prompt with media; None for text-only runs."""
        self._frozen: int | None = None  # fingerprint at the last push
        self._prompts: list[list[int]] = []
        self._media: GenerationRequest | None = None
        self._answered: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # tokens, engine's, trainer's

    def show(self, requests: Sequence[GenerationRequest]) -> None:
        """Stores the first prompts, and the first request with media, for the check. Called from any thread."""
        self._prompts = self._prompts or [request.token_ids for request in requests if not request.media]
        self._media = self._media or next((request for request in requests if request.media), None)

    def ensure_synced(self, module: RolloutLearner, engine: Engine) -> None:
        """Pushes the module's weights to the started engine if their versions differ. Collective."""
        if engine.policy_version == module.policy_version:
            return
        with torch.no_grad():
            if engine.pushes == "adapter":
                if self._base_moved(module):
                    raise ValueError(
                        f"lora: the base weights have changed, but {type(engine).__name__} receives only the adapter. "
                        'Set lora_sync="merged".'
                    )
                engine.load_adapter(*module.policy_adapter(), policy_version=module.policy_version)
            else:
                weights = module.named_policy_weights()
                if engine.pushes == "checkpoint":
                    weights = as_saved(module.actor.lm, weights)
                engine.load_weights(weights, policy_version=module.policy_version)
            if self.canary:
                self._check(module, engine)
                self._check_media(module, engine)

    def _base_moved(self, module: RolloutLearner) -> bool:
        """Whether the base weights of adapters have changed since the last push. Collective."""
        named, before = module.actor.lm.named_parameters(), self._frozen
        self._frozen = fingerprint(p for name, p in named if not p.requires_grad and "lora_" not in name)
        return bool(module.all_max(torch.tensor(float(before not in (None, self._frozen)))))

    def _check(self, module: RolloutLearner, engine: Engine) -> None:
        tokens = self._tokens(module, engine, min(NUM_TOKENS, engine.max_model_len - 1))
        for placeholder in placeholder_ids(module.actor.lm.config).values():  # has no media here
            tokens[tokens == placeholder] = harmless_id(module.actor.lm.config)
        routes = [module.actor.stream.routers.arbitrary(*tokens.shape)] if engine.replays_routes else []
        theirs = torch.tensor(engine.logprobs(tokens.tolist(), *routes))
        ours = module.token_logprobs(tokens.to(module.device), *routes).cpu()[:, 1:]
        if bool(module.all_max((~ours.isfinite()).any().float())):
            raise ValueError(
                f"The policy's log-probs are not finite after {module.policy_version} updates: training has diverged. "
                "Lower the learning rate or max_grad_norm."
            )
        gaps = (ours - theirs).abs()
        self.last_gap = float(gaps.mean())
        tolerance = self._tolerance(engine)
        behind = self._why_behind(tokens, theirs, ours, tolerance) if self.tolerance is None else ""
        worst = bool(module.all_max(torch.tensor(float(bool(behind) or not self.last_gap <= tolerance))))
        self._answered = None if worst else (tokens, theirs, ours)
        if worst:
            version = engine.policy_version
            engine.mark_stale()
            raise StaleWeightsError(
                f"After pushing the weights of policy version {version} the engine's log-probs differ from the "
                f"trainer's by {self.last_gap:.2e} on average (maximum {gaps.max():.2e}; allowed: {tolerance:g} on "
                f"average{behind}). The engine holds stale or incomplete weights. Check that its dtype matches the "
                "trainer's precision. Raise WeightSync.tolerance only if the difference is due to rounding."
            )

    def _check_media(self, module: RolloutLearner, engine: Engine) -> None:
        """Compares the log-probs of tokens that the engine samples after a prompt with media. Collective."""
        request = self._media
        if not bool(module.all_max(torch.tensor(float(request is not None)))):
            return
        if request is None:  # other ranks have one, and the forward pass is collective
            module.token_logprobs(torch.zeros((1, 2), dtype=torch.long, device=module.device))
            gap = 0.0
        else:
            room = min(NUM_TOKENS, engine.max_model_len - len(request.token_ids))
            asked = replace(request, sampling=SamplingParams(max_new_tokens=room, ignore_eos=True), seed=0)
            (group,) = engine.generate_all([asked])
            new = group.completions[0]
            start, ids = len(request.token_ids), torch.tensor([[*request.token_ids, *new.token_ids]])
            ours = module.token_logprobs(ids.to(module.device), [new.routes], inputs=[request.inputs], start=start)
            gap = float((ours[0, start:].cpu() - torch.tensor(new.logprobs)).abs().mean())
            self.last_media_gap = gap
        tolerance = self._tolerance(engine)
        worst = float(module.all_max(torch.tensor(gap if gap == gap else float("inf"))))
        if worst > tolerance:
            engine.mark_stale()
            raise StaleWeightsError(
                f"engine={type(engine).__name__} with {type(module.actor.lm).__name__}: after a prompt with media, the "
                f"engine's log-probs differ from the trainer's by {worst:.2e} on average (allowed: {tolerance:g}), "
                "but agree for text. The engine is missing an adapter or weights of the vision tower, or uses a "
                "different attention mask for media. Use TransformersEngine, or train on text only."
            )

    def _tolerance(self, engine: Engine) -> float:
        return self.tolerance or TOLERANCE.get(engine.dtype or "float32", TOLERANCE["bfloat16"])

    def _tokens(self, module: RolloutLearner, engine: Engine, length: int) -> torch.Tensor:
        """(B, length) tokens of the concatenated prompts, or random tokens if the prompts are too short.

        If the engine chooses the experts, sequences of random tokens follow, to cover most experts.
        """
        config = module.actor.lm.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        known = [token for prompt in self._prompts for token in prompt][: NUM_SEQUENCES * length]
        if len(known) == NUM_SEQUENCES * length:
            tokens = torch.tensor(known).view(NUM_SEQUENCES, length)
        else:
            tokens = torch.randint(config.vocab_size, (NUM_SEQUENCES, length), generator=generator)
        if engine.replays_routes or not module.actor.has_experts:
            return tokens
        experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 0)
        rows = -(-8 * experts // (length * (getattr(config, "num_experts_per_tok", None) or 1)))
        return torch.cat([tokens, torch.randint(config.vocab_size, (rows, length), generator=generator)])

    def _why_behind(self, tokens: torch.Tensor, theirs: torch.Tensor, ours: torch.Tensor, tolerance: float) -> str:
        """Returns why the change since the last check suggests a failed push, or an empty string."""
        if self._answered is None or not torch.equal(tokens, self._answered[0]):
            return ""
        _, their_last, our_last = self._answered
        if torch.equal(theirs, their_last) and float((ours - our_last).abs().mean()) > tolerance / 100:
            return "; the engine's log-probs are identical to those before the push"
        rounding = float((our_last - their_last).abs().mean())
        moved = float((ours - their_last).abs().mean())  # the gap without a push
        half = moved > 10 * rounding and float((ours - theirs).abs().mean()) > moved / 2
        return "; the engine changed less than half as much as the trainer" if half else ""


PRECISION_TO_DTYPE = {"bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float32", "transformer": "bfloat16"}


class EngineHost:
    """Starts the engine, keeps its weights in sync with the policy, and passes its samples to callbacks."""

    def __init__(self, data: Any, run: Any = None) -> None:
        self.data = data
        self.run = run  # what the run's prompts and tokens depend on
        self._default_sync = WeightSync()

    def context(self) -> EngineContext:
        """Returns the engine's context in this run."""
        trainer, module = self.data.trainer, self.data.learner
        spec, actor = module.actor_spec, getattr(module, "actor", None)
        computed = getattr(trainer.strategy, "param_dtype", None)  # FSDP2Strategy's
        if computed is None and str(trainer.precision).startswith("32") and spec.dtype in ("bfloat16", "float16"):
            computed = spec.dtype  # without autocast, the weights' dtype
        # Engines apply adapters only to unquantized language models loaded from the model directory.
        merged = spec.lora is None or spec.lora.quantize_4bit
        if not merged and actor is not None:
            from lightrl.models.lora import adapts_media

            merged = adapts_media(actor.lm)
        return EngineContext(
            model_path=spec.path,
            dtype=computed or PRECISION_TO_DTYPE[str(trainer.precision).split("-")[0]],
            rank=self.data.rank,
            local_rank=int(trainer.local_rank),
            world_size=self.data.world_size,
            device=str(trainer.strategy.root_device),
            random_init=bool(spec.random_init),
            lora_rank=0 if merged or spec.lora is None else spec.lora.r,
            **self.data.engine_needs,
        )

    def ready(self) -> float:
        """Starts and wakes the engine, pushes changed weights, and returns the elapsed seconds. Collective.

        Raises a StaleWeightsError if the `WeightSync` callbacks did not push the current version.
        """
        begin, engine, module = time.perf_counter(), self.data.engine, self.data.learner
        if not engine.started:
            rank_zero_info(f"Starting {type(engine).__name__} with {module.actor_spec.name} ...")
            engine.start(self.context())
            rank_zero_info(f"{type(engine).__name__} started in {time.perf_counter() - begin:.1f} s.")
        engine.wake()
        module.note_weight_changes()
        for sync in self._syncs():
            sync.ensure_synced(module, engine)
        if engine.policy_version != module.policy_version:
            raise StaleWeightsError(
                f"The engine holds policy version {engine.policy_version} (-1: never synced), the trainer "
                f"{module.policy_version}: {', '.join(type(sync).__name__ for sync in self._syncs())} did not push "
                "the weights. Remove it from trainer.callbacks to use WeightSync."
            )
        return time.perf_counter() - begin

    # ---- callbacks ---------------------------------------------------------------------------------------------

    def checks(self) -> list[Any]:
        """Returns the trainer's callbacks that check trajectories, such as `TrajectoryLogprobCheck`."""
        return [callback for callback in self.data.trainer.callbacks if hasattr(callback, "check_trajectories")]

    def _syncs(self) -> list[WeightSync]:
        own = [callback for callback in self.data.trainer.callbacks if isinstance(callback, WeightSync)]
        return own or [self._default_sync]

    def show(self, requests: Sequence[GenerationRequest]) -> None:
        """Passes the next requests to the `WeightSync` callbacks, for the weight-sync check."""
        for sync in self._syncs():
            sync.show(requests)

    def check_trajectories(self, groups: Sequence[ScoredGroup], sampling: SamplingParams) -> None:
        """Runs the checks on a training rollout, without prompts that contain media. The engine must be idle."""
        trajectories = [t for group in groups if not any(group.prompt.media) for t in group.trajectories]
        for check in self.checks():
            check.check_sampling(sampling)
            check.check_trajectories(self.data.engine, trajectories, self.data.tokenizer)

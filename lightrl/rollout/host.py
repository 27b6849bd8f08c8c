"""The engine's lifecycle in a run: start, weight sync, sleep, and close."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightrl.engines.base import Engine, StaleWeightsError
from lightrl.records import EngineContext, GenerationRequest, Prompts, SamplingParams
from lightrl.rollout.collation import ScoredGroup
from lightrl.rollout.learner import EngineSync, RolloutLearner, TrajectoryCheck
from lightrl.rollout.weight_sync import WeightSync

log = logging.getLogger(__name__)

PRECISION_TO_DTYPE = {"bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float32", "transformer": "bfloat16"}


class EngineHost:
    """Starts an engine, keeps its weights in sync with the policy, passes its samples to callbacks, and closes it.

    Args:
        engine: The engine, not started.

    Attributes:
        module: The module that owns the policy, set by `attach`.
    """

    module: RolloutLearner

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._needs: dict[str, Any] = {}
        self._default_sync = WeightSync()

    def attach(self, module: RolloutLearner, **needs: Any) -> None:
        """Sets the run's module and checks the engine's settings.

        Args:
            module: The module that owns the policy.
            needs: Fields of `EngineContext` that don't come from the module or its trainer.
        """
        self.module, self._needs = module, needs
        if not self.engine.started:
            self.engine.check(self.context())

    def context(self) -> EngineContext:
        """Returns the engine's context in this run."""
        trainer: Any = self.module.trainer
        spec, actor = self.module.actor_spec, getattr(self.module, "actor", None)
        computed = getattr(trainer.strategy, "param_dtype", None)  # FSDP2Strategy's
        # Engines apply adapters only to unquantized language models loaded from the model directory.
        merged = spec.lora is None or spec.lora.quantize_4bit
        if not merged and actor is not None:
            from lightrl.models.lora import adapts_media

            merged = adapts_media(actor.lm)
        return EngineContext(
            model_path=spec.path,
            dtype=computed or PRECISION_TO_DTYPE[str(trainer.precision).split("-")[0]],
            rank=int(trainer.global_rank),
            local_rank=int(trainer.local_rank),
            world_size=int(trainer.world_size),
            device=str(trainer.strategy.root_device),
            random_init=bool(spec.random_init),
            lora_rank=0 if merged or spec.lora is None else spec.lora.r,
            **self._needs,
        )

    def ready(self) -> float:
        """Starts and wakes the engine, and pushes the policy's weights if they have changed. Collective.

        Returns:
            Elapsed time in seconds.

        Raises:
            StaleWeightsError: If the `EngineSync` callbacks did not push the current version.
        """
        begin, engine, module = time.perf_counter(), self.engine, self.module
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

    def sleep(self) -> None:
        """Frees GPU memory for the trainer, if the engine is configured to sleep."""
        self.engine.sleep()

    def close(self) -> None:
        """Stops the engine within a few seconds, even if it hangs."""
        self.engine.close()

    # ---- callbacks ---------------------------------------------------------------------------------------------

    def checks(self) -> list[TrajectoryCheck]:
        """Returns the trainer's callbacks that check trajectories."""
        return [callback for callback in self._callbacks() if isinstance(callback, TrajectoryCheck)]

    def _syncs(self) -> list[EngineSync]:
        return [callback for callback in self._callbacks() if isinstance(callback, EngineSync)] or [self._default_sync]

    def _callbacks(self) -> list[Any]:
        return self.module.trainer.callbacks  # type: ignore[attr-defined, no-any-return]

    def show(self, prompts: Prompts, sampling: SamplingParams, *, first_turn_only: bool) -> None:
        """Passes the next prompts to the `EngineSync` callbacks, for the weight-sync check.

        Args:
            prompts: This rank's prompts.
            sampling: Sampling settings.
            first_turn_only: Whether the first request contains exactly these tokens, which multi-turn episodes don't
                guarantee.
        """
        if not any(prompts.media):
            for sync in self._syncs():
                sync.show_prompts(prompts.token_ids)
        elif first_turn_only:
            self.show_media(prompts.request(next(i for i, media in enumerate(prompts.media) if media), sampling, 0, 1))

    def show_media(self, request: GenerationRequest) -> None:
        """Passes a request with media to the `EngineSync` callbacks."""
        for sync in self._syncs():
            sync.show_media(request)

    def check_trajectories(self, groups: Sequence[ScoredGroup], sampling: SamplingParams, tokenizer: Any) -> None:
        """Runs the `TrajectoryCheck` callbacks on a training rollout, without prompts that contain media."""
        trajectories = [t for group in groups if not any(group.prompt.media) for t in group.trajectories]
        for check in self.checks():
            check.check_sampling(sampling)
            check.check_trajectories(self.engine, trajectories, tokenizer)

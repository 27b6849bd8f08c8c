"""Asking a data module's engine for groups: ready first, again after a restart.

The functions take the `RolloutDataModule` they work for. P prompts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightrl.data.ahead import may_restart
from lightrl.engines.base import EngineContext, EngineRestartedError, StaleWeightsError
from lightrl.types import CompletionGroup, Prompts, SamplingParams

if TYPE_CHECKING:
    from lightrl.data.rollout import RolloutDataModule

__all__ = ["engine_context", "ready_engine", "recover_engine", "sample_groups", "some_groups"]

log = logging.getLogger(__name__)

PRECISION_TO_DTYPE = {"bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float32", "transformer": "bfloat16"}


def ready_engine(data: RolloutDataModule) -> float:
    """Starts the engine if need be, pushes the weights, and refuses to go on with others than the policy's.

    Returns:
        the seconds it took.
    """
    begin = time.perf_counter()
    if not data.engine.started:
        data.engine.start(engine_context(data))
    data.engine.wake()
    if data.ensure_synced is not None:
        data.ensure_synced()
    module: Any = data.trainer.lightning_module  # type: ignore[union-attr]
    if data.engine.policy_version != module.policy_version:
        raise StaleWeightsError(
            f"The engine holds policy version {data.engine.policy_version} (-1: never synced), the trainer "
            f"{module.policy_version}: add the WeightSync callback (trainer.callbacks), which pushes the weights."
        )
    return time.perf_counter() - begin


def engine_context(data: RolloutDataModule) -> EngineContext:
    """What the run tells the engine."""
    trainer: Any = data.trainer
    lora = trainer.lightning_module.actor_spec.lora
    lengths = [len_ for s in data._sets.values() if (len_ := s.max_prompt_tokens) is not None]
    return EngineContext(
        model_path=trainer.lightning_module.actor_spec.path,
        dtype=PRECISION_TO_DTYPE[str(trainer.precision).split("-")[0]],
        seed=data.seed,
        rank=data.rank,
        local_rank=int(trainer.local_rank),
        world_size=data.world_size,
        device=str(trainer.strategy.root_device),
        max_prompt_tokens=max(lengths) if lengths else None,
        max_new_tokens=max(data.sampling.max_new_tokens, data.eval_sampling.max_new_tokens),
        random_init=bool(trainer.lightning_module.actor_spec.random_init),
        lora_rank=0 if lora is None or lora.quantize_4bit else lora.r,
    )


def sample_groups(
    data: RolloutDataModule,
    prompts: Prompts,
    sampling: SamplingParams,
    group_size: int,
    seeds: list[int],
    recover: bool,
) -> Iterator[CompletionGroup]:
    """All groups as they finish. An engine that restarted gets the weights again and the lost prompts anew.

    Seeds belong to prompts, so what is sampled again is what would have been sampled.
    """
    pending, restarts = list(range(len(prompts))), 0
    while pending:
        try:
            for group in some_groups(data, prompts, list(pending), sampling, group_size, seeds):
                pending.remove(group.prompt_index)
                yield group
        except EngineRestartedError as error:
            if not recover:
                raise
            restarts = recover_engine(data, error, restarts, len(pending))


def some_groups(
    data: RolloutDataModule,
    prompts: Prompts,
    rows: list[int],
    sampling: SamplingParams,
    group_size: int,
    seeds: list[int],
) -> Iterator[CompletionGroup]:
    """The groups of some of the prompts."""
    for group in data.engine.generate(
        prompts[rows], sampling, num_completions=group_size, seeds=[seeds[i] for i in rows]
    ):
        yield replace(group, prompt_index=rows[group.prompt_index])


def recover_engine(data: RolloutDataModule, error: EngineRestartedError, restarts: int, lost: int) -> int:
    """Makes an engine that restarted ready; the number of restarts."""
    restarts = may_restart(error, restarts, data.world_size)
    log.warning("%s Pushing the weights and sampling %d lost prompts again.", error, lost)
    ready_engine(data)
    return restarts

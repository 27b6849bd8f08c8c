"""What a `RolloutDataModule` refuses: numbers out of range, and what its engine or module cannot do with it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightrl.types import SamplingParams

if TYPE_CHECKING:
    from lightrl.data.rollout import RolloutDataModule

__all__ = ["check_arguments", "check_module"]

log = logging.getLogger(__name__)

COUNTS = (
    *("group_size", "eval_group_size", "prompts_per_rollout", "rollouts_per_epoch", "eval_batch_size"),
    "ptx_batch_size",
)


def check_arguments(data: RolloutDataModule, *, rewards: bool) -> None:
    """Checks a data module's own numbers.

    Raises:
        ValueError: a number is out of range, or an argument needs another one; the message names them.
    """
    for name in COUNTS:
        if getattr(data, name) < 1:
            raise ValueError(f"{name}={getattr(data, name)}: must be at least 1.")
    for name in ("max_refills", "staleness"):
        if getattr(data, name) < 0:
            raise ValueError(f"{name}={getattr(data, name)}: must be 0 (off) or more.")
    if data.max_refills and (data.group_size < 2 or not rewards):
        raise ValueError(
            f"max_refills={data.max_refills} drops groups without reward spread: it needs group_size of at least 2 (it "
            f"is {data.group_size}) and reward functions in `rewards`, whose results are known before the update."
        )
    if data.sampling.temperature == 0:
        raise ValueError("sampling.temperature=0: greedy completions of a prompt are all equal; train above 0.")
    _check_overlap(data)


def _check_overlap(data: RolloutDataModule) -> None:
    """What `staleness` and `streaming` need of the engine, and what excludes them."""
    wanted = f"staleness={data.staleness}" if data.staleness else "streaming=True" if data.streaming else ""
    if not wanted:
        return
    if data.staleness and data.streaming:
        raise ValueError(
            f"staleness={data.staleness} with streaming=True: both hide generation behind the update, the first by "
            "sampling ahead, the second within one rollout. Take one."
        )
    if not data.engine.concurrent:
        raise ValueError(
            f"{wanted} with engine={type(data.engine).__name__} in the trainer's process: it cannot sample while the "
            "trainer computes. Take VLLMEngine(in_process=False), or leave it off."
        )
    if getattr(data.engine, "sleep_level", 0):
        raise ValueError(
            f"{wanted} with engine.sleep_level={data.engine.sleep_level}: an engine that samples beside the update "  # type: ignore[attr-defined]
            "never sleeps. Set sleep_level=0."
        )
    if data.streaming and (data.max_refills or data.ptx is not None):
        name = "max_refills" if data.max_refills else "ptx"
        raise ValueError(
            f"streaming=True with {name}: which groups are in the batch, or how much the supervised rows weigh, is "
            f"known at its end only. Drop one of the two; staleness=1 goes with {name}."
        )


def check_module(data: RolloutDataModule, module: Any) -> None:
    """Refuses what a data module and the module it trains cannot do together.

    With `staleness` it first has the module correct its loss for samples of older policies, unless it is told not to.
    """
    if data.staleness and data.off_policy_correction and hasattr(module, "correct_off_policy"):
        module.correct_off_policy()
    _check_sampling(data.sampling, getattr(module, "loss", None))
    if getattr(getattr(module, "advantage", None), "needs_groups", False) and data.group_size < 2:
        raise ValueError(
            f"group_size={data.group_size} with {type(module).__name__} ({type(module.advantage).__name__}): its "
            "advantages compare the completions of one prompt, so it needs group_size of at least 2 (8 is usual)."
        )
    if data.max_refills and getattr(module, "reward_model_specs", None):
        raise ValueError(
            f"max_refills={data.max_refills} with reward_models: a group's spread is not known before the module's "
            "reward models have scored it. Set max_refills=0, or serve the model as a reward function."
        )
    coefficient = getattr(module, "ptx_coef", 0.0)
    if (data.ptx is not None) != (coefficient > 0):
        raise ValueError(
            f"ptx={'None' if data.ptx is None else data.ptx.label} (data) with ptx_coef={coefficient} (module): a "
            "supervised loss needs both, rows and a coefficient above 0; set both or neither."
        )
    if data.streaming:
        refuse = getattr(module, "refuse_streaming", None)
        if refuse is None:
            raise ValueError(f"streaming=True with {type(module).__name__}: it does not learn from groups one by one.")
        refuse()


def _check_sampling(sampling: SamplingParams, loss: Any) -> None:
    """The trainer computes log-probs of the full softmax; what the engine cuts from it makes a difference."""
    plain = SamplingParams()
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens", "regex", "json_schema")
    cuts = [f"{n}={getattr(sampling, n)!r}" for n in names if getattr(sampling, n) != getattr(plain, n)]
    if cuts and getattr(loss, "reads_engine_logprobs", False):
        raise ValueError(
            f"sampling with {', '.join(cuts)} and loss={type(loss).__name__}: the engine's log-probs are those "
            "of a cut distribution, and comparing them with the trainer's would weight every token wrongly. Sample "
            "with temperature alone, or drop the correction (with staleness: off_policy_correction=False)."
        )
    if cuts:
        log.warning(
            "Training samples come from a distribution cut by %s, while log-probs are those of the full softmax: "
            "the gradient is slightly biased. Temperature alone is exact.",
            ", ".join(cuts),
        )

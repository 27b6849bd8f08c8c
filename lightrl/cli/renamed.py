"""Renamed YAML keys and classes; errors for old configurations list the new names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KEYS = {
    "data.eval_answer": "data.evaluation.answer",
    "data.eval_batch_size": "data.evaluation.batch_size",
    "data.eval_group_size": "data.evaluation.group_size",
    "data.eval_prompts": "data.evaluation.prompts",
    "data.eval_sampling": "data.evaluation.sampling",
    "data.in_flight": "data.schedule: InFlight",
    "data.label_column": "data.rewards.label_column",
    "data.max_refills": "data.dynamic_sampling_rounds",
    "model.minibatch_size": "model.updates.minibatch_size",
    "model.micro_batch_tokens": "model.updates.micro_batch_tokens",
    "model.max_grad_norm": "model.updates.max_grad_norm",
    "model.max_skipped_updates": "model.updates.max_skipped_updates",
    "model.off_policy_correction": "model.updates.off_policy_correction",
    "model.reward_clip": "model.shaping.reward_clip",
    "model.advantage_clip": "model.shaping.advantage_clip",
    "model.mask_truncated": "model.shaping.mask_truncated",
    "model.top_entropy_fraction": "model.shaping.top_entropy_fraction",
    "model.entropy_coef": "model.extra_losses.entropy_coef",
    "model.ptx_coef": "model.extra_losses.ptx_coef",
    "model.aux_loss_coef": "model.extra_losses.aux_loss_coef",
    "model.success_reward": "data.evaluation.success_reward",
    "data.on_reward_error": "data.rewards.on_reward_error",
    "data.predict_prompts": "data.evaluation.predict_prompts",
    "data.ptx_batch_size": "data.ptx.batch_size",
    "data.recipes": "data.rewards.rewards_by_label",
    "data.reward_concurrency": "data.rewards.max_concurrency",
    "data.reward_names": "data.rewards.names",
    "data.reward_timeout": "data.rewards.timeout",
    "data.reward_weights": "data.rewards.weights",
    "data.rewards_by_label": "data.rewards.rewards_by_label",
    "data.shuffle": "data.prompts.shuffle",
    "data.staleness": "data.schedule: Ahead",
}
"""Old dotted key, without `init_args` -> new key."""

CLASSES = {
    "EngineRatio": "RolloutRatio",
    "FidelityGate": "LogprobMonitor",
    "LedgerCanary": "TrajectoryLogprobCheck",
    "SampleLog": "CompletionLogger",
    "SaveRollouts": "RolloutWriter",
    "Throughput": "ThroughputMonitor",
}
"""Old class name -> new name."""

VALUES = {("on_reward_error", "none"): "skip", ("on_failure", "none"): "skip", ("layout", "tree"): "shared_prefix"}
"""(Last part of a key, old value) -> new value."""


def require_new_names(config: Any) -> None:
    """Rejects old names in configuration files, or in `{dotted key: value}` from the command line.

    Raises a ValueError that lists every renamed key, class, and value with its new name.
    """
    found = [f"{old}: renamed to {new}" for old, new in _renamed(config, "")]
    if found:
        raise ValueError("; ".join(dict.fromkeys(found)) + ". Rename them.")


def _renamed(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            parts = [part.removesuffix("+") for part in f"{path}.{key}".split(".")]
            place = ".".join(part for part in parts if part not in ("", "init_args"))
            if place in KEYS:
                yield place, KEYS[place]
            else:
                yield from _renamed(inner, place)
    elif isinstance(value, list):
        for inner in value:
            yield from _renamed(inner, path)
    elif isinstance(value, str):
        package, _, name = value.strip("[]").rpartition(".")
        if name in CLASSES and package.split(".")[0] in ("", "lightrl"):
            yield value, CLASSES[name]
        elif new := VALUES.get((path.rpartition(".")[2], value)):
            yield f"{path}: {value}", new

"""`lightrl plan`: what fits on which GPUs, before anything is downloaded.

`model` measures a model from its configuration, `memory` adds up its parts under each strategy, `time` estimates
seconds, `tables` shows them. What is wrong with the command is said here, before anything heavy loads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from lightrl.cli.plan.options import GIB, STRATEGIES, Precision
from lightrl.cli.plan.time import Job, Rates
from lightrl.compat.arguments import fraction, require_model_folder

__all__ = ["plan"]

_LEAST: dict[str, float] = {
    **dict.fromkeys(("gpus", "gpu_memory", "length", "micro_batch_tokens", "sequences"), 1),
    **dict.fromkeys(("lora", "trajectories"), 0),
    **dict.fromkeys(("response", "tflops"), 1),
    "bandwidth": 0.01,
}
"""Smallest values of the arguments of `plan`."""
_TIMED = ("response", "tflops", "bandwidth")
"""Arguments of the estimate of times."""


def plan(
    model: str | None = None,
    gpus: int = 8,
    gpu_memory: float = 80.0,
    device: Literal["cuda", "cpu"] = "cuda",
    algorithm: Literal["ppo", "grpo"] = "ppo",
    strategy: str = "all",
    precision: Precision = "bf16-mixed",
    lora: int = 0,
    reward_model: str | None = None,
    reference: bool = True,
    frozen_dtype: Literal["float32", "bfloat16"] = "bfloat16",
    gradient_checkpointing: bool = True,
    micro_batch_tokens: int = 16384,
    engine: Literal["colocated", "asleep", "elsewhere"] = "colocated",
    engine_share: float = 0.0,
    fused: bool = False,
    freeze_vision: bool = False,
    sequences: int = 64,
    length: int = 2048,
    trajectories: int = 0,
    response: float = 1024.0,
    tflops: float = 989.0,
    bandwidth: float = 3.35,
) -> None:
    """Prints the memory per GPU of a run, part by part, under each strategy, and which strategy to take.

    With `--trajectories` it also estimates the seconds per step on one node whose GPUs generate and train in turn.

    Everything follows from the model's config.json; no weights are read and no GPU is needed. Weights, gradients and
    optimizer are exact to rounding, activations are those of one forward of a block on fake tensors. The peak is
    that of a backward pass or of an optimizer step, whichever is higher.

    Args:
        model: folder with a config.json, that file, or a hub name.
        gpus: number of GPUs, over all machines.
        gpu_memory: Memory per GPU in GiB.
        device: Device of the trainer. With cpu, `gpus` is the number of processes and `gpu_memory` the memory of each.
        algorithm: ppo trains a critic of the actor's size; grpo, and its siblings, have none.
        strategy: one of ddp, fsdp2, zero1, zero2, zero3, zero2_offload, zero3_offload (or with deepspeed_ before it),
            or all.
        precision: `trainer.precision`: bf16-mixed (float32 weights), bf16-true or 32-true.
        lora: rank of an adapter on all linear layers of actor and critic; 0 trains the weights.
        reward_model: folder or hub name of a reward model inside the run (its size counts); none with reward functions.
        reference: whether the run has a KL term, and with it a reference model. With LoRA it costs nothing.
        frozen_dtype: of reference and reward model (`model.reference.dtype`).
        gradient_checkpointing: `model.actor.gradient_checkpointing`.
        micro_batch_tokens: `model.micro_batch_tokens`.
        engine: colocated: each GPU also holds an engine that stays awake; asleep: it frees its memory while the trainer
            works (`VLLMEngine.sleep_level`); elsewhere: on other GPUs or servers.
        engine_share: part of a GPU's memory that a colocated engine takes (`VLLMEngine.gpu_memory_utilization`); 0
            counts its weights and the cache of its sequences.
        fused: AdamW is fused (`optimizer.init_args.fused`), so that a step makes no temporaries.
        freeze_vision: the vision tower is frozen (`model.actor.freeze`).
        sequences: completions that an engine generates at a time; more wait.
        length: tokens of a prompt with its completion.
        trajectories: completions per rollout, all GPUs together; 0 estimates no times.
        response: mean tokens of a completion.
        tflops: a GPU's dense bfloat16 peak in 10^12 operations per second (H100: 989, A100: 312, H20: 148).
        bandwidth: of its memory in 10^12 bytes per second (H100: 3.35, A100: 2.0, H20: 4.0).

    Raises:
        ValueError: there is no such model or strategy, a number is out of range, or an argument would change nothing.
    """
    if not model:
        raise ValueError("plan: give --model, a folder with a config.json or a hub name.")
    strategy = strategy.removeprefix("deepspeed_")
    chosen: tuple[str, ...] = STRATEGIES if strategy == "all" else (strategy,)
    if strategy != "all" and strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: must be all or one of {', '.join(STRATEGIES)}.")
    _refuse_arguments(locals())
    for path in filter(None, (model, reward_model)):
        require_model_folder(path.removesuffix("config.json") or ".")
    import torch

    from lightrl.cli.plan.memory import Plan
    from lightrl.cli.plan.model import measure_model
    from lightrl.cli.plan.tables import candidates, print_memory, print_times

    compute = torch.float32 if precision == "32-true" else torch.bfloat16
    case = Plan(
        actor=measure_model(model, compute=compute, cpu=device == "cpu"),
        critic=algorithm == "ppo",
        reference=reference,
        reward=None if reward_model is None else measure_model(reward_model, compute=compute),
        gpus=gpus,
        precision=precision,
        lora=lora,
        frozen_bytes=4 if frozen_dtype == "float32" else 2,
        micro_batch_tokens=micro_batch_tokens,
        checkpointing=gradient_checkpointing,
        engine=engine == "colocated",
        engine_bytes=engine_share * gpu_memory * GIB if engine_share else None,
        fused=fused,
        frozen_vision=freeze_vision,
        sequences=sequences,
        length=length,
        cpu=device == "cpu",
        engine_width=4 if device == "cpu" and precision == "32-true" else 2,
    )
    if strategy == "all":
        chosen = candidates(case)
    if freeze_vision and not case.actor.vision:
        raise ValueError(f"freeze_vision={freeze_vision}: {model} has no vision tower.")
    if trajectories:  # the rollout may be smaller than the budget
        case = replace(case, micro_batch_tokens=min(micro_batch_tokens, -(-trajectories // gpus) * length))
    print_memory(case, chosen, gpu_memory)
    if trajectories:
        job = Job(
            parameters=case.actor.parameters,
            layers=case.actor.layers,
            hidden=case.actor.hidden,
            kv_bytes=2 * case.actor.kv_width,
            trajectories=trajectories,
            prompt=max(1.0, length - response),
            response=response,
            forwards=1 + reference,
            recompute=gradient_checkpointing,
            slots=sequences,
        )
        print_times(job, Rates.of(tflops, bandwidth), gpus)


def _refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raises a ValueError for arguments of `plan` that are out of range, or that do not go together."""
    share, length, rows = given["engine_share"], given["length"], given["micro_batch_tokens"]
    fraction("engine_share", share, "[0, 1)")
    if share and given["engine"] != "colocated":
        raise ValueError(f"engine_share={share}: an engine that is {given['engine']} takes no part; leave it out.")
    for name, bound in _LEAST.items():
        if not bound <= given[name] < float("inf"):
            raise ValueError(f"{name}={given[name]}: must be at least {bound:g}.")
    if rows < length:
        raise ValueError(
            f"micro_batch_tokens={rows}: a micro-batch has at least one whole row, of up to length={length} tokens. "
            f"Plan with micro_batch_tokens={length}, or a smaller length."
        )
    if given["trajectories"]:
        if not given["response"] < length:
            raise ValueError(f"response={given['response']}: must be below length={length}, prompt included.")
    else:
        defaults = {name: parameter.default for name, parameter in inspect.signature(plan).parameters.items()}
        if without := [name for name in _TIMED if given[name] != defaults[name]]:
            raise ValueError(f"{', '.join(without)}: for the estimate of times, which needs --trajectories.")

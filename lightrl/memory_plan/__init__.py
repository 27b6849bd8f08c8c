"""`lightrl plan`: what fits on which GPUs, before anything is downloaded.

`model` measures a model from its configuration, `memory` adds up its parts under each strategy, `time` estimates
seconds.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from lightrl.arguments import fraction
from lightrl.memory_plan.memory import (
    PARTS,
    STRATEGIES,
    Plan,
    Precision,
    host_memory,
    largest_micro_batch,
    memory,
    smallest_fit,
    total,
)
from lightrl.memory_plan.model import measure_model
from lightrl.memory_plan.time import Job, Rates, curve, needed_staleness

__all__ = ["needed_memory", "plan"]

GIB = float(1 << 30)
USABLE = 0.9
"""Share of a GPU's memory that a plan may fill: CUDA's context, NCCL's buffers and fragmentation take the rest."""

_LEAST: dict[str, float] = {
    **dict.fromkeys(("gpus", "gpu_memory", "length", "micro_batch_tokens", "sequences"), 1),
    **dict.fromkeys(("lora", "trajectories", "spread", "tool_seconds", "shared", "staleness"), 0),
    **dict.fromkeys(("turns", "response", "tflops"), 1),
    "bandwidth": 0.01,
}
"""Smallest values of the arguments of `plan`."""
_TIMED = ("response", "spread", "turns", "tool_seconds", "shared", "staleness", "tflops", "bandwidth")
"""Arguments of the estimate of times."""
_PREFERRED = ("ddp", "fsdp2", "zero2", "zero1", "zero3", "zero2_offload", "zero3_offload")


def plan(
    model: str | None = None,
    gpus: int = 8,
    gpu_memory: float = 80.0,
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
    spread: float = 0.7,
    turns: int = 1,
    tool_seconds: float = 0.0,
    shared: float = 0.0,
    staleness: int = 1,
    tflops: float = 989.0,
    bandwidth: float = 3.35,
) -> None:
    """Prints the memory per GPU of a run, part by part, under each strategy, and which strategy to take.

    With `--trajectories` it also estimates seconds per step on 1 to 4,096 GPUs: how many of them generate and how many
    train, the staleness with which no update waits for the longest completion, which strategy holds the models there,
    with micro-batches of how many tokens at most, and what binds.

    Everything follows from the model's config.json; no weights are read and no GPU is needed. Weights, gradients and
    optimizer are exact to rounding, activations are those of one forward of a block on fake tensors. The peak is
    that of a backward pass or of an optimizer step, whichever is higher.

    Args:
        model: folder with a config.json, that file, or a hub name.
        gpus: number of GPUs, over all machines.
        gpu_memory: GiB of each.
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
        spread: standard deviation of completions' lengths over their mean.
        turns: sampled turns of a trajectory.
        tool_seconds: seconds that a tool takes between two turns.
        shared: mean tokens of a trajectory that the tree layout computes in another one; prompts of p tokens in groups
            of g: p (g - 1) / g.
        staleness: rollouts that generation may be ahead; with 0 nothing overlaps. Times are those of as many as the
            table names, where there are more.
        tflops: a GPU's dense bfloat16 peak in 10^12 operations per second (H100: 989, A100: 312, H20: 148).
        bandwidth: of its memory in 10^12 bytes per second (H100: 3.35, A100: 2.0, H20: 4.0).

    Raises:
        ValueError: there is no such model or strategy, a number is out of range, or an argument would change nothing.
    """
    if not model:
        raise ValueError("plan: give --model, a folder with a config.json or a hub name.")
    strategy = strategy.removeprefix("deepspeed_")
    chosen = STRATEGIES if strategy == "all" else (strategy,)
    if strategy != "all" and strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: must be all or one of {', '.join(STRATEGIES)}.")
    _refuse_arguments(locals())
    import torch

    compute = torch.float32 if precision == "32-true" else torch.bfloat16
    case = Plan(
        actor=measure_model(model, compute=compute),
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
    )
    if freeze_vision and not case.actor.vision:
        raise ValueError(f"freeze_vision={freeze_vision}: {model} has no vision tower.")
    _print(case, chosen, gpu_memory)
    if trajectories:
        job = Job(
            parameters=case.actor.parameters,
            layers=case.actor.layers,
            hidden=case.actor.hidden,
            kv_bytes=2 * case.actor.kv_width,
            trajectories=trajectories,
            prompt=max(1.0, length - response),
            response=response,
            spread=spread,
            longest=max(length, 8 * response),
            turns=turns,
            tool_seconds=tool_seconds,
            shared=shared,
            forwards=1 + reference,
            recompute=gradient_checkpointing,
            slots=sequences,
        )
        _print_times(case, job, Rates.of(tflops, bandwidth), staleness, chosen, USABLE * gpu_memory * GIB)


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
        for name in ("response", "shared"):
            if not given[name] < length:
                raise ValueError(f"{name}={given[name]}: must be below length={length}, which has the prompt in it.")
        if given["turns"] > given["response"]:
            raise ValueError(
                f"turns={given['turns']}: a completion of response={given['response']} tokens has fewer turns."
            )
    else:
        defaults = {name: parameter.default for name, parameter in inspect.signature(plan).parameters.items()}
        if without := [name for name in _TIMED if given[name] != defaults[name]]:
            raise ValueError(f"{', '.join(without)}: for the estimate of times, which needs --trajectories.")


def needed_memory(model: str, strategy: str, limit: float, **case: Any) -> tuple[float, str]:
    """Bytes that each process of a run takes at the peak, and what to do where that is more than it may; else "".

    Args:
        model: folder or hub name of the policy.
        strategy: as of `plan`.
        limit: bytes that a process may take.
        case: the other attributes of `Plan`.
    """
    import torch

    compute = torch.float32 if case.get("precision") == "32-true" else torch.bfloat16
    here = Plan(actor=measure_model(model, compute=compute), **case)
    needed = total(memory(here, strategy))
    fitting = [name for name in STRATEGIES if total(memory(here, name)) <= limit]
    return needed, advice(here, fitting, limit) if needed > limit else ""


def _print(case: Plan, chosen: tuple[str, ...], gpu_memory: float) -> None:
    from rich.console import Console
    from rich.table import Table

    limit = USABLE * gpu_memory * GIB
    size = f"{case.actor.parameters / 1e9:.2f} B parameters"
    table = Table(title=f"GiB per GPU, {case.gpus} x {gpu_memory:g} GiB, {size}")
    table.add_column("")
    totals = {}
    columns = {name: memory(case, name) for name in chosen}
    for name in chosen:
        table.add_column(name, justify="right")
        totals[name] = total(columns[name])
    for part in PARTS:
        if any(columns[name][part] for name in chosen):
            table.add_row(part, *(f"{columns[name][part] / GIB:.1f}" for name in chosen))
    table.add_section()
    table.add_row("at the peak", *(f"{totals[name] / GIB:.1f}" for name in chosen))
    table.add_row(f"fits in {USABLE:.0%}", *("yes" if totals[name] <= limit else "no" for name in chosen))
    if any(host_memory(case, name) for name in chosen):
        table.add_row("host, all ranks", *(f"{host_memory(case, name) / GIB:.0f}" for name in chosen))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(advice(case, [name for name in chosen if totals[name] <= limit], limit))


def _print_times(case: Plan, job: Job, rates: Rates, staleness: int, chosen: tuple[str, ...], limit: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"seconds per step of {job.trajectories} trajectories, staleness {staleness} (estimates)")
    names = ("GPUs", "generate", "train", "generation", "training", "sync", "step", "staleness", "strategy", "tokens")
    for name in (*names, "binds"):
        table.add_column(name, justify="right")
    for gpus, engines, trainers, times in curve(job, rates, staleness):
        here = replace(case, gpus=trainers or engines, engine=case.engine and not trainers)
        fitting = (name for name in _PREFERRED if name in chosen and total(memory(here, name)) <= limit)
        seconds = (times.generation, times.training, times.sync, times.step)
        shared = "the same" if not trainers else str(trainers)
        counts = (str(gpus), str(engines), shared, *(f"{x:.1f}" for x in seconds))
        ahead = needed_staleness(job, rates, engines if trainers else 0, times.step)
        strategy = next(fitting, None)
        tokens = None if strategy is None else largest_micro_batch(here, strategy, limit)
        table.add_row(*counts, str(ahead), strategy or "none fits", str(tokens or "-"), times.binds)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def advice(case: Plan, fitting: list[str], limit: float) -> str:
    """What to take, in a sentence.

    Args:
        case: the case.
        fitting: strategies that fit.
        limit: bytes per GPU.
    """
    for name in _PREFERRED:
        if name in fitting:
            tokens = largest_micro_batch(case, name, limit)
            room = "" if tokens is None else f" Micro-batches may have {tokens} tokens (model.micro_batch_tokens)."
            return f"Take {name}: {_WHY[name]}{room}"
    ways = ["--engine asleep, --engine elsewhere" if case.engine else "", "--lora 32" if not case.lora else ""]
    tokens = largest_micro_batch(case, "fsdp2", limit)
    ways += ["--gradient_checkpointing true" if not case.checkpointing else ""]
    ways += [f"--micro_batch_tokens {tokens} with fsdp2" if tokens is not None else ""]
    needed = smallest_fit(case, "fsdp2", limit)
    if needed is not None:
        ways.insert(0, f"fsdp2 on {needed} GPUs")
    ways = [way for way in ways if way] or ["GPUs with more memory", "a smaller model", "shorter rows (--length)"]
    return f"Nothing fits. Try {', '.join(ways)}."


_WHY = {
    "ddp": "every GPU holds everything, which is the fastest (configs/strategies/ddp.yaml).",
    "fsdp2": "weights and optimizer are sharded, with PyTorch alone (configs/strategies/fsdp2.yaml).",
    "zero2": "the optimizer is sharded, weights are whole (configs/strategies/deepspeed_zero2.yaml).",
    "zero1": "the optimizer is sharded, weights are whole (configs/strategies/deepspeed_zero1.yaml).",
    "zero3": "weights and optimizer are sharded (configs/strategies/deepspeed_zero3.yaml).",
    "zero2_offload": "the optimizer works in the hosts' memory (configs/strategies/deepspeed_zero2_offload.yaml).",
    "zero3_offload": "idle weights are in the hosts' memory too (configs/strategies/deepspeed_zero3_offload.yaml).",
}

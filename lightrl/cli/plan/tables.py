"""What a plan says: tables of memory and time, and what to take."""

from __future__ import annotations

import sys
from typing import Any

from lightrl.cli.plan.memory import (
    PARTS,
    Plan,
    host_memory,
    largest_micro_batch,
    memory,
    micro_batch,
    smallest_fit,
    total,
)
from lightrl.cli.plan.model import measure_model
from lightrl.cli.plan.options import GIB, STRATEGIES, USABLE
from lightrl.cli.plan.time import Job, Rates, generation, training

_PREFERRED = ("ddp", "fsdp2", "zero2", "zero1", "zero3", "zero2_offload", "zero3_offload")


def needed_memory(model: str, strategy: str, limit: float, rollout: dict[str, Any], **case: Any) -> tuple[float, str]:
    """Bytes that each process of a run takes at the peak, and what to do where that is more than it may; else "".

    Args:
        model: folder or hub name of the policy.
        strategy: as of `plan`.
        limit: bytes that a process may take.
        rollout: `ModelSpec.layout` and the other arguments of `micro_batch`.
        case: the other attributes of `Plan`.
    """
    import torch

    compute = torch.float32 if case.get("precision") == "32-true" else torch.bfloat16
    actor = measure_model(model, compute=compute, cpu=case.get("cpu", False))
    shape = dict(rollout)
    layout = shape.pop("layout")
    layout = "padded" if layout == "auto" and not actor.packs else layout
    here = Plan(actor, micro_batch_tokens=micro_batch(layout, **shape), **case)
    needed = total(memory(here, strategy))
    fitting = [name for name in candidates(here) if total(memory(here, name)) <= limit]
    return needed, advice(here, fitting, limit) if needed > limit else ""


def candidates(case: Plan) -> tuple[str, ...]:
    """Strategies that may help: sharding needs several processes, and a CPU's memory is the host's."""
    if case.gpus > 1:
        return STRATEGIES
    return ("ddp",) if case.cpu else ("ddp", "zero2_offload", "zero3_offload")


def print_memory(case: Plan, chosen: tuple[str, ...], gpu_memory: float) -> None:
    """Prints the parts under the chosen strategies, on GPUs of so many GiB, and what to take."""
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


def print_times(job: Job, rates: Rates, gpus: int) -> None:
    """Prints the estimated seconds per step on one node."""
    sample, learn = generation(job, rates, gpus), training(job, rates, gpus)
    print(
        f"Seconds per step of {job.trajectories} trajectories on {gpus} GPUs (estimate): generation {sample:.1f}, "
        f"training {learn:.1f}, together {sample + learn:.1f}."
    )


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
    sharded = "ddp" if case.cpu else "fsdp2"
    tokens = largest_micro_batch(case, sharded, limit)
    needed = None if case.cpu else smallest_fit(case, "fsdp2", limit)
    ways = [
        f"fsdp2 on {needed} GPUs" if needed is not None else "",
        "--engine asleep, --engine elsewhere" if case.engine and not case.cpu else "",
        "--lora 32" if not case.lora else "",
        "--gradient_checkpointing true" if not case.checkpointing else "",
        f"--micro_batch_tokens {tokens}{'' if case.cpu else ' with fsdp2'}" if tokens is not None else "",
    ]
    ways = [way for way in ways if way] or ["more memory", "a smaller model", "shorter rows (--length)"]
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

"""`lightrl plan`: estimates memory per GPU under each strategy (`memory`) and seconds per step (`time`)."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Literal

from lightrl.compat.arguments import require_model_folder

__all__ = ["plan"]

GIB = float(1 << 30)


def plan(
    model: str | None = None,
    gpus: int = 8,
    gpu_memory: float = 80.0,
    device: Literal["cuda", "cpu"] = "cuda",
    algorithm: Literal["ppo", "grpo"] = "ppo",
    precision: Literal["32-true", "bf16-mixed", "bf16-true"] = "bf16-mixed",
    lora: int = 0,
    reward_model: str | None = None,
    reference: bool = True,
    gradient_checkpointing: bool = True,
    micro_batch_tokens: int | None = None,
    engine: Literal["colocated", "asleep", "elsewhere"] = "colocated",
    sequences: int = 64,
    length: int = 2048,
    trajectories: int = 0,
    response: float = 1024.0,
    tflops: float = 989.0,
    bandwidth: float = 3.35,
) -> None:
    """Estimate the memory per GPU of a run under each strategy and recommend a strategy.

    Also estimates the seconds per step with `--trajectories`, on one node whose GPUs alternate between generation and
    training.

    Reads only the model's config.json and needs no GPU. Weights, gradients, and optimizer states are exact up to
    rounding. Activations are measured in a forward pass of one block on fake tensors. The peak is the larger of a
    backward pass and an optimizer step.

    Args:
        model: Model directory, its config.json, or a model ID.
        gpus: Number of GPUs on all nodes.
        gpu_memory: Memory per GPU in GiB.
        device: Device of the trainer. With cpu, `gpus` is the number of processes and `gpu_memory` the memory of each.
        algorithm: Algorithm. ppo trains a critic of the actor's size; grpo has none.
        precision: `trainer.precision`: bf16-mixed (float32 weights), bf16-true, or 32-true.
        lora: LoRA rank on all linear layers of actor and critic. 0 trains all weights.
        reward_model: Model directory or model ID of a reward model in bfloat16. Defaults to none (reward functions).
        reference: Whether the run has a KL term and thus a reference model (in bfloat16). With LoRA it needs no memory.
        gradient_checkpointing: `model.actor.gradient_checkpointing`.
        micro_batch_tokens: `model.updates.micro_batch_tokens`. Defaults to 16384, and to 4096 with `--device cpu`.
        engine: Placement of the inference engine. colocated: on the training GPUs, always loaded. asleep: on the
            training GPUs, but it frees its memory during training (`VLLMEngine.sleep_level`). elsewhere: on other GPUs
            or servers.
        sequences: Maximum number of completions that an engine generates concurrently.
        length: Maximum number of tokens in a prompt plus its completion.
        trajectories: Completions per rollout on all GPUs. 0 skips the time estimate.
        response: Mean number of tokens per completion.
        tflops: Peak dense bfloat16 TFLOPS per GPU (H100: 989, A100: 312, H20: 148).
        bandwidth: Memory bandwidth per GPU in TB/s (H100: 3.35, A100: 2.0, H20: 4.0).

    Raises:
        ValueError: The model does not exist.
    """
    if not model:
        raise ValueError("lightrl plan requires --model. Pass a model directory or a model ID.")
    for path in filter(None, (model, reward_model)):
        require_model_folder(path.removesuffix("config.json") or ".")
    import torch

    from lightrl.algorithms.module import Updates
    from lightrl.cli.plan.memory import Plan, measure_model
    from lightrl.cli.plan.time import step_seconds

    compute = torch.float32 if precision == "32-true" else torch.bfloat16
    micro_batch_tokens = Updates(micro_batch_tokens=micro_batch_tokens).tokens(device)
    case = Plan(
        actor=measure_model(model, compute=compute),
        critic=algorithm == "ppo",
        reference=reference,
        reward=None if reward_model is None else measure_model(reward_model, compute=compute),
        gpus=gpus,
        precision=precision,
        lora=lora,
        micro_batch_tokens=micro_batch_tokens,
        checkpointing=gradient_checkpointing,
        engine=engine == "colocated",
        sequences=sequences,
        length=length,
        cpu=device == "cpu",
        engine_width=4 if device == "cpu" and precision == "32-true" else 2,
    )
    if trajectories:  # the rollout may be smaller than the budget
        case = replace(case, micro_batch_tokens=min(micro_batch_tokens, -(-trajectories // gpus) * length))
    _print_memory(case, gpu_memory)
    if trajectories:
        sample, learn = step_seconds(case, trajectories, response, tflops, bandwidth)
        print(
            f"Estimated seconds per step with {trajectories} trajectories on {gpus} GPUs: generation {sample:.1f}, "
            f"training {learn:.1f}, total {sample + learn:.1f}."
        )


def _print_memory(case: Any, gpu_memory: float) -> None:
    """Prints the parts under each strategy and a recommendation. `gpu_memory` is in GiB."""
    from rich.console import Console
    from rich.table import Table

    from lightrl.cli.plan.memory import PARTS, USABLE, advice, candidates, host_memory, memory, total

    limit = USABLE * gpu_memory * GIB
    size = f"{'PPO' if case.critic else 'GRPO'}, {case.actor.parameters / 1e9:.2f}B parameters"
    table = Table(title=f"Memory per GPU in GiB ({size}, {case.gpus} x {gpu_memory:g} GiB)")
    table.add_column("")
    chosen = candidates(case)
    columns = {name: memory(case, name) for name in chosen}
    totals = {name: total(parts) for name, parts in columns.items()}
    for name in chosen:
        table.add_column(name, justify="right")
    for part in PARTS:
        if any(columns[name][part] for name in chosen):
            table.add_row(part, *(f"{columns[name][part] / GIB:.1f}" for name in chosen))
    table.add_section()
    table.add_row("peak", *(f"{totals[name] / GIB:.1f}" for name in chosen))
    table.add_row(f"fits in {USABLE:.0%}", *("yes" if totals[name] <= limit else "no" for name in chosen))
    if any(host_memory(case, name) for name in chosen):
        table.add_row("host, all ranks", *(f"{host_memory(case, name) / GIB:.0f}" for name in chosen))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(advice(case, limit))

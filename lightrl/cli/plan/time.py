"""Estimates the seconds of a rollout and its update on one node with roofline models of generation and training.

A decoding step reads the weights once and the KV cache of every active sequence. A training step does 6 operations per
parameter and token, and 12 per layer, hidden dimension, and attended pair.
"""

from __future__ import annotations

from math import ceil

from lightrl.cli.plan.memory import Plan

OVERHEAD = 2e-3
"""Constant overhead per decoding step, in seconds."""


def step_seconds(
    plan: Plan, trajectories: int, response: float, tflops: float, bandwidth: float
) -> tuple[float, float]:
    """Seconds of (generation with one engine per GPU, the update), assuming completions of equal length.

    There are `trajectories` completions per rollout on all GPUs, each with `response` tokens; prompts use the tokens of
    `length` that completions don't. Training uses 40% and decoding 50% of the peak dense bfloat16 TFLOPS per GPU, and
    decoding 70% of the peak memory bandwidth in TB/s.
    """
    size, prompt = plan.actor, max(1.0, plan.length - response)
    own = ceil(trajectories / plan.gpus)
    live = min(own, plan.sequences)
    decode_flops = 0.5e12 * tflops
    read = 2 * size.parameters + live * (prompt + response / 2) * 2 * size.kv_width
    decode = max(read / (0.7e12 * bandwidth), 2 * size.parameters * live / decode_flops) + OVERHEAD
    generation = own * 2 * size.parameters * prompt / decode_flops + ceil(own / live) * response * decode
    tokens = prompt + response
    forward = trajectories * (2 * size.parameters * tokens + 2 * size.layers * size.hidden * tokens**2)
    passes = 1 + plan.reference + (4 if plan.checkpointing else 3)  # old log-probs, reference, update
    return generation, passes * forward / (plan.gpus * 0.4e12 * tflops)

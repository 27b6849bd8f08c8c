"""Estimates the seconds of a rollout and its update on one node with roofline models of generation and training.

A decoding step reads the weights once and the KV cache of every active sequence. A training step does 6 operations per
parameter and token, and 12 per layer, hidden dimension, and attended pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Rates:
    """Throughput of one GPU.

    Attributes:
        flops: Matrix multiplication throughput in training, in operations per second.
        decode_flops: Matrix multiplication throughput in decoding, in operations per second.
        bandwidth: Memory bandwidth in decoding, in bytes per second.
        overhead: Constant overhead per decoding step, in seconds.
    """

    flops: float
    decode_flops: float
    bandwidth: float
    overhead: float = 2e-3

    @staticmethod
    def of(tflops: float, terabytes: float) -> Rates:
        """Rates from peak dense bfloat16 TFLOPS (40% in training, 50% in decoding) and TB/s (70% in decoding)."""
        return Rates(0.4e12 * tflops, 0.5e12 * tflops, 0.7e12 * terabytes)


@dataclass(frozen=True)
class Job:
    """A rollout of `trajectories` and its update. `prompt` and `response` are mean numbers of tokens.

    Attributes:
        kv_bytes: Bytes per token in the KV cache.
        forwards: Number of forward passes without gradients over each trajectory (old log-probs, reference).
        recompute: Whether activations are recomputed.
        slots: Maximum number of sequences that an engine generates concurrently.
    """

    parameters: float
    layers: int
    hidden: int
    kv_bytes: float
    trajectories: int
    prompt: float = 512.0
    response: float = 1024.0
    forwards: int = 1
    recompute: bool = True
    slots: int = 256


def decode_seconds(job: Job, rates: Rates, live: int, context: float) -> float:
    """Seconds of a decoding step of `live` sequences of `context` tokens on one GPU."""
    read = (2 * job.parameters + live * context * job.kv_bytes) / rates.bandwidth
    return max(read, 2 * job.parameters * live / rates.decode_flops) + rates.overhead


def generation(job: Job, rates: Rates, gpus: int) -> float:
    """Seconds to generate all completions with one engine per GPU, assuming equal lengths."""
    own = ceil(job.trajectories / gpus)
    live = min(own, job.slots)
    prefill = own * 2 * job.parameters * job.prompt / rates.decode_flops
    step = decode_seconds(job, rates, live, job.prompt + job.response / 2)
    return prefill + ceil(own / live) * job.response * step


def training(job: Job, rates: Rates, gpus: int) -> float:
    """Seconds of the forward passes and the update of a rollout."""
    tokens = job.trajectories * (job.prompt + job.response)
    pairs = job.trajectories * (job.prompt + job.response) ** 2 / 2
    forward = 2 * job.parameters * tokens + 4 * job.layers * job.hidden * pairs
    return forward * (job.forwards + (4 if job.recompute else 3)) / (gpus * rates.flops)

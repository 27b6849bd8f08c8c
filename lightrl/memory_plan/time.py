"""How long a rollout and its updates take: rooflines of generation and training, and a small event simulation.

A decoding step reads the weights once and every live sequence's keys and values; a training step does 6 operations per
parameter and token, and 12 per layer, width and visible pair. Between two events (a completion ends, a tool answers)
the number of live sequences is constant, so the simulation jumps from event to event.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from statistics import NormalDist

__all__ = [
    "Job",
    "Rates",
    "Times",
    "best_split",
    "curve",
    "decode_seconds",
    "generation",
    "lengths",
    "needed_staleness",
    "steady",
    "step_time",
    "sync",
    "training",
]


@dataclass(frozen=True)
class Rates:
    """What one GPU reaches.

    Attributes:
        flops: matrix products, operations per second, in training: peak times utilisation.
        decode_flops: the same while decoding.
        bandwidth: bytes per second read from memory while decoding.
        overhead: seconds per decoding step that depend on nothing.
        network: bytes per second at which weights reach an engine.
    """

    flops: float
    decode_flops: float
    bandwidth: float
    overhead: float = 2e-3
    network: float = 20e9

    @staticmethod
    def of(tflops: float, terabytes: float) -> Rates:
        """From a data sheet's dense bfloat16 peak and bandwidth: 40 % in training, 50 % and 70 % in decoding."""
        return Rates(0.4e12 * tflops, 0.5e12 * tflops, 0.7e12 * terabytes)


@dataclass(frozen=True)
class Job:
    """One rollout and the updates on it.

    Attributes:
        parameters: P that a token runs through.
        layers, hidden: of the policy.
        kv_bytes: bytes that a token leaves in the KV cache.
        trajectories: of a rollout, all engines together.
        prompt: tokens of a prompt.
        response: mean tokens of a completion, all turns together.
        spread: standard deviation of the completions' lengths over their mean (log-normal).
        longest: bound on a completion's tokens.
        turns: sampled turns of a trajectory, with `tool_seconds` after each but the last.
        tool_seconds: latency of a tool.
        forwards: passes without gradient over each trajectory (old log-probs, reference).
        passes: `ppo_epochs`.
        shared: mean tokens of a trajectory that training computes in another one, which begins alike.
        recompute: whether activations are recomputed.
        slots: most sequences that an engine generates at a time.
    """

    parameters: float
    layers: int
    hidden: int
    kv_bytes: float
    trajectories: int
    prompt: float = 512.0
    response: float = 1024.0
    spread: float = 0.7
    longest: float = 32768.0
    turns: int = 1
    tool_seconds: float = 0.0
    forwards: int = 1
    passes: int = 1
    shared: float = 0.0
    recompute: bool = True
    slots: int = 256


@dataclass(frozen=True)
class Times:
    """Seconds of a step.

    Attributes:
        generation, training, sync: of each part by itself.
        step: from one rollout to the next.
        binds: what a faster step would need.
    """

    generation: float
    training: float
    sync: float
    step: float
    binds: str


def lengths(job: Job, number: int) -> list[float]:
    """Lengths at the quantiles (i + 1/2) / number of a log-normal, longest first, cut at `longest`."""
    sigma = sqrt(log(1 + job.spread**2))
    middle = log(job.response) - sigma**2 / 2
    quantiles = (NormalDist().inv_cdf((i + 0.5) / number) for i in range(number))
    return sorted((min(job.longest, max(1.0, exp(middle + sigma * q))) for q in quantiles), reverse=True)


def decode_seconds(job: Job, rates: Rates, live: int, context: float) -> float:
    """One decoding step of `live` sequences of `context` tokens on one GPU."""
    read = (2 * job.parameters + live * context * job.kv_bytes) / rates.bandwidth
    return max(read, 2 * job.parameters * live / rates.decode_flops) + rates.overhead


def generation(job: Job, rates: Rates, engines: int) -> float:
    """Seconds until the last completion of a rollout that `engines` share, of the engine that has the longest one."""
    own = lengths(job, job.trajectories)[::engines]
    waiting = list(reversed(own[1::2] + own[0::2]))  # long and short ones mixed, since nobody knows which is which
    now = steps = 0.0
    ends: list[tuple[float, float, int]] = []  # (decoding step at which a turn ends, tokens of its turns, turns left)
    away: list[tuple[float, float, int]] = []  # (time at which a tool answers, tokens of a turn, turns left)
    prefill = 2 * job.parameters * job.prompt / rates.decode_flops
    while waiting or ends or away:
        while away and away[0][0] <= now:
            _, tokens, left = heapq.heappop(away)
            heapq.heappush(ends, (steps + tokens, tokens, left))
        while waiting and len(ends) + len(away) < job.slots:
            tokens = waiting.pop() / job.turns
            now += prefill
            heapq.heappush(ends, (steps + tokens, tokens, job.turns - 1))
        if not ends:
            now = away[0][0]
            continue
        each = decode_seconds(job, rates, len(ends), job.prompt + job.response / 2)
        until = ends[0][0]
        if away:
            until = min(until, steps + max(1.0, (away[0][0] - now) / each))
        now, steps = now + (until - steps) * each, until
        while ends and ends[0][0] <= steps:
            _, tokens, left = heapq.heappop(ends)
            if left:
                heapq.heappush(away, (now + job.tool_seconds, tokens, left - 1))
    return now


def steady(job: Job, rates: Rates, engines: int) -> float:
    """Seconds per rollout of engines that never run empty, as they do with staleness: no tail."""
    live = max(1, min(job.slots, job.trajectories // engines))
    busy = decode_seconds(job, rates, live, job.prompt + job.response / 2) * job.response
    alone = busy + job.tool_seconds * (job.turns - 1)
    prefill = 2 * job.parameters * job.prompt / rates.decode_flops
    return job.trajectories / engines * max(alone / live, busy / live + prefill)


def training(job: Job, rates: Rates, gpus: int) -> float:
    """Seconds of the forwards and updates on a rollout."""
    tokens = job.trajectories * (job.prompt + job.response - job.shared)
    pairs = job.trajectories * ((job.prompt + job.response) ** 2 * (1 + job.spread**2) - job.shared**2) / 2
    forward = 2 * job.parameters * tokens + 4 * job.layers * job.hidden * pairs
    return forward * (job.forwards + job.passes * (4 if job.recompute else 3)) / (gpus * rates.flops)


def sync(job: Job, rates: Rates) -> float:
    """Seconds to bring bfloat16 weights to the engines, all at once."""
    return 2 * job.parameters / rates.network


def step_time(job: Job, rates: Rates, engines: int, trainers: int, staleness: int) -> Times:
    """One step; `trainers` 0 trains on the engines' GPUs, one after the other.

    Args:
        job: the work.
        rates: of a GPU.
        engines: GPUs that generate.
        trainers: further GPUs that train; 0 for colocated.
        staleness: rollouts that generation may be ahead of training.
    """
    learn, push = training(job, rates, trainers or engines), sync(job, rates)
    if not trainers or not staleness:
        sample = generation(job, rates, engines)
        tail = sample > 1.5 * steady(job, rates, engines)
        binds = "the longest completions" if tail else "decoding"
        return Times(sample, learn, push, sample + learn + push, binds if sample > learn else "training")
    sample = steady(job, rates, engines)
    slower = "training" if learn > sample else "decoding"
    binds = "weight sync" if push > max(sample, learn) else slower
    return Times(sample, learn, push, max(sample, learn) + push, binds)


def needed_staleness(job: Job, rates: Rates, engines: int, step: float) -> int:
    """Rollouts that generation must be ahead so that no update waits for the longest completion, tools included.

    Args:
        job: the work.
        rates: of a GPU.
        engines: GPUs that generate beside training; 0 where they take turns.
        step: seconds from one rollout to the next.
    """
    if not engines:
        return 0
    live = max(1, min(job.slots, job.trajectories // engines))
    each = decode_seconds(job, rates, live, job.prompt + job.response / 2)
    return max(1, ceil((lengths(job, job.trajectories)[0] * each + job.tool_seconds * (job.turns - 1)) / step))


def best_split(job: Job, rates: Rates, gpus: int, staleness: int = 1) -> tuple[int, int, Times]:
    """(engines, trainers, times) of the fastest way to use the GPUs; trainers 0 means colocated."""
    ways = [(gpus, 0, step_time(job, rates, gpus, 0, 0))]
    for eighths in range(1, 8):
        engines = min(gpus * eighths // 8, job.trajectories)  # more would have nothing to sample
        if staleness and 0 < engines < gpus:
            ways.append((engines, gpus - engines, step_time(job, rates, engines, gpus - engines, staleness)))
    return min(ways, key=lambda way: way[2].step)


def curve(job: Job, rates: Rates, staleness: int = 1) -> list[tuple[int, int, int, Times]]:
    """(GPUs, engines, trainers, times) for 1 to 4,096 GPUs."""
    sizes = [1 << i for i in range(13)]
    return [(gpus, *best_split(job, rates, gpus, staleness)) for gpus in sizes]

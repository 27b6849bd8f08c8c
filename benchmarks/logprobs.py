"""Compares the memory and time of chunked log-probs with those of a full logit matrix, forward and backward.

    python benchmarks/logprobs.py --out logprobs.json

The full matrix is `log_softmax(hidden @ weight.T)`, gathered at the targets. With `--entropy`, both also compute the
entropy. The two alternate in one process. Extra memory is the peak of resident memory during a call, minus the memory
before it, the outputs, and the gradients. On a CPU, seconds are CPU seconds, so run it with one thread.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrl.models.logprobs import chunked_logprobs

GIB = 1 << 30


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Tensor:
    """The sum of what `chunked` returns, with the whole (tokens, vocabulary) matrix."""
    logprobs = torch.log_softmax((hidden @ weight.T).float(), -1)
    picked = logprobs.gather(-1, targets[:, None]).sum()
    return picked - 0.01 * (logprobs.exp() * logprobs).sum() if entropy else picked


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> Tensor:
    """LightRL's way."""
    picked, entropies = chunked_logprobs(hidden, weight, None, targets, entropy=entropy)
    return picked.sum() + 0.01 * entropies.sum() if entropies is not None else picked.sum()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@contextmanager
def peak_memory(device: str) -> Iterator[Callable[[], int]]:
    """Gives a function that tells the peak, after the block, in bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        yield torch.cuda.max_memory_allocated
        return
    peak, stop = [resident()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            peak[0] = max(peak[0], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: peak[0]
    finally:
        stop.set()
        thread.join()


def measure(way: Callable[..., Tensor], inputs: tuple[Tensor, ...], entropy: bool) -> tuple[float, float, Tensor]:
    """Seconds, extra GiB, and the gradient of the weight."""
    hidden, weight, targets = inputs
    device = hidden.device.type
    hidden.grad = weight.grad = None
    gc.collect()
    before = torch.cuda.memory_allocated() if device == "cuda" else resident()
    with peak_memory(device) as peak:
        clock = time.perf_counter if device == "cuda" else time.process_time  # other load on the CPU does not count
        start = clock()
        way(hidden, weight, targets, entropy).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = clock() - start
    gradients = sum(x.grad.nbytes for x in (hidden, weight))
    return seconds, (peak() - before - gradients) / GIB, weight.grad


def main() -> None:
    """Parses arguments, measures, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--entropy", action="store_true", help="also compute the entropy and its gradient")
    parser.add_argument("--dtype", default="float32", help="dtype of hidden states and weight")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)

    def leaf(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.1).to(args.device, dtype).requires_grad_()

    targets = torch.randint(0, args.vocab, (args.tokens,), generator=generator).to(args.device)
    inputs = (leaf(args.tokens, args.hidden), leaf(args.vocab, args.hidden), targets)
    for way in (plain, chunked):  # warm-up
        measure(way, (inputs[0][:32].detach().requires_grad_(), inputs[1], targets[:32]), args.entropy)
    runs: dict[str, list[tuple[float, float]]] = {"plain": [], "chunked": []}
    error = 0.0
    for _ in range(args.repeats):
        seconds, extra, expected = measure(plain, inputs, args.entropy)
        runs["plain"].append((seconds, extra))
        seconds, extra, got = measure(chunked, inputs, args.entropy)
        runs["chunked"].append((seconds, extra))
        error = float((got - expected).norm() / expected.norm())
    rows: list[dict[str, Any]] = [
        {"way": name, "seconds": statistics.median(s for s, _ in values), "extra_gib": max(m for _, m in values)}
        for name, values in runs.items()
    ]
    ratios = [c[0] / p[0] for c, p in zip(runs["chunked"], runs["plain"], strict=True)]
    result = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {"torch": torch.__version__},
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "rows": rows,
        "time_ratio": statistics.median(ratios),
        "time_ratios": ratios,
        "gradient_error": error,
    }
    print(f"{'way':10} {'seconds':>10} {'extra GiB':>10}")
    for row in rows:
        print(f"{row['way']:10} {row['seconds']:10.2f} {row['extra_gib']:10.2f}")
    print(f"time ratio {result['time_ratio']:.3f} (bar 1.1), relative gradient error {error:.1e}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()

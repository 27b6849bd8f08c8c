"""Compares the time of an update with its operation count, by prompt, group, response, vocabulary, and model size.

    python benchmarks/scaling.py --out results/scaling.json

Each row is one forward and backward of the policy's log-probs over some prompts x G completions in the default layout.
The count contains floating-point operations: 6 per computed token and weight of the layers, 6 per trained token and
weight of the head (8 if logits are computed twice), and 12 per visible query-key pair and unit of width. Values are
relative to the first row of each axis: "grows" is the growth of seconds, "should" that of the count, and "efficiency"
their quotient, below 1 if time grows faster than the count. All rows of an axis alternate in one process. Seconds are
CPU seconds, or wall seconds on CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from layouts import make_rows, run
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightrl.models import logprobs
from lightrl.models.packing.streams import TokenStream, make_stream
from lightrl.models.policy import PolicyModel


@dataclass
class Point:
    """Sizes of one row."""

    prompt: int = 128
    group: int = 8
    response: int = 64
    vocabulary: int = 512
    hidden: int = 256
    layers: int = 4
    prompts: int = 4


AXES: dict[str, list[Point]] = {
    "prompt": [Point(prompt=n) for n in (32, 128, 512, 2048)],
    "group": [Point(group=n) for n in (2, 4, 8, 16)],
    "response": [Point(response=n) for n in (16, 64, 256, 1024)],
    "vocabulary": [Point(vocabulary=n) for n in (512, 4096, 32768, 131072)],
    "size": [Point(hidden=n) for n in (64, 128, 256, 512)],
}


def pairs(plan: TokenStream) -> int:
    """Query-key pairs that see each other."""
    return sum(n * (n + 1) // 2 + n * before for n, before in zip(plan.lengths, plan.offsets, strict=True))


def operations(point: Point, plan: TokenStream, lm: Any) -> float:
    """Floating-point operations of forward and backward."""
    layers = sum(p.numel() for p in lm.model.layers.parameters())
    read = len(plan.read)
    kept = min(1.0, logprobs.KEPT_ELEMENTS / (read * point.vocabulary)) if plan.source.device.type == "cpu" else 0.0
    head = (8 - 2 * kept) * read * point.vocabulary * point.hidden
    return 6 * plan.num_tokens * layers + head + 12 * pairs(plan) * point.hidden * point.layers


def build(point: Point, device: str, dtype: str) -> PolicyModel:
    """A model with random weights; heads of 32."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=point.vocabulary, hidden_size=point.hidden, intermediate_size=4 * point.hidden,
        num_hidden_layers=point.layers, num_attention_heads=max(1, point.hidden // 32),
        num_key_value_heads=max(1, point.hidden // 64), max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    return PolicyModel(Qwen2ForCausalLM(config).to(device, getattr(torch, dtype)))


def measure(points: list[Point], repeats: int, device: str, dtype: str) -> list[dict[str, Any]]:
    """The rows of one axis."""
    cases = []
    for point in points:
        policy = build(point, device, dtype)
        case = point.prompts, (point.prompt, point.prompt), point.group, (point.response, point.response)
        rows = tuple(x.to(device) for x in make_rows(case, point.vocabulary))
        plan = make_stream(*rows[:3])
        cases.append((policy, rows, plan.num_tokens, operations(point, plan, policy.lm)))
    seconds: list[list[float]] = [[] for _ in cases]
    for i in range(repeats + 1):
        for (policy, rows, _, _), times in zip(cases, seconds, strict=True):
            took, _ = run(policy, rows)
            if i:
                times.append(took)
    table = []
    for point, (_, _, tokens, work), times in zip(points, cases, seconds, strict=True):
        took = statistics.median(times)
        row = {
            **asdict(point),
            "repeats": repeats,
            "tokens": tokens,
            "gflop": work / 1e9,
            "seconds": took,
            "gflop_per_s": work / took / 1e9,
        }
        first = table[0] if table else row
        grows, should = took / first["seconds"], work / 1e9 / first["gflop"]
        table.append({**row, "grows": grows, "should": should, "efficiency": should / grows})
    return table


def main() -> None:
    """Parses arguments, measures, prints one table; axes already in the file are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    axes = {}
    heads = ("tokens", "gflop", "seconds", "gflop_per_s", "grows", "should", "efficiency")
    print(f"{'axis':12} {'value':>8}" + "".join(f" {head:>11}" for head in heads))
    for axis in arguments.axes:
        points = [replace(point, prompts=arguments.prompts) for point in AXES[axis]]
        axes[axis] = measure(points, arguments.repeats, arguments.device, arguments.dtype)
        for row in axes[axis]:
            value = row["hidden" if axis == "size" else axis]
            print(f"{axis:12} {value:8}" + "".join(f" {row[head]:11.4g}" for head in heads), flush=True)
    if arguments.out:
        old = json.loads(arguments.out.read_text())["axes"] if arguments.out.exists() else {}
        machine = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        settings = {k: v for k, v in vars(arguments).items() if k not in ("out", "axes", "repeats")}
        report = {"machine": machine, "versions": versions, "settings": settings, "axes": {**old, **axes}}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

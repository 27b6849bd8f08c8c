"""Tokens per second and model FLOPs utilization (MFU) of a training step, and `layouts` and `logprobs`, on a GPU.

    python benchmarks/gpu.py --out results/gpu.json                 # CUDA: 0.5B and 1.5B in bfloat16
    python benchmarks/gpu.py --device cpu --sizes tiny --rows 4 --response 32 --prompt 16 --repeats 1 --only train

Not run on a GPU yet. A training step is forward, backward, and fused AdamW over groups of completions with random
weights of the Qwen2 architecture, in the packed layout (every token is computed) and in the shared-prefix layout (each
prompt is computed once). MFU divides the operations that the tokens of the batch need by the device's peak:

    6 x weights of the layers x tokens + 6 x weights of the head x trained tokens + 12 x hidden x layers x visible pairs

over seconds and peak. Logits that are computed twice and recomputed activations don't count. In the shared-prefix
layout, only computed tokens count. The target is 40% on the packed 1.5B step. `--peak-tflops` is the device's dense
bfloat16 peak (known for H100, H200, A100, L40S); MFU is omitted if it is unknown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from layouts import make_rows
from scaling import pairs
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightrl.models.packing.streams import make_stream
from lightrl.models.policy import PolicyModel
from lightrl.records import RowBatch

HERE = Path(__file__).parent

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1},
    "0.5B": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5B": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2},
}  # fmt: skip
PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0}  # dense bfloat16, without sparsity


def peak_tflops(device: str, given: float | None) -> float | None:
    """Of the device, as its maker states it."""
    if given or device == "cpu":
        return given
    name = torch.cuda.get_device_name()
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(size: str, layout: Any, args: argparse.Namespace) -> dict[str, Any]:
    """One row: a training step of one size in one layout."""
    torch.manual_seed(0)
    settings = SIZES[size]
    config = Qwen2Config(**settings, max_position_embeddings=32768, tie_word_embeddings=True)
    with torch.device(args.device):
        lm = Qwen2ForCausalLM(config).to(getattr(torch, args.dtype))
    if args.checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = PolicyModel(lm.train(), layout=layout)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    groups = max(1, args.rows // args.group)
    case = groups, (args.prompt, args.prompt), min(args.group, args.rows), (args.response // 2, args.response)
    rows = tuple(x.to(args.device) for x in make_rows(case, settings["vocab_size"]))
    plan = make_stream(*rows[:3], share=layout != "packed")

    def step() -> None:
        batch = RowBatch(token_ids=rows[0], attention_mask=rows[1], response_mask=rows[2], group_ids=rows[3])
        policy(batch).logprobs.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(args.warmup):
        step()
    seconds = []
    for _ in range(args.repeats):
        synchronize(args.device)
        began = time.perf_counter()
        step()
        synchronize(args.device)
        seconds.append(time.perf_counter() - began)
    took = statistics.median(seconds)
    layers = sum(p.numel() for p in lm.model.layers.parameters())
    head = settings["vocab_size"] * settings["hidden_size"]
    attention = 12 * settings["hidden_size"] * settings["num_hidden_layers"] * pairs(plan)
    work = 6 * layers * plan.num_tokens + 6 * head * len(plan.read) + attention
    peak = peak_tflops(args.device, args.peak_tflops)
    return {
        "size": size, "layout": layout, "tokens": plan.num_tokens, "batch_tokens": int(rows[1].sum()), "seconds": took,
        "tokens_per_s": int(rows[1].sum()) / took, "tflops": work / took / 1e12,
        "mfu": work / took / 1e12 / peak if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None,
    }  # fmt: skip


def other(script: str, args: argparse.Namespace, *more: str) -> None:
    """Runs another script on the same device, its JSON beside this one's."""
    command = [sys.executable, str(HERE / script), "--device", args.device, *more]
    if args.out:
        command += ["--out", str(args.out.with_name(f"{args.out.stem}_{script.removesuffix('.py')}.json"))]
    subprocess.run(command, check=True)


def main() -> None:
    """Parses arguments, measures, prints one table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5B", "1.5B"])
    parser.add_argument("--layouts", nargs="+", default=["packed", "shared_prefix"])
    parser.add_argument("--rows", type=int, default=32, help="sequences per step")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=1024, help="longest; the shortest is half of it")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--only", choices=["train", "layouts", "logprobs"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device; --device cpu --sizes tiny is a smoke test.")
    rows = []
    if args.only in (None, "train"):
        for size in args.sizes:
            for layout in args.layouts:
                rows.append(train(size, layout, args))
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
                if args.device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
    if args.out:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        report = {"device": name, "torch": torch.__version__, "settings": settings, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.only in (None, "layouts"):
        other("layouts.py", args, "--dtype", args.dtype, "--hidden", "1024", "--layers", "8")
    if args.only in (None, "logprobs"):
        other("logprobs.py", args, "--dtype", args.dtype)


if __name__ == "__main__":
    main()

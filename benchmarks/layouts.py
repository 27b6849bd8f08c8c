"""Compares the padded, packed, and shared-prefix layouts: equal results, and time relative to the computed tokens.

    python benchmarks/layouts.py --out layouts.json

Each case is a batch of groups or trees with varied lengths. The layouts alternate in one process, forward and backward.
"prompts_once" is the number of tokens if the sequences of a group shared only their prompt. "kept" is the time saved
relative to the padded layout, divided by the saving in tokens: (1 - seconds / padded seconds) / (1 - tokens / padded
tokens), if at least 5% of the tokens are saved. "kept_packed" is the same relative to the packed layout.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightrl.models.packing.streams import make_stream
from lightrl.models.policy import PolicyModel
from lightrl.records import RowBatch

LAYOUTS = ("padded", "packed", "shared_prefix")
# name: prompts, prompt lengths (from, to), group size, completion lengths (from, to)
CASES = {
    "short prompts": (8, (8, 8), 8, (64, 64)),
    "varied": (8, (30, 160), 8, (16, 64)),
    "long prompts": (2, (512, 512), 8, (64, 64)),
    "long varied": (2, (256, 512), 8, (32, 128)),
    "no groups": (32, (30, 160), 1, (16, 128)),
}
# name: by level, how many branches a node has and the tokens of each (from, to); the last level is trained
TREES = {
    "system prompt": [(1, (400, 400)), (8, (30, 160)), (4, (32, 128))],
    "few shots": [(1, (600, 600)), (24, (60, 160))],
    "turns": [(2, (200, 400)), (2, (100, 300)), (2, (100, 300)), (4, (32, 128))],
    "chain of forks": [(1, (300, 300)), *[(2, (100, 140))] * 4],
}


def make_rows(case: tuple[int, tuple[int, int], int, tuple[int, int]], vocab: int) -> tuple[Tensor, ...]:
    """(B, T) token ids, attention mask, response mask, and (B,) group ids."""
    prompts, prompt_range, size, range_ = case
    draw = random.Random(0)
    rows = []
    for group in range(prompts):
        prompt = [draw.randrange(vocab) for _ in range(draw.randint(*prompt_range))]
        for _ in range(size):
            rows.append((group, prompt, [draw.randrange(vocab) for _ in range(draw.randint(*range_))]))
    width = max(len(p) + len(c) for _, p, c in rows)
    ids = torch.tensor([p + c + [0] * (width - len(p) - len(c)) for _, p, c in rows])
    slots = torch.arange(width)
    ends = torch.tensor([len(p) + len(c) for _, p, c in rows])[:, None]
    starts = torch.tensor([len(p) for _, p, _ in rows])[:, None]
    return ids, slots < ends, (slots >= starts) & (slots < ends), torch.tensor([g for g, _, _ in rows])


def make_tree(levels: list[tuple[int, tuple[int, int]]], vocab: int) -> tuple[Tensor, ...]:
    """The same four for a tree; rows whose last parent is the same are a group."""
    draw = random.Random(0)
    nodes: list[tuple[list[int], int]] = [([], 0)]
    for number, range_ in levels:
        nodes = [
            ([*row, *(draw.randrange(vocab) for _ in range(draw.randint(*range_)))], len(row))
            for row, _ in nodes
            for _ in range(number)
        ]
    lengths = torch.tensor([len(row) for row, _ in nodes])[:, None]
    prompts = torch.tensor([prompt for _, prompt in nodes])[:, None]
    slots = torch.arange(int(lengths.max()))
    ids = torch.tensor([row + [0] * (len(slots) - len(row)) for row, _ in nodes])
    groups = torch.arange(len(nodes)) // levels[-1][0]
    return ids, slots < lengths, (slots >= prompts) & (slots < lengths), groups


def prompts_once(rows: tuple[Tensor, ...]) -> int:
    """Tokens with each group's prompt once, and nothing else."""
    packed = make_stream(*rows[:3], share=False)
    prompts = rows[2].int().argmax(1)
    repeated = sum(int(prompts[rows[3] == group].sum() - prompts[rows[3] == group].max()) for group in rows[3].unique())
    return packed.num_tokens - repeated


def run(policy: PolicyModel, rows: tuple[Tensor, ...]) -> tuple[float, Tensor]:
    """CPU seconds (wall seconds on CUDA) of forward + backward, and the log-probs."""
    cuda = rows[0].is_cuda
    clock = time.perf_counter if cuda else time.process_time
    policy.zero_grad(set_to_none=True)
    start = clock()
    batch = RowBatch(token_ids=rows[0], attention_mask=rows[1], response_mask=rows[2], group_ids=rows[3])
    logprobs = policy(batch).logprobs
    logprobs.sum().backward()
    if cuda:
        torch.cuda.synchronize()
    return clock() - start, logprobs.detach()


def _kept(
    layout: str, other: str, seconds: dict[str, list[float]], tokens: dict[str, int]
) -> tuple[float, float | None]:
    """Time of a layout over that of another, and the part of the promised saving that it shows."""
    ratio = statistics.median(a / b for a, b in zip(seconds[layout][1:], seconds[other][1:], strict=True))
    share = tokens[layout] / tokens[other]
    return ratio, (1 - ratio) / (1 - share) if share < 0.95 else None


def measure(policies: dict[str, PolicyModel], rows: tuple[Tensor, ...], repeats: int) -> list[dict[str, Any]]:
    """One row of the table per layout."""
    seconds: dict[str, list[float]] = {layout: [] for layout in policies}
    results: dict[str, Tensor] = {}
    for _ in range(repeats + 1):
        for layout, policy in policies.items():
            took, results[layout] = run(policy, rows)
            seconds[layout].append(took)
    tokens = {"padded": rows[0].numel()}
    for layout in LAYOUTS[1:]:
        tokens[layout] = make_stream(*rows[:3], share=layout == "shared_prefix").num_tokens
    table = []
    for layout, policy in policies.items():
        (ratio, kept), (_, kept_packed) = (_kept(layout, other, seconds, tokens) for other in ("padded", "packed"))
        pairs = zip(policy.parameters(), policies["padded"].parameters(), strict=True)
        table.append(
            {
                "layout": layout,
                "tokens": tokens[layout],
                "seconds": statistics.median(seconds[layout][1:]),
                "speedup": 1 / ratio,
                "kept": kept,
                "kept_packed": kept_packed,
                "logprob_error": float((results[layout] - results["padded"]).abs().max()),
                "gradient_error": max(float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs),  # type: ignore[union-attr, operator]
            }
        )
    return table


def main() -> None:
    """Parses arguments, measures, prints the table; cases already in the file are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *TREES], default=[*CASES, *TREES])
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    lm = Qwen2ForCausalLM(config).to(args.device, getattr(torch, args.dtype))
    policies = {layout: PolicyModel(copy.deepcopy(lm), layout=layout) for layout in LAYOUTS}
    result: dict[str, Any] = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "cases")},
        "cases": {},
    }
    heads = ("tokens", "seconds", "speedup", "kept", "kept_packed", "logprob_error", "gradient_error")
    print(f"{'case':20} {'layout':8}" + "".join(f" {head:>14}" for head in heads))
    for case in args.cases:
        drawn = make_rows(CASES[case], args.vocab) if case in CASES else make_tree(TREES[case], args.vocab)
        rows = tuple(x.to(args.device) for x in drawn)
        result["cases"][case] = measure(policies, rows, args.repeats)
        result["cases"][case][-1]["prompts_once"] = prompts_once(drawn)
        for row in result["cases"][case]:
            cells = "".join(f" {'-' if row[head] is None else format(row[head], '.4g'):>14}" for head in heads)
            print(f"{case:20} {row['layout']:8}{cells}")
    if args.out:
        old = json.loads(args.out.read_text())["cases"] if args.out.exists() else {}
        result["cases"] = {**old, **result["cases"]}
        args.out.write_text(json.dumps(result, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()

"""Measures the speedup of each CPU kernel: a GRPO step with the kernel off, divided by the step with all kernels on.

    python benchmarks/cpu_kernels.py --model HuggingFaceTB/SmolLM2-135M-Instruct --out cpu_kernels.json

A step samples 8 completions of at most 48 tokens for each of 8 prompts of about 50 tokens (`TransformersEngine`),
updates the policy (GRPO's loss on a `PolicyModel`, AdamW), and loads the weights into the engine. All variants
alternate in one process, on the same completions. A kernel is kept if removing it costs at least 10%.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from lightrl.engines import TransformersEngine
from lightrl.models.packing.micro_batches import micro_batches
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.records import EngineContext, GenerationRequest, RowBatch, SamplingParams, pad_rows

PROMPTS, COPIES, NEW_TOKENS, BUDGET = 8, 8, 48, 16384


def requests(tokenizer: Any) -> list[GenerationRequest]:
    """Sums in the model's chat format, all of other lengths."""
    draw, found = random.Random(0), []
    for number in range(PROMPTS):
        terms = " + ".join(str(draw.randint(1, 10 ** draw.randint(1, 4))) for _ in range(2 + number % 4))
        messages = [{"role": "user", "content": f"What is {terms}? Explain the steps in short, then give the number."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append(GenerationRequest(ids, SamplingParams(max_new_tokens=NEW_TOKENS), number, COPIES))
    return found


def rows_of(groups: list[Any]) -> tuple[torch.Tensor, ...]:
    """(B, T) token IDs, attention mask, response mask, and (B,) group IDs."""
    rows = [(g, group.request.token_ids, c.token_ids) for g, group in enumerate(groups) for c in group.completions]
    ids = pad_rows([prompt + list(own) for _, prompt, own in rows], 0, torch.long)
    slots = torch.arange(ids.shape[1])
    starts = torch.tensor([len(prompt) for _, prompt, _ in rows])[:, None]
    ends = starts + torch.tensor([len(own) for _, _, own in rows])[:, None]
    return ids, slots < ends, (slots >= starts) & (slots < ends), torch.tensor([g for g, _, _ in rows])


def update(policy: PolicyModel, optimizer: Any, rows: tuple[torch.Tensor, ...]) -> None:
    """One update of GRPO with made-up advantages."""
    ids, attention, response, groups = rows
    advantages = torch.randn(len(ids), generator=torch.Generator().manual_seed(0))
    for some in micro_batches(ids, attention, response, BUDGET):
        width = int(attention[some].sum(1).max())
        part = [x[some, :width] for x in (ids, attention, response)]
        given = {"token_ids": part[0], "attention_mask": part[1], "response_mask": part[2], "group_ids": groups[some]}
        logprobs = policy(RowBatch(**given), entropy=True).logprobs
        ratio = (logprobs - logprobs.detach()).exp()
        (-(ratio * advantages[some, None] * part[2]).sum() / response.sum()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """CPU and wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(path: str, seconds: float) -> dict[str, Any]:
    """Rounds of all variants until the time is over."""
    begun = time.perf_counter()
    asked = requests(AutoTokenizer.from_pretrained(path))
    engines = {}
    for on in (True, False):
        engines[on] = TransformersEngine(cpu_kernels=on)
        engines[on].start(EngineContext(path, max_new_tokens=NEW_TOKENS))
    policy = PolicyModel.from_spec(ModelSpec(path), trainable=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-9, fused=True)
    groups = list(engines[True].generate_all(asked))
    rows = rows_of(groups)
    update(policy, optimizer, rows)

    def sample(on: bool) -> None:
        sum(len(c.token_ids) for group in engines[on].generate_all(asked) for c in group.completions)

    def sync() -> None:
        engines[True].load_weights(policy.lm.named_parameters(), policy_version=1)

    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def run(part: str, variant: str, function: Callable[[], Any]) -> None:
        taken.setdefault((part, variant), []).append(timed(function))

    rounds = 0
    while rounds < 2 or time.perf_counter() - begun < seconds * rounds / (rounds + 1):
        run("update", "all on", lambda: update(policy, optimizer, rows))
        run("sync", "all on", sync)
        run("generation", "all on", lambda: sample(True))
        run("generation", "decoder", lambda: sample(False))
        rounds += 1
        print(f"round {rounds}, {time.perf_counter() - begun:.0f} s", flush=True)

    def median(part: str, variant: str, clock: int) -> float:
        times = taken.get((part, variant)) or taken[part, "all on"]
        return statistics.median(each[clock] for each in times)

    table = []
    for name in ("all on", "decoder"):
        cpu, wall = (sum(median(part, name, clock) for part in ("generation", "update", "sync")) for clock in (0, 1))
        table.append({"off": name, "cpu_s": cpu, "wall_s": wall})
    for row in table:
        row["cpu_ratio"], row["wall_ratio"] = row["cpu_s"] / table[0]["cpu_s"], row["wall_s"] / table[0]["wall_s"]
    parts = {part: median(part, "all on", 0) for part in ("generation", "update", "sync")}
    return {
        "model": path,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "prompt_tokens": [len(request.token_ids) for request in asked],
        "completion_tokens": int(rows[2].sum()),
        "all_on_cpu_s": parts,
        "rows": table,
        "samples": {f"{part}: {variant}": times for (part, variant), times in taken.items()},
    }


def main() -> None:
    """Parses the command line, measures, prints a markdown table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="model directory or ID")
    parser.add_argument("--seconds", type=float, default=600, help="about how long to measure")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.seconds)
    print("| switched off | CPU s | ratio | wall s | ratio |\n|---|---|---|---|---|")
    for row in result["rows"]:
        print(f"| {row['off']} | {row['cpu_s']:.2f} | {row['cpu_ratio']:.2f} | {row['wall_s']:.2f} "
              f"| {row['wall_ratio']:.2f} |")  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

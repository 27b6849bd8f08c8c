r"""Peak memory of a GRPO run on SmolLM2-135M-Instruct and Gemma 3 270M: full, LoRA, checkpointing, in each layout.

    python benchmarks/memory.py --out results/memory.json

Each row is a process that trains one rollout of 8 prompts x 8 completions of 48 tokens with `TransformersEngine` on a
CPU, in float32 or with `--precision bf16-true`. The prompts are sums of reasoning-gym's `chain_sum` after an example,
about 50 tokens. AdamW's state exists from the start, as in every rollout after the first. The peak is the largest
resident set of the process, in 10^9 bytes. `planned` is the estimate of `lightrl plan`. Rows already in the file are
kept. With the environment variable MALLOC_MMAP_THRESHOLD_ set, rows are listed separately. These commands make the
smallest float32 row and `pairs`, the CPU seconds with and without a threshold:

    python benchmarks/memory.py --models gemma3 --ways "LoRA, checkpointing" --layouts shared_prefix --budget 256 \
        --prompts 4 --out results/memory.json
    python benchmarks/memory.py --models smollm2 --ways "LoRA, checkpointing" --layouts shared_prefix --prompts 4 \
        --new-tokens 24 --pairs 3 --out results/memory.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, GROUP, NEW_TOKENS = 8, 8, 48
LAYOUTS = ("padded", "packed", "shared_prefix")
WAYS = {  # name: adapter, checkpointing
    "full": (False, False),
    "full, checkpointing": (False, True),
    "LoRA": (True, False),
    "LoRA, checkpointing": (True, True),
}
PAIRED = ("mmap_threshold", "prompt_tokens", "new_tokens", "rollout_cpu_s", "update_cpu_s", "peak_gb")
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M"}


def prompts(count: int) -> list[str]:
    """Prompts with a sum and a worked example, for a base model."""
    from lightrl.data import ReasoningGymRows

    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    rows = list(ReasoningGymRows({"chain_sum": settings}, size=count + 1)())
    return [f"{rows[0]['prompt']} {rows[0]['answer']}\n{row['prompt']}" for row in rows[1:]]


def spread(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between the completions of a group, so that every completion is trained."""
    return [float(sum(ids) % 997) for ids in completion_ids]


def resident(name: str) -> float:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024.0 * int(re.search(rf"{name}:\s*(\d+)", text)[1])  # type: ignore[index]


def worker(
    path: str, layout: Any, lora: bool, checkpointing: bool, precision: Any, budget: int, count: int, new_tokens: int
) -> dict[str, Any]:
    """One row of the table."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything

    from lightrl.algorithms import GRPOLightningModule, Updates
    from lightrl.callbacks import WeightSync
    from lightrl.data import PromptSource
    from lightrl.engines import TransformersEngine
    from lightrl.models.spec import LoraSpec, ModelSpec
    from lightrl.records import SamplingParams
    from lightrl.rollout import RolloutDataModule

    parts: dict[str, float] = {}
    cpu: dict[str, float] = {}
    seen: dict[str, Any] = {"cpu": 0.0}

    def mark(name: str) -> None:
        """Notes the peak and CPU seconds since the last mark."""
        cpu[f"{name}_cpu_s"], seen["cpu"] = time.process_time() - seen["cpu"], time.process_time()
        parts[name] = max(parts.get(name, 0.0), resident("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")

    class Phases(Callback):
        reads_old_logprobs = False
        reads_all_rows = False

        def on_train_start(self, trainer: Trainer, module: Any) -> None:
            optimizer = trainer.optimizers[0]
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad = torch.zeros_like(p)
            optimizer.step()  # gradients of zero make AdamW's state and change no weight
            optimizer.zero_grad(set_to_none=True)
            mark("start")

        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            mark("rollout")
            seen["batch"] = time.perf_counter()
            seen["lengths"] = batch.attention_mask.sum(1).tolist()
            seen["prompts"] = (batch.attention_mask & ~batch.response_mask).sum(1).tolist()

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            mark("update")
            seen["update_s"] = time.perf_counter() - seen["batch"]

    seed_everything(1, verbose=False)
    spec = ModelSpec(path, layout=layout, lora=LoraSpec() if lora else None, gradient_checkpointing=checkpointing)
    module = GRPOLightningModule(
        spec,
        kl=None,
        updates=Updates(micro_batch_tokens=budget),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-6, weight_decay=0.0, fused=True),
    )
    data = RolloutDataModule(
        PromptSource(rows=[{"prompt": text} for text in prompts(count)], shuffle=False),
        rewards=[spread],
        engine=TransformersEngine(),
        sampling=SamplingParams(max_new_tokens=new_tokens, ignore_eos=True),
        group_size=GROUP,
        prompts_per_rollout=count,
        rollouts_per_epoch=1,
    )
    trainer = Trainer(
        accelerator="cpu", devices=1, precision=precision, max_epochs=1, logger=False, enable_checkpointing=False,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[WeightSync(), Phases()],
    )  # fmt: skip
    begun = time.perf_counter()
    trainer.fit(module, data)
    taken = time.perf_counter() - begun
    lengths = seen["prompts"]
    return {
        "prompt_tokens": lengths[::GROUP],
        "longest": max(seen["lengths"]),
        "budget": budget,
        "peak_gb": max(parts.values()) / 1e9,
        **{f"{name}_gb": value / 1e9 for name, value in parts.items()},
        **cpu,
        "seconds": taken,
        "update_s": seen["update_s"],
    }


def run(values: tuple[Any, ...], environment: dict[str, str]) -> dict[str, Any]:
    """Figures of `worker` in a separate process."""
    command = [sys.executable, __file__, "--worker", *map(str, values)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{values}: the process ended with {done.returncode}.")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def tensors(path: str, layout: str) -> dict[str, float]:
    """10^9 bytes of tensors alive at the peak of an update, without weights and batch, for each way of training."""
    from work import count_blocks, extrapolate

    from lightrl.models.spec import LoraSpec

    blocks = json.loads((Path(path) / "config.json").read_text())["num_hidden_layers"]
    lengths = {"shared": 60, "prompts": [70] * 4 + [68] * 4, "completions": [[NEW_TOKENS] * GROUP] * PROMPTS}
    found = {}
    for way, (lora, checkpointing) in WAYS.items():
        spec = {"lora": LoraSpec() if lora else None, "gradient_checkpointing": checkpointing}
        one, two = (count_blocks(path, lengths, layout, 16384, n, **spec)["peak_bytes"] for n in (1, 2))
        found[way] = extrapolate(blocks, one, two) / 1e9
    return found


def micro_batch(layout: str, budget: int, prompts: int, group: int, prompt: int, response: int) -> int:
    """Number of tokens in the largest micro-batch of an update.

    Args:
        layout: "padded", "packed", or "shared_prefix", which computes the prompt once per group.
        budget: `micro_batch_tokens`.
        prompts: Number of prompts in the update.
        group: Completions per prompt.
        prompt: Tokens per prompt.
        response: Tokens per completion.
    """
    row = prompt + response
    tokens = prompts * (group * row if layout in ("padded", "packed") else prompt + group * response)
    return max(row, min(budget, tokens))


def planned(config: str, row: dict[str, Any]) -> float:
    """Estimate of `lightrl plan` for a row, in 10^9 bytes.

    Args:
        config: Directory with the model's config.json.
        row: A row of the committed table.
    """
    import torch

    from lightrl.cli.plan.memory import Plan, heap, measure_model, memory, total

    precision = row.get("precision", "32-true")
    size = measure_model(config, compute=torch.bfloat16 if precision == "bf16-true" else torch.float32)
    lora, checkpointing = WAYS[row["way"]]
    lengths = row["prompt_tokens"]
    prompt = max(lengths) if row["layout"] == "padded" else -(-sum(lengths) // len(lengths))
    case = Plan(
        size, critic=False, reference=False, gpus=1, precision=precision, lora=16 * lora,
        micro_batch_tokens=micro_batch(row["layout"], row["budget"], len(lengths), GROUP, prompt, NEW_TOKENS),
        checkpointing=checkpointing, cpu=True, engine_width=4, caches=False, sequences=len(lengths) * GROUP,
        length=max(lengths) + NEW_TOKENS,
    )  # fmt: skip
    parts = memory(case, "ddp")
    parts["heap"] = 0.0 if row.get("mmap_threshold") else heap(case)
    return total(parts) / 1e9


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/work.md."""
    lines = ["| Model | Training | Layout | Micro-batch tokens | Peak GB | Planned GB |", "|---" * 6 + "|"]
    order = {name: i for i, name in enumerate([*MODELS, *WAYS, *LAYOUTS])}
    for row in sorted(rows, key=lambda row: [order[row[name]] for name in ("model", "way", "layout")]):
        how = ", 1 MiB threshold" if row.get("mmap_threshold") else ""
        how += ", bfloat16" if row.get("precision") == "bf16-true" else ""
        how += "" if len(row["prompt_tokens"]) == PROMPTS else f", {len(row['prompt_tokens'])} prompts"
        lines.append(
            f"| {MODELS[row['model']]} | {row['way']}{how} | {row['layout'].replace('_', ' ')} | "
            f"{row['budget']:,} | {row['peak_gb']:.1f} | {row['planned_gb']:.1f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of the peaks with the default micro-batches, a panel for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(MODELS), sharey=True)
    for panel, model in zip(axes, MODELS, strict=True):
        for i, layout in enumerate(LAYOUTS):
            found = {
                row["way"]: row["peak_gb"]
                for row in rows
                if (row["model"], row["layout"], row["budget"]) == (model, layout, 16384)
                and not row.get("mmap_threshold")
                and row.get("precision") != "bf16-true"
            }
            places = [j + 0.27 * (i - 1) for j, way in enumerate(WAYS) if way in found]
            values = [found[way] for way in WAYS if way in found]
            color = ("#9ca3af", "#93c5fd", "#2563eb")[i]
            for bar in panel.bar(places, values, width=0.25, color=color, label=layout.replace("_", " ")):
                height = bar.get_height()
                panel.text(bar.get_x() + 0.125, height, f"{height:.1f}", ha="center", va="bottom", fontsize=7)
        panel.axhline(4.0, color="#ea580c", linewidth=0.9, linestyle="--")
        panel.set_xticks(range(len(WAYS)), [way.replace(", ", ",\n") for way in WAYS], fontsize=8)
        panel.set_title(MODELS[model], fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("peak memory of the process, GB", fontsize=9)
    axes[0].legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Runs the processes one after the other and writes the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--paths", nargs="*", help="Model directories; defaults to `packaged_model`", default=[])
    parser.add_argument("--budget", type=int, default=16384, help="micro_batch_tokens")
    parser.add_argument("--precision", choices=["32-true", "bf16-true"], default="32-true")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts per rollout")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--pairs", type=int, default=0, help="only compare CPU seconds with and without a threshold")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--picture", type=Path, help="PNG file")
    parser.add_argument("--tensors", action="store_true", help="also count the tensors of an update of SmolLM2")
    parser.add_argument("--worker", nargs=8, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        path, layout, lora, checkpointing, precision, *counts = args.worker
        row = worker(path, layout, lora == "True", checkpointing == "True", precision, *map(int, counts))
        print(json.dumps(row))
        return
    from lightrl.models.packaged import packaged_model

    result = json.loads(args.out.read_text()) if args.out and args.out.exists() else {"rows": []}
    paths = args.paths or [packaged_model(model) for model in args.models]
    if args.tensors:
        result["tensors_gb"] = tensors(packaged_model("smollm2"), "shared_prefix")
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(ROOT)}
    sizes = (args.budget, args.prompts, args.new_tokens)
    for pair in range(args.pairs):
        for threshold in ("0", "1048576")[:: -1 if pair % 2 else 1]:
            environment.pop("MALLOC_MMAP_THRESHOLD_", None)
            environment |= {"MALLOC_MMAP_THRESHOLD_": threshold} if threshold != "0" else {}
            values = (paths[0], args.layouts[0], *WAYS[args.ways[0]], args.precision, *sizes)
            row = {"mmap_threshold": int(threshold), "new_tokens": args.new_tokens, **run(values, environment)}
            result.setdefault("pairs", []).append({key: row[key] for key in PAIRED})
            print(json.dumps(result["pairs"][-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.pairs:
        return
    for (model, path), way, layout in product(zip(args.models, paths, strict=True), args.ways, args.layouts):
        named = {"model": model, "way": way, "layout": layout, "budget": args.budget}
        named |= {"mmap_threshold": int(os.environ.get("MALLOC_MMAP_THRESHOLD_", 0)), "precision": args.precision}
        same = [row for row in result["rows"] if named.items() <= ({"precision": "32-true"} | row).items()]
        if args.prompts in {len(row["prompt_tokens"]) for row in same}:
            continue
        values = (path, layout, *WAYS[way], args.precision, *sizes)
        row = {**named, **run(values, environment)}
        row["planned_gb"] = planned(path, row)
        print(json.dumps(row), flush=True)
        result["rows"].append(row)
        result["machine"] = {"processor": platform.machine(), "cores": os.cpu_count(), "threads": args.threads}
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["rows"]))
    if args.picture:
        draw(result["rows"], args.picture)


if __name__ == "__main__":
    main()

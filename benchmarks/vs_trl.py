"""Compares a GRPO step of LightRL with one of TRL 1.16 on pretrained models: wall time, CPU seconds, and peak memory.

    python benchmarks/vs_trl.py --cases 48/50 256/50 48/500 --out results/vs_trl.json
    python benchmarks/vs_trl.py --cases 48/50 --features --out results/vs_trl.json    (one feature off at a time)

A case is a model, the maximum length of a completion, and the length of a prompt in tokens. Every side trains the same
model on the same 8 prompts x 8 completions: sums of reasoning-gym's `chain_sum`, preceded by solved examples if the
prompt should be longer. SmolLM2-135M-Instruct is prompted in its chat format, Gemma 3 270M (a base model) with solved
examples. The model decides where completions end. TRL and LightRL sample from the same distribution, and the table has
their mean lengths. The loss is GRPO's without KL, with one update per rollout, AdamW, learning rate 1e-6, float32.

The sides run one after the other on an otherwise idle machine, each in a separate process. A step is everything between
two optimizer steps: data, weight sync and its check, generation, rewards, update, and metrics. The first step warms up;
values are medians of the rest. Peak memory is the process's maximum resident set. TRL generates with `generate` and
runs with each micro-batch size of `--micro`; the table uses the best one.

`--features` runs LightRL with `TransformersEngine` once more for each feature that speeds up such a step, with that
feature off, and once with all of them off. With fewer prompts, a whole group often has equal rewards: `--all-rows` then
keeps LightRL from skipping rows without advantage.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiny_step import Ticket

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, GROUP, RATE = 8, 8, 1e-6
SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
FEATURES = {
    "shared prefix": "layout",
    "packing": "packing",
    "CPU decoder": "decoder",
    "skipping rows without advantage": "rows",
    "no old log-probs for one update": "old",
}


def prompts_of(folder: str, tokens: int, count: int) -> list[str]:
    """Prompts of about so many tokens, as text, with the chat template applied where the model has one."""
    from transformers import AutoTokenizer

    from lightrl.data import ReasoningGymRows

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = list(ReasoningGymRows({"chain_sum": SETTINGS}, size=200)())
    solved = [f"Q: {row['prompt']}\nA: {row['answer']}\n" for row in rows[PROMPTS:]]
    found = []
    for row in rows[:count]:
        examples = 0
        while True:
            if tokenizer.chat_template:
                content = "".join(solved[:examples]) + row["prompt"]
                message = [{"role": "user", "content": content}]
                text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            else:
                text = "".join(solved[:examples]) + f"Q: {row['prompt']}\nA:"
            if len(tokenizer(text)["input_ids"]) >= tokens:
                break
            examples += 1
        found.append(text)
    return found


def solved(prompts: Any = None, completions: Any = None, answer: Any = None, **_: Any) -> list[float]:
    """1 if the last number of the completion is the answer."""
    import re

    found = [re.findall(r"-?\d+", text) for text in completions]
    return [float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, answer, strict=True)]


def rows_of(folder: str, tokens: int, count: int) -> list[dict[str, str]]:
    """Columns `prompt` and `answer`."""
    from lightrl.data import ReasoningGymRows

    answers = [row["answer"] for row in list(ReasoningGymRows({"chain_sum": SETTINGS}, size=200)())[:count]]
    return [{"prompt": p, "answer": a} for p, a in zip(prompts_of(folder, tokens, count), answers, strict=True)]


def run_trl(given: dict[str, Any], ticket: Ticket) -> None:
    """TRL's side; never returns."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    lengths: list[int] = []

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ticket.step_ended(lambda: {"length": statistics.mean(lengths)})
            lengths.clear()

    def reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        ticket.rewards += (values := solved(prompts, completions, answer))
        return values

    micro, steps = given["micro"], given["steps"]
    config = GRPOConfig(
        output_dir=f"{given['scratch']}/trl", per_device_train_batch_size=micro,
        gradient_accumulation_steps=given["prompts"] * GROUP // micro, num_generations=GROUP,
        max_completion_length=given["new_tokens"], temperature=1.0, beta=0.0, num_iterations=1, loss_type="grpo",
        learning_rate=RATE, weight_decay=0.0, lr_scheduler_type="constant", max_grad_norm=1.0,
        optim="adamw_torch_fused", bf16=False, gradient_checkpointing=False, use_cpu=True, max_steps=steps + 1,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, shuffle_dataset=False, seed=1,
        dataloader_num_workers=0,
        **({"use_vllm": True, "vllm_mode": "colocate"} if given["engine"] == "vllm" else {}),
    )  # fmt: skip
    rows = Dataset.from_list(rows_of(given["model"], given["prompt_tokens"], given["prompts"]) * (steps + 1))
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(given["model"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    GRPOTrainer(model, reward, config, rows, processing_class=tokenizer, callbacks=[Stop()]).train()


def run_lightrl(given: dict[str, Any], ticket: Ticket) -> None:
    """LightRL's side; never returns."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything

    from lightrl.algorithms import GRPOLightningModule, Updates
    from lightrl.callbacks import WeightSync
    from lightrl.data import PromptSource
    from lightrl.engines import TransformersEngine, VLLMEngine
    from lightrl.models.spec import ModelSpec
    from lightrl.records import SamplingParams
    from lightrl.rollout import RolloutDataModule

    off = set(given["off"])
    lengths: list[int] = []

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any) -> None:
            names = ("sync", "generate", "score", "experience", "update")
            times = {name: round(float(outputs.get(f"time/{name}", 0.0)), 3) for name in names}
            ticket.step_ended(lambda: {"length": statistics.mean(lengths), "parts": times})
            lengths.clear()

    if "rows" not in off:
        Stop.reads_all_rows = False  # type: ignore[attr-defined]

    def reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        ticket.rewards += (values := solved(prompts, completions, answer))
        return values

    class Plain(GRPOLightningModule):
        """Computes old log-probs, as a user's override of a hook makes any run do."""

        def minibatches(self, experience: Any) -> Any:
            return super().minibatches(experience)

    seed_everything(1, verbose=False)
    layout = "padded" if "packing" in off else "packed" if "layout" in off else "auto"
    module = (Plain if "old" in off else GRPOLightningModule)(
        ModelSpec(given["model"], layout=layout),
        kl=None,
        updates=Updates(micro_batch_tokens=given["micro"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=RATE, weight_decay=0.0, fused=True),
    )
    engine: Any = VLLMEngine() if given["engine"] == "vllm" else TransformersEngine(cpu_kernels="decoder" not in off)
    data = RolloutDataModule(
        PromptSource(rows=rows_of(given["model"], given["prompt_tokens"], given["prompts"]), chat_template=False),
        rewards=[reward],
        engine=engine,
        sampling=SamplingParams(max_new_tokens=given["new_tokens"]),
        group_size=GROUP,
        prompts_per_rollout=given["prompts"],
        rollouts_per_epoch=given["steps"] + 1,
    )
    Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[WeightSync(), Stop()],
    ).fit(module, data)  # fmt: skip


def measure(given: dict[str, Any], threads: int) -> dict[str, Any]:
    """Runs a side alone and returns its figures."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--worker", json.dumps({**given, "scratch": scratch})]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "KMP_BLOCKTIME": os.environ.get("KMP_BLOCKTIME", "200"),
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        reports = []
        for _ in range(given["steps"] + 1):
            line = worker.stdout.readline()  # type: ignore[union-attr]
            if not line:
                raise RuntimeError(f"A worker ended early: {given}")
            reports.append(json.loads(line))
            if len(reports) <= given["steps"]:
                worker.stdin.write("go\n")  # type: ignore[union-attr]
                worker.stdin.flush()  # type: ignore[union-attr]
        worker.stdin.close()  # type: ignore[union-attr]
        worker.wait(60)
    timed = [report for report in reports if "wall" in report]
    found: dict[str, Any] = {
        name: round(statistics.median(report[name] for report in timed), 2) for name in ("wall", "cpu", "length")
    }
    if "parts" in timed[0]:
        found["parts"] = {n: round(statistics.median(r["parts"][n] for r in timed), 2) for n in timed[0]["parts"]}
    found["steps"] = [round(report["wall"], 2) for report in timed]
    return {"micro": given["micro"], "threads": threads, **found, "peak_gb": round(reports[-1]["peak_mb"] / 1024, 2)}


def case(arguments: argparse.Namespace, new_tokens: int, prompt_tokens: int) -> dict[str, Any]:
    """One row of the table: TRL with each micro-batch, LightRL with each engine and, if asked, each feature off."""
    base = {"model": arguments.folder, "new_tokens": new_tokens, "prompt_tokens": prompt_tokens,
            "prompts": arguments.prompts, "off": ["rows"] if arguments.all_rows else []}  # fmt: skip
    steps, threads = arguments.steps, arguments.threads
    row: dict[str, Any] = {}

    def run(name: str, **given: Any) -> None:
        row[name] = measure({**base, "steps": steps, "micro": arguments.micro_tokens, "engine": "", **given}, threads)
        print(f"{name}: {row[name]}", flush=True)

    for side in arguments.sides:
        if side.startswith("trl"):
            for micro in arguments.micro:
                name = f"{side}, micro-batch {micro}"
                run(name, micro=micro, steps=arguments.trl_steps, side="trl", engine=side.removeprefix("trl-"))
        else:
            run(f"lightrl, {side}", engine=side, side="lightrl")
    if arguments.features:
        for name, off in FEATURES.items():
            run(f"without {name}", engine="transformers", side="lightrl", off=[off])
        run("without all of them", engine="transformers", side="lightrl", off=list(FEATURES.values()))
    best = min((row[name] for name in row if name.startswith("trl")), key=lambda each: each["wall"], default=None)
    for name, each in row.items():
        if best and not name.startswith("trl"):
            each["speed_ratio"] = round(best["wall"] / each["wall"], 2)
            each["memory_ratio"] = round(each["peak_gb"] / best["peak_gb"], 2)
    return row


def main() -> None:
    """Parses the command line, measures, prints and writes JSON; cases already in the file are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["smollm2", "gemma3"], default="smollm2")
    parser.add_argument("--cases", nargs="+", default=["48/50"], help="new tokens/prompt tokens")
    parser.add_argument("--sides", nargs="*", choices=["transformers", "vllm", "trl", "trl-vllm"],
                        default=["transformers", "vllm", "trl"])  # fmt: skip
    parser.add_argument("--steps", type=int, default=3, help="timed steps of LightRL")
    parser.add_argument("--trl-steps", type=int, default=1, help="timed steps of TRL")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--micro", nargs="+", type=int, default=[16, 8], help="rows of TRL's micro-batches")
    parser.add_argument("--micro-tokens", type=int, default=16384, help="tokens of LightRL's micro-batch")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts of a step, each with 8 completions")
    parser.add_argument("--all-rows", action="store_true", help="LightRL also trains on rows without advantage")
    parser.add_argument("--features", action="store_true", help="also run LightRL with each feature off")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from lightrl.models.packaged import packaged_model

    arguments.folder = packaged_model(arguments.model)
    for text in arguments.cases:
        new_tokens, prompt_tokens = map(int, text.split("/"))
        row = case(arguments, new_tokens, prompt_tokens)
        if arguments.out:
            import torch
            import transformers
            import trl

            old = json.loads(arguments.out.read_text())["cases"] if arguments.out.exists() else {}
            few = "" if arguments.prompts == PROMPTS else f", {arguments.prompts} prompts"
            name = f"{arguments.model} {text}{few}{', all rows' if arguments.all_rows else ''}"
            versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
            machine = {"processor": platform.machine(), "cores": os.cpu_count()}
            cases = {**old, name: {**old.get(name, {}), **row}}
            report = {"machine": machine, "versions": versions, "cases": cases}
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        asked = json.loads(sys.argv[2])
        stops = Ticket()
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        (run_trl if asked["side"] == "trl" else run_lightrl)(asked, stops)
    else:
        main()

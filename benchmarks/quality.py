"""Time to quality: rollouts and seconds until SmolLM2-135M-Instruct solves 65% of held-out sums.

    python benchmarks/quality.py --systems grpo rloo ppo --seeds 1 2 3 4 5 --out results/quality.json
    python benchmarks/quality.py --systems trl --seeds 1 2 3 --out results/quality.json
    python benchmarks/quality.py --systems trl --seeds 1 --rates 2e-5 8e-5 --out results/quality.json
    python benchmarks/quality.py --rates 1e-5 2e-5 8e-5 16e-5 --out results/rates.json
    python benchmarks/quality.py --systems --out results/quality.json --picture ../docs/images/quality.png
    python benchmarks/quality.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm_symbolic --target 0.5 \\
        --new-tokens 256 --device cuda --out results/quality_gpu.json        (the same on a GPU; not run yet)

Rules, after MLPerf Training:

- The task is the quickstart's: sums of one- and two-digit numbers of reasoning-gym's `basic_arithmetic`, 16 prompts x 8
  completions of at most 16 tokens per rollout, temperature 1. The 128 held-out questions are the same for all systems.
- The target is an accuracy of 0.65 at an evaluation, sampled at temperature 1. An evaluation follows every second
  rollout. A run fails if it hasn't reached the target after `--rollouts` rollouts.
- The time of a run is that of its training steps (generation, rewards, weight sync, update). Loading and evaluations
  don't count. The CPU seconds are those of the whole process and include both.
- LightRL ends a completion at the end of its line. TRL has no stop string here: it samples up to 16 tokens, and
  the first line is scored.
- All systems have the learning rate 4e-5, which decays linearly to 0 over `--rollouts`, AdamW, and one update per
  rollout. PPO has a critic, a reference model, and an adaptive KL coefficient. `--rates` sets other rates (for PPO, the
  actor's).
- Each run's log lies next to the output file.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EVERY = 2
RATE = 4e-5
SUMS = {
    "operators": ["+"], "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "allow_parentheses": False,
    "allow_negation": False,
}  # fmt: skip
SOLVED = "eval/reward/ReasoningGymReward/solved"


def command(given: argparse.Namespace, system: str, rate: float, seed: int, folder: str) -> list[str]:
    """LightRL's run."""
    from lightrl.models.packaged import packaged_model

    algorithm = "ppo" if system == "ppo" else "grpo"
    stop = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": SOLVED, "mode": "max", "patience": 1000, "stopping_threshold": given.target},
    }
    path = packaged_model("smollm2") if given.model == "smollm2" else given.model
    told = [
        "fit", f"--config=lightrl:quickstart/smollm2_{algorithm}",
        *(["--model=RLOOLightningModule"] if system == "rloo" else []),
        f"--model.init_args.actor.path={path}",
        f"--model.init_args.optimizer.init_args.lr={rate}",
        f"--run_dir={folder}", f"--seed_everything={seed}",
        f"--trainer.precision={given.precision}",
        f"--trainer.accelerator={given.device}",
        f"--trainer.max_epochs={given.rollouts // EVERY}",
        f"--data.init_args.rollouts_per_epoch={EVERY}",
        f"--trainer.callbacks+={json.dumps(stop)}",
    ]  # fmt: skip
    if given.task != "basic_arithmetic":
        tasks = json.dumps({given.task: {}})
        told += [
            f"--data.init_args.prompts.rows.init_args.tasks={tasks}",
            f"--data.init_args.evaluation.prompts.rows.init_args.tasks={tasks}",
            "--data.init_args.sampling.stop=null",
        ]
    if given.new_tokens != 16:
        told.append(f"--data.init_args.sampling.max_new_tokens={given.new_tokens}")
    return told


def lightrl(given: argparse.Namespace, system: str, rate: float, seed: int, log: Path) -> dict[str, Any]:
    """Runs one seed and reads its metrics."""
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        told = [sys.executable, "-m", "lightrl", *command(given, system, rate, seed, folder)]
        subprocess.run(told, stdout=output, stderr=subprocess.STDOUT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        with (Path(folder) / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    steps = [float(row["time/step"]) for row in rows if row.get("time/step")]
    accuracy = {int(row["step"]) + 1: round(float(row[SOLVED]), 4) for row in rows if row.get(SOLVED)}
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return outcome(given, accuracy, steps, cpu)


def outcome(given: argparse.Namespace, accuracy: dict[int, float], steps: list[float], cpu: float) -> dict[str, Any]:
    """A run's row: rollouts and seconds to the target, or None."""
    reached = next((count for count, value in accuracy.items() if value >= given.target), None)
    return {
        "accuracy": accuracy,
        "rollouts": reached,
        "seconds": None if reached is None else round(sum(steps[:reached]), 1),
        "cpu_seconds": round(cpu),
        "seconds_per_rollout": round(statistics.median(steps), 2),
    }


def trl(given: argparse.Namespace, rate: float, seed: int, log: Path) -> dict[str, Any]:
    """Runs TRL in a separate process."""
    told = {**vars(given), "out": None, "rate": rate, "seed": seed, "worker": None}
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, __file__, "--worker", json.dumps(told)], stdout=subprocess.PIPE, stderr=output, text=True
        )
    (result,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(result.removeprefix("RESULT "))
    return found


def trl_worker(told: dict[str, Any]) -> None:
    """TRL's run."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from lightrl.data import ReasoningGymRows
    from lightrl.models.packaged import packaged_model
    from lightrl.rewards import ReasoningGymReward

    given = argparse.Namespace(**told)
    path = packaged_model("smollm2") if given.model == "smollm2" else given.model
    tasks = {given.task: SUMS if given.task == "basic_arithmetic" else {}}
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    scorer = ReasoningGymReward(extract="number")

    def texts(split: str) -> list[dict[str, Any]]:
        rows = list(ReasoningGymRows(tasks, size=2000, split=split)())  # type: ignore[arg-type]
        for row in rows:
            message = [{"role": "user", "content": row["prompt"]}]
            row["prompt"] = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return rows

    def score(completions: list[str], gym: list[str]) -> list[float]:
        """The first line of each completion, as LightRL's `stop` cuts them."""
        return [float(v) for v in scorer([c.split("\n")[0] for c in completions], gym=gym)]

    def reward(prompts: Any, completions: Any, gym: Any, **_: Any) -> list[float]:
        return score(completions, gym)

    held_out = texts("eval")
    accuracy: dict[int, float] = {}
    steps: list[float] = []

    class Evaluate(TrainerCallback):  # type: ignore[misc]
        began = 0.0

        def measure(self, model: Any, step: int) -> float:
            model.eval()
            correct = 0.0
            for i in range(0, len(held_out), 64):
                some = held_out[i : i + 64]
                ids = tokenizer([row["prompt"] for row in some], return_tensors="pt", padding=True, padding_side="left")
                with torch.no_grad():
                    out = model.generate(**ids.to(model.device), max_new_tokens=given.new_tokens, do_sample=True,
                                         temperature=1.0, top_k=0, top_p=1.0)  # fmt: skip
                said = tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
                correct += sum(value == 1.0 for value in score(said, [row["gym"] for row in some]))
            model.train()
            accuracy[step] = round(correct / len(held_out), 4)
            print(step, accuracy[step], file=sys.stderr, flush=True)
            return accuracy[step]

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.measure(model, 0)
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            steps.append(time.perf_counter() - self.began)
            reached = state.global_step % EVERY == 0 and self.measure(model, state.global_step) >= given.target
            control.should_training_stop |= reached
            self.began = time.perf_counter()

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=given.micro, num_generations=8,
        gradient_accumulation_steps=128 // given.micro, max_completion_length=given.new_tokens, temperature=1.0,
        beta=0.0, num_iterations=1, loss_type="grpo", learning_rate=given.rate, weight_decay=0.0,
        lr_scheduler_type="linear", max_grad_norm=1.0, optim="adamw_torch_fused",
        bf16=given.precision == "bf16-mixed", gradient_checkpointing=False, use_cpu=given.device == "cpu",
        max_steps=given.rollouts, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        seed=given.seed,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = Dataset.from_list(texts("train"))
    GRPOTrainer(model, reward, config, rows, processing_class=tokenizer, callbacks=[Evaluate()]).train()
    print("RESULT " + json.dumps(outcome(given, accuracy, steps, time.process_time())), flush=True)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and 95% interval (Student's t) of the runs that reached the target, and the number of failures."""
    found: dict[str, Any] = {"runs": len(runs), "failures": sum(run["rollouts"] is None for run in runs)}
    student = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
    for name in ("rollouts", "seconds"):
        values = [run[name] for run in runs if run["rollouts"] is not None]
        if values:
            found[name] = round(statistics.mean(values), 1)
        if len(values) in student:
            half = student[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
            found[f"{name}_interval"] = [round(found[name] - half, 1), round(found[name] + half, 1)]
    return found


NAMES = {"grpo": "GRPO", "rloo": "RLOO", "ppo": "PPO", "trl": "GRPO in TRL"}


def draw(systems: dict[str, Any], path: Path) -> None:
    """Draws the seconds of every run to the target."""
    from matplotlib.figure import Figure

    dark = path.stem.endswith("-dark")
    ink = "#e5e7eb" if dark else "#111827"
    figure = Figure(figsize=(7.0, 0.5 * len(systems) + 1.0), dpi=150, layout="constrained")
    axes = figure.subplots()
    for place, (name, found) in enumerate(systems.items()):
        seconds = [run["seconds"] for run in found["runs"] if run["seconds"] is not None]
        color = "#ea580c" if name.startswith("trl") else "#2563eb"
        axes.scatter(seconds, [place] * len(seconds), color=color, alpha=0.7, s=28)
        axes.plot([found["summary"]["seconds"]] * 2, [place - 0.3, place + 0.3], color=color, linewidth=2)
    axes.set_yticks(range(len(systems)), [label(name) for name in systems], color=ink)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(
        "seconds of training to an accuracy of 0.65 (a dot per seed, a line at the mean)", color=ink, fontsize=9
    )
    axes.tick_params(colors=ink)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True)


def label(name: str) -> str:
    """A system's name in the picture."""
    system, _, rate = name.partition(", ")
    return NAMES[system] + (f", rate {float(rate):.0e}".replace("e-0", "e-") if rate else "")


def main() -> None:
    """Parses the command line, runs, and writes JSON after each run; runs already in the file are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="*", choices=["grpo", "rloo", "ppo", "trl"], default=["grpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--model", default="smollm2", help="smollm2, or a model directory or ID")
    parser.add_argument("--task", default="basic_arithmetic", help="generator of reasoning-gym")
    parser.add_argument("--target", type=float, default=0.65)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rates", nargs="+", type=float, default=[RATE], help="learning rates")
    parser.add_argument("--micro", type=int, default=16, help="rows of TRL's micro-batch")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path, help="PNG file; `-dark` at the end of its name draws light text")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(given.out.read_text())["systems"] if given.out.exists() else {}
    for system in given.systems:
        for rate in given.rates:
            name = system if system != "trl" and rate == RATE else f"{system}, {rate:g}"
            for seed in given.seeds:
                log = given.out.with_name(f"{given.out.stem}.{name.replace(', ', '_')}.{seed}.log")
                run = trl(given, rate, seed, log) if system == "trl" else lightrl(given, system, rate, seed, log)
                print(name, seed, run, flush=True)
                runs = [r for r in kept.get(name, {}).get("runs", []) if r["seed"] != seed]
                runs.append(
                    {"seed": seed, "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), **run}
                )
                kept[name] = {"summary": summary(runs), "runs": runs}
                about = {"target": given.target, "task": given.task, "model": given.model, "precision": given.precision}
                given.out.write_text(json.dumps({**about, "systems": kept}, indent=1) + "\n")
    if given.picture:
        draw(kept, given.picture)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        trl_worker(json.loads(sys.argv[2]))
    else:
        main()

"""Runs an example with several seeds and thread counts, and checks that it ends above its minimum and near its best.

    python benchmarks/examples_over_seeds.py quickstart --seeds 1 2 3 4 5 --threads 1 2 --out results/examples.json

Each run uses an empty directory (under `--work`, which is kept) and does the same as the example's own script, with
another seed. For the metric logged by the evaluation, it records the value before training, the best, the last, and the
lowest after the best. Runs that are already in the JSON file are skipped, so an interrupted call resumes. The table is
written next to the file as Markdown. The exit code is 1 if a run ended below the minimum, or more than `--fall` below
its best. CPU seconds are summed over all processes of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrl.checkpoints.files import atomic_write
from lightrl.cli.report.read import read_run

ROOT = Path(__file__).resolve().parent.parent
FIT = ("-m", "lightrl", "fit", "--config")
SEED, ENGINE = "--seed_everything={seed}", "--data.init_args.engine={engine}"


@dataclass(frozen=True)
class Example:
    """An example's steps and what is asked of it.

    Attributes:
        steps: arguments of Python, one tuple per process. run: the folder whose evaluation counts.
        metric: the curve, where more is better. bar: what its end must reach; None where the last step fails instead.
        printed: further numbers, by name: the step that prints them, and a regular expression with one group.
    """

    steps: tuple[tuple[str, ...], ...]
    run: str
    metric: str = "eval/reward"
    bar: float | None = None
    printed: dict[str, tuple[int, str]] = field(default_factory=dict)


EXAMPLES = {
    "quickstart": Example(
        ((*FIT, "configs/quickstart/sft.yaml", SEED), (*FIT, "configs/quickstart/ppo.yaml", SEED, ENGINE)),
        "outputs/quickstart/ppo",
        bar=0.90,
    ),
    "vlm": Example(
        (
            ("-m", "examples.vlm.make_model", "outputs/vlm/start"),
            (*FIT, "examples/vlm/sft.yaml", SEED),
            (*FIT, "examples/vlm/grpo.yaml", SEED, ENGINE),
        ),
        "outputs/vlm/grpo",
        bar=0.90,
    ),
    "agent": Example(
        (
            ("-m", "examples.agent.make_model", "outputs/agent/start"),
            (*FIT, "examples/agent/sft.yaml", SEED),
            (*FIT, "examples/agent/grpo.yaml", SEED, ENGINE),
        ),
        "outputs/agent/grpo",
        bar=0.80,
    ),
    "endpoint": Example(
        (
            ("-m", "examples.agent.make_model", "outputs/agent/start"),
            (*FIT, "examples/agent/sft.yaml", SEED),
            (*FIT, "examples/endpoint/grpo.yaml", SEED, ENGINE),
        ),
        "outputs/endpoint/grpo",
        bar=0.80,
    ),
    "rlhf": Example(
        (
            (*FIT, "examples/rlhf/sft.yaml", SEED),
            (*FIT, "examples/rlhf/reward.yaml", SEED),
            (*FIT, "examples/rlhf/ppo.yaml", SEED, ENGINE),
            ("-m", "examples.rlhf.win_rate", *(f"outputs/rlhf/{name}/model" for name in ("sft", "ppo", "reward"))),
        ),
        "outputs/rlhf/ppo",
        printed={
            "reward_accuracy": (1, r"eval accuracy ([0-9.]+)"),
            "win_rate": (3, r"win rate ([0-9.]+)%"),
            "kl": (3, r"SFT\): ([0-9.]+) nats"),
        },
    ),
}


def train(example: Example, folder: Path, seed: int, threads: int, engine: str) -> dict[str, Any]:
    """Runs the steps in a folder and returns what became of the metric."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("configs", "examples"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(ROOT / name)
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for number, step in enumerate(example.steps):
        command = [sys.executable, *(part.format(seed=seed, engine=engine) for part in step)]
        log = folder / f"step{number}.log"
        with log.open("w") as file:
            done = subprocess.run(command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}; its output is in {log}.")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    curve = read_run(folder / example.run).metrics[example.metric]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    numbers = {}
    for name, (step_number, pattern) in example.printed.items():
        match = re.search(pattern, (folder / f"step{step_number}.log").read_text())
        numbers[name] = float(match[1]) if match else None
    return {**extremes(list(curve.values())), **numbers, "cpu_seconds": round(cpu), "curve": curve}


def extremes(values: list[float]) -> dict[str, float]:
    """Of a curve: first value, best, end, and the lowest from the best on."""
    best = max(values)
    return {"start": values[0], "best": best, "end": values[-1], "lowest_after": min(values[values.index(best) :])}


def failures(runs: list[dict[str, Any]], bar: float | None, fall: float) -> list[str]:
    """What is wrong with the runs, one line each."""
    found = []
    for run in runs:
        name = f"seed {run['seed']}, {run['threads']} thread(s)"
        if bar is not None and run["end"] < bar:
            found.append(f"{name}: ended at {run['end']:.3f}, below the bar of {bar}.")
        if run["best"] - run["end"] > fall:
            found.append(f"{name}: ended at {run['end']:.3f}, more than {fall} below its best, {run['best']:.3f}.")
    return found


def table(runs: list[dict[str, Any]]) -> str:
    """The runs as a Markdown table, with the worst of each column below."""
    printed = [name for example in EXAMPLES.values() for name in example.printed if name in runs[0]]
    head = ("seed", "threads", "start", "best", "end", "lowest after the best", *printed, "CPU s")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    numbers = ("start", "best", "end", "lowest_after")
    for run in runs:
        values = [run["seed"], run["threads"], *(f"{run[key]:.3f}" for key in numbers)]
        values += [*(run[key] for key in printed), run["cpu_seconds"]]
        lines.append(f"| {' | '.join(map(str, values))} |")
    worst = [f"{min(run[key] for run in runs):.3f}" for key in numbers]
    last = ["**worst**", "", *worst, *[""] * len(printed), max(run["cpu_seconds"] for run in runs)]
    lines.append(f"| {' | '.join(map(str, last))} |".replace("  |", " |"))
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=sorted(EXAMPLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engine", default="VLLMEngine")
    parser.add_argument("--fall", type=float, default=0.03, help="maximum fall from the best value to the last")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "lightrl-examples")
    parser.add_argument("--out", type=Path, default=Path("outputs/examples.json"))
    args = parser.parse_args()
    example = EXAMPLES[args.example]
    stored: dict[str, list[dict[str, Any]]] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    runs = stored.setdefault(args.example, [])
    for threads in args.threads:
        for seed in args.seeds:
            this = {"seed": seed, "threads": threads, "engine": args.engine}
            if any(this.items() <= run.items() for run in runs):
                continue
            folder = args.work / f"{args.example}-{args.engine}-{threads}-{seed}"
            runs.append({**this, **train(example, folder, seed, threads, args.engine)})
            runs.sort(key=lambda run: (run["engine"], run["threads"], run["seed"]))
            with atomic_write(args.out, "w") as file:
                json.dump(stored, file, indent=1)
            with atomic_write(args.out.with_suffix(".md"), "w") as file:
                file.write("\n".join(f"## {name}\n\n{table(each)}" for name, each in stored.items()))
    print(table(runs), end="")
    if found := failures(runs, example.bar, args.fall):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()

"""The quickstart over several seeds: accuracy on held-out questions, reward, and time of each rollout.

    python benchmarks/quickstart.py --seeds 1 2 3 4 5 --out results/quickstart.json
    python benchmarks/quickstart.py --algorithm ppo --seeds 1 --out results/quickstart_ppo.json
    python benchmarks/quickstart.py --collect RUN_DIR ... --out results/quickstart.json    # of finished runs

`eval_accuracy` is the fraction of held-out questions with a score of 1 (`eval/reward/ReasoningGymReward/solved`), and
`eval_score` the mean score, which includes partial credit. Both are by number of rollouts so far. `wall_seconds` and
`cpu_seconds` cover the command from start to report.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SOLVED = "eval/reward/ReasoningGymReward/solved"


def collect(run: Path) -> dict[str, Any]:
    """Curves of a finished run, by its `metrics.csv` and `config.yaml`."""
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    config = yaml.safe_load((run / "config.yaml").read_text())

    def column(name: str) -> list[float]:
        return [round(float(row[name]), 4) for row in rows if row.get(name)]

    def evaluations(name: str) -> dict[str, float]:
        return {str(int(row["step"]) + 1): round(float(row[name]), 4) for row in rows if row.get(name)}

    found = {
        "seed": config["seed_everything"],
        "precision": str(config["trainer"]["precision"] or "32-true"),
        "eval_accuracy": evaluations(SOLVED),
        "eval_score": evaluations("eval/reward"),
        "train_reward": column("reward/mean"),
        "seconds_per_rollout": [round(seconds, 1) for seconds in column("time/step")],
    }
    return {name: value for name, value in found.items() if value}


def measure(algorithm: str, seed: int, log: Path) -> dict[str, Any]:
    """Runs the quickstart in a temporary directory."""
    command = [sys.executable, "-m", "lightrl", "quickstart", f"--algorithm={algorithm}", f"--seed={seed}"]
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, check=True)
        wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        run = collect(Path(folder) / "outputs" / "quickstart" / f"smollm2_{algorithm}")
    return {**run, "wall_seconds": round(wall), "cpu_seconds": round(cpu)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["grpo", "ppo"], default="grpo", help="algorithm of the quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="seeds, one run each")
    parser.add_argument(
        "--collect", type=Path, nargs="+", default=[], help="finished run directories to collect instead of new runs"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    given = parser.parse_args()
    runs = [collect(run) for run in given.collect]
    if not runs:
        runs = [measure(given.algorithm, seed, given.out.with_suffix(f".{seed}.log")) for seed in given.seeds]
    shared = {"command": f"lightrl quickstart --algorithm {given.algorithm}", "model": MODEL, "cores": os.cpu_count()}
    given.out.write_text(json.dumps({**shared, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()

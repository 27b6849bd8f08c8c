"""Learning curves of the named algorithms on the quickstart's task, all from the same SFT warm start.

    lightrl fit --config configs/quickstart/sft.yaml
    python benchmarks/algorithms.py --warm-start outputs/quickstart/sft/model --out algorithms.json \\
        --image docs/images/algorithms.png

Each `configs/algorithms/*.yaml` runs unchanged except for the engine, the length, and the output directory. Accuracy is
measured on the held-out sums, with four completions each at temperature 1. Time is training time (sampling, scoring,
updates, weight sync), without startup and evaluation: `wall` seconds, or CPU seconds with `--clock cpu`, which don't
depend on other work on the machine. Unknown arguments are passed to `lightrl fit`.

Each algorithm runs once per seed. An interrupted call resumes after the last run in its JSON file. The number after `±`
is half the width of the mean's 95% interval (Student's t). If two intervals overlap, nothing is claimed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightrl.cli import run

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "algorithms"
TITLES = {
    "ppo": "PPO",
    "grpo": "GRPO",
    "drgrpo": "Dr. GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "rloo": "RLOO",
    "reinforce_plus_plus": "REINFORCE++",
    "cpgd": "CPGD",
}
GOAL = 0.85
QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Number of seeds -> 97.5 % quantile of Student's t."""


class Curve(Callback):
    """Records accuracy against training time, and stops when the time is up.

    Args:
        seconds: of training. clock: "wall" or "cpu".
    """

    reads_all_rows = False  # so that rows without a gradient are skipped

    def __init__(self, seconds: float, clock: str) -> None:
        self.seconds, self.clock = seconds, clock
        self.points: list[dict[str, float]] = []
        self.spent = {"wall": 0.0, "cpu": 0.0}
        self._since: dict[str, float] | None = None

    def _resume(self) -> None:
        self._since = {"wall": time.perf_counter(), "cpu": time.process_time()}

    def _pause(self) -> None:
        if self._since is not None:
            self.spent["wall"] += time.perf_counter() - self._since["wall"]
            self.spent["cpu"] += time.process_time() - self._since["cpu"]
        self._since = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The clock starts after models, engine and first evaluation."""
        self._resume()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *unused: Any) -> None:
        """Stops when the time is up."""
        self._pause()
        self._resume()
        trainer.should_stop = self.spent[self.clock] >= self.seconds

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The clock stops."""
        self._pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the accuracy, the one before training at 0 seconds."""
        accuracy = float(trainer.callback_metrics["eval/reward/ExactAnswer"])
        rollouts = trainer.fit_loop.total_batch_idx + 1 if not trainer.sanity_checking else 0
        self.points.append({"accuracy": accuracy, "rollouts": rollouts, **self.spent})
        if not trainer.sanity_checking:
            self._resume()


@contextlib.contextmanager
def scratch_folder() -> Iterator[None]:
    """Works in a temporary folder, where the run's own files go."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def learn(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one algorithm with one seed and returns what became of it."""
    curve = Curve(args.seconds, args.clock)
    command = [
        "fit",
        f"--config={CONFIGS / name}.yaml",
        f"--model.init_args.actor.path={args.warm_start.resolve()}",
        f"--data.init_args.engine={args.engine}",
        f"--seed_everything={seed}",
        f"--data.init_args.seed={seed}",
        "--trainer.max_epochs=100000",
        "--trainer.enable_progress_bar=false",
        *args.override,
    ]
    with scratch_folder():
        run(command, trainer_defaults={"callbacks": [curve]})
    reached = next((point for point in curve.points if point["accuracy"] >= GOAL), None)
    return {
        "algorithm": name,
        "seed": seed,
        "start": curve.points[0]["accuracy"],
        "final": curve.points[-1]["accuracy"],
        "best": max(point["accuracy"] for point in curve.points),
        "rollouts": curve.points[-1]["rollouts"],
        "seconds_to_goal": None if reached is None else reached[args.clock],
        "points": curve.points,
    }


def by_algorithm(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each algorithm that has any, in the order of the table."""
    found = {name: [run for run in runs if run["algorithm"] == name] for name in TITLES}
    return {name: each for name, each in found.items() if each}


def on_grid(runs: list[dict[str, Any]], clock: str) -> tuple[np.ndarray, np.ndarray]:
    """Seconds (n,) from 0 to where the shortest run ends, and the runs' accuracies (seeds, n) there, between points."""
    ends = [run["points"][-1][clock] for run in runs]
    grid = np.linspace(0, min(ends), 100)
    curves = [[[point[key] for point in run["points"]] for key in (clock, "accuracy")] for run in runs]
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])


def draw(runs: list[dict[str, Any]], clock: str, path: Path, dark: bool = False) -> None:
    """Plots one panel per algorithm: the mean over seeds, a band from worst to best, and the other means in grey."""
    accent, grey, ink = ("#60a5fa", "#4b5563", "#e5e7eb") if dark else ("#2563eb", "#d1d5db", "#111827")
    curves = {name: on_grid(each, clock) for name, each in by_algorithm(runs).items()}
    columns = min(4, len(curves))
    lines = -(-len(curves) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.2 * lines), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for panel in axes.flat[len(curves) :]:
        panel.set_visible(False)
    for panel, name in zip(axes.flat, curves, strict=False):
        for other, (x, y) in curves.items():
            mine = other == name
            color, width = (accent, 1.8) if mine else (grey, 0.8)
            panel.plot(x, y.mean(0), color=color, linewidth=width, zorder=3 if mine else 1)
        x, y = curves[name]
        panel.fill_between(x, y.min(0), y.max(0), color=accent, alpha=0.2, linewidth=0, zorder=2)
        panel.axhline(GOAL, color="#ea580c", linewidth=0.9, linestyle="--")
        panel.set_title(TITLES[name], fontsize=10, color=ink)
        panel.set_facecolor("none")
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(ink)
        panel.tick_params(labelsize=8, colors=ink)
    figure.supxlabel(f"training time in seconds ({clock})", fontsize=9, color=ink)
    figure.supylabel("held-out accuracy", fontsize=9, color=ink)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True)


def spread(values: list[float]) -> str:
    """Mean with half the width of its 95 % interval, which a single value has none of."""
    mean = f"{statistics.fmean(values):.3f}"
    if len(values) not in QUANTILES:
        return mean
    return f"{mean} ± {QUANTILES[len(values)] * statistics.stdev(values) / len(values) ** 0.5:.3f}"


def table(runs: list[dict[str, Any]]) -> str:
    """The results in Markdown, one line per algorithm."""
    lines = [
        f"| algorithm | seeds | before | after, mean | worst | best | rollouts | seconds to {GOAL} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, each in by_algorithm(runs).items():
        final = [run["final"] for run in each]
        reached = [run["seconds_to_goal"] for run in each if run["seconds_to_goal"] is not None]
        seconds = f"{statistics.median(reached):.0f}" if len(reached) == len(each) else f"{len(reached)} reached it"
        lines.append(
            f"| {TITLES[name]} | {len(each)} | {statistics.fmean(run['start'] for run in each):.3f} | {spread(final)} "
            f"| {min(final):.3f} | {max(final):.3f} | {statistics.median(run['rollouts'] for run in each):.0f} "
            f"| {seconds} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parses arguments, trains one algorithm after the other, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-start", type=Path, default=Path("outputs/quickstart/sft/model"), help="model directory")
    parser.add_argument("--algorithms", nargs="*", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--seconds", type=float, default=180.0, help="training time of each run")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--engine", default="TransformersEngine", help="engine; or VLLMEngine")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file; its runs with the same settings are kept")
    parser.add_argument("--image", type=Path, help="PNG file")
    args, args.override = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    settings = {"seconds": args.seconds, "clock": args.clock, "engine": args.engine, "threads": args.threads}
    settings |= {"machine": platform.machine(), "torch": torch.__version__, "arguments": args.override}
    runs: list[dict[str, Any]] = []
    if args.out and args.out.exists():
        stored = json.loads(args.out.read_text())
        if stored["settings"] != settings:
            sys.exit(f"--out={args.out}: its runs are of {stored['settings']}, these of {settings}. Take another file.")
        runs = stored["runs"]
    for seed in args.seeds:
        for name in args.algorithms:
            if any((run["algorithm"], run["seed"]) == (name, seed) for run in runs):
                continue
            runs.append(learn(name, seed, args))
            print(table(runs[-1:]).splitlines()[-1], flush=True)
            if args.out:
                args.out.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")
    if args.image:
        draw(runs, args.clock, args.image)
        draw(runs, args.clock, args.image.with_stem(f"{args.image.stem}-dark"), dark=True)
    print("\n" + table(runs))


if __name__ == "__main__":
    main()

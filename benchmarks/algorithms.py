"""Learning curves of the named algorithms on the quickstart's task, all from the same warm start.

    lightrl fit --config configs/quickstart/sft.yaml
    python benchmarks/algorithms.py --warm-start outputs/quickstart/sft/model --out algorithms.json \
        --image docs/images/algorithms.png

Each `configs/algorithms/*.yaml` is run as it stands but for the engine, the length and the folder it writes to. The
accuracy is that of completions sampled at temperature 1 for the held-out sums, four for each. Time is that of training
(sampling, scoring, updates, weight sync), without start-up and evaluation: `wall` seconds, or with `--clock cpu` those
of the processor, which do not depend on what else the machine does. Unknown arguments go to `lightrl fit`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


class Curve(Callback):
    """Records accuracy against training time, and stops when the time is up.

    Args:
        seconds: of training. clock: "wall" or "cpu".
    """

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


def learn(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one algorithm and returns its row of the table."""
    curve = Curve(args.seconds, args.clock)
    command = [
        "fit",
        f"--config={CONFIGS / name}.yaml",
        f"--model.init_args.actor.path={args.warm_start.resolve()}",
        f"--data.init_args.engine={args.engine}",
        f"--seed_everything={args.seed}",
        f"--data.init_args.seed={args.seed}",
        "--trainer.max_epochs=100000",
        "--trainer.enable_progress_bar=false",
        *args.override,
    ]
    with scratch_folder():
        run(command, trainer_defaults={"callbacks": [curve]})
    reached = next((point for point in curve.points if point["accuracy"] >= GOAL), None)
    return {
        "algorithm": name,
        "start": curve.points[0]["accuracy"],
        "final": curve.points[-1]["accuracy"],
        "best": max(point["accuracy"] for point in curve.points),
        "rollouts": curve.points[-1]["rollouts"],
        "seconds_to_goal": None if reached is None else reached[args.clock],
        "points": curve.points,
    }


def draw(rows: list[dict[str, Any]], clock: str, path: Path) -> None:
    """All curves, one small panel for each algorithm, the others in grey behind it."""
    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.2 * lines), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for panel in axes.flat[len(rows) :]:
        panel.set_visible(False)
    for panel, row in zip(axes.flat, rows, strict=False):
        for other in rows:
            mine = other is row
            x, y = ([point[key] for point in other["points"]] for key in (clock, "accuracy"))
            panel.plot(
                x, y, color="#2563eb" if mine else "#d1d5db", linewidth=1.8 if mine else 0.8, zorder=3 if mine else 1
            )
        panel.axhline(GOAL, color="#ea580c", linewidth=0.9, linestyle="--")
        panel.set_title(TITLES[row["algorithm"]], fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    figure.supxlabel(f"seconds of training ({clock})", fontsize=9)
    figure.supylabel("accuracy, sampled, held out", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def table(rows: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        f"| algorithm | accuracy before | after | best | rollouts | seconds to {GOAL} |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        reached = "not reached" if row["seconds_to_goal"] is None else f"{row['seconds_to_goal']:.0f}"
        numbers = " | ".join(f"{row[key]:.3f}" for key in ("start", "final", "best"))
        lines.append(f"| {TITLES[row['algorithm']]} | {numbers} | {row['rollouts']} | {reached} |")
    return "\n".join(lines)


def order(row: dict[str, Any]) -> int:
    """Place of a row in the table."""
    return list(TITLES).index(row["algorithm"])


def main() -> None:
    """Parses arguments, trains one algorithm after the other, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-start", type=Path, default=Path("outputs/quickstart/sft/model"), help="model folder")
    parser.add_argument("--algorithms", nargs="*", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--seconds", type=float, default=180.0, help="of training, for each")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--engine", default="TransformersEngine", help="or VLLMEngine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file; rows of other algorithms that it has are kept")
    parser.add_argument("--image", type=Path, help="PNG file")
    args, args.override = parser.parse_known_args()
    torch.set_num_threads(args.threads)
    settings = {"seconds": args.seconds, "clock": args.clock, "engine": args.engine, "seed": args.seed}
    settings |= {"threads": args.threads, "machine": platform.machine(), "torch": torch.__version__}
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.out and args.out.exists() else []
    for name in args.algorithms:
        row = learn(name, args)
        rows = sorted([other for other in rows if other["algorithm"] != name] + [row], key=order)
        print(table([row]).splitlines()[-1], flush=True)
        if args.out:
            args.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    if args.image:
        draw(rows, args.clock, args.image)
    print("\n" + table(rows))


if __name__ == "__main__":
    main()

"""Seconds per step that `lightrl plan` estimates for 1 to 4,096 GPUs, as a picture, and beside published runs.

    python benchmarks/plan_curves.py [--out docs/images/scaling.png]

Nothing is measured and no GPU is needed. The picture has GRPO on 8,192 trajectories of 1,500 tokens for three sizes of
Qwen2.5 on H100, by turns (staleness 0) and with generation ahead. The table it prints compares AReaL's published hours
(https://github.com/inclusionAI/AReaL/blob/main/blog/AReaL_v0_3.md, table 2: 1,000 PPO steps, of which four make a
rollout of 512 x 16 trajectories, on nodes of 8 H800): the mean length is the one that makes the asynchronous run's
hours right, at most 27,000 tokens long and with a spread of 1, and the synchronous run's follow.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightrl.memory_plan.time import Job, Rates, best_split, curve, step_time

ROOT = Path(__file__).resolve().parent.parent
H100 = Rates.of(989.0, 3.35)
SIZES = {  # of Qwen2.5: parameters, layers, width, bytes of a token in the KV cache
    "1.5 B": (1.54e9, 28, 1536, 28 * 2 * 2 * 128 * 2),
    "7 B": (7.62e9, 28, 3584, 28 * 2 * 4 * 128 * 2),
    "32 B": (32.8e9, 64, 5120, 64 * 2 * 8 * 128 * 2),
}
PUBLISHED = {"1.5 B": (16, 14.8, 41.0), "7 B": (24, 25.4, 57.7)}  # nodes, hours ahead, hours by turns
ROLLOUTS = 250


def job(size: str, **more: float) -> Job:
    parameters, layers, hidden, cache = SIZES[size]
    return replace(Job(parameters, layers, hidden, cache, trajectories=8192, prompt=512, response=1500), **more)


def areal(size: str) -> tuple[float, float, float]:
    """Mean tokens that make the asynchronous hours right; estimated hours ahead and by turns."""
    nodes, ahead, _ = PUBLISHED[size]

    def hours(response: float, turns: bool) -> float:
        case = job(size, response=response, spread=1.0, longest=27_000.0, prompt=200.0)
        if turns:
            return step_time(case, H100, 8 * nodes, 0, 0).step * ROLLOUTS / 3600
        return best_split(case, H100, 8 * nodes, 1)[2].step * ROLLOUTS / 3600

    low, high = 100.0, 27_000.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if hours(middle, False) < ahead else (low, middle)
    return low, hours(low, False), hours(low, True)


def picture(out: Path) -> None:
    figure = Figure(figsize=(7.5, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, size in enumerate(SIZES):
        for staleness, line in ((0, "--"), (1, "-")):
            rows = curve(job(size), H100, staleness)
            label = f"{size}, {'ahead' if staleness else 'by turns'}"
            axes.plot([row[0] for row in rows], [row[3].step for row in rows], line, color=f"C{number}", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("GPUs (H100)")
    axes.set_ylabel("seconds per step, estimated")
    axes.set_title("GRPO, 8,192 trajectories of 1,500 tokens")
    axes.grid(alpha=0.3)
    axes.legend(ncols=3, fontsize=8)
    figure.savefig(out, metadata={"Software": None})


def main() -> None:
    """Draws the picture and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "scaling.png")
    args = parser.parse_args()
    picture(args.out)
    for size, (nodes, ahead, turns) in PUBLISHED.items():
        mean, ours_ahead, ours_turns = areal(size)
        hours = f"{ahead} h | {ours_ahead:.1f} h | {turns} h | {ours_turns:.1f} h"
        print(f"| {size} | {8 * nodes} | {mean:,.0f} | {hours} |")


if __name__ == "__main__":
    main()

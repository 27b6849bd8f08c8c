"""Draws the quickstart's score from benchmarks/results/quickstart.json and writes its figures into the pages.

python scripts/plot_quickstart.py            # docs/images/quickstart.png and quickstart-dark.png
python scripts/plot_quickstart.py --pages    # also the figures in the pages of PAGES
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "quickstart.json"
PAGES = ("README.md", "docs/quickstart.md", "docs/grpo.md")
MARKED = re.compile(r"(<!-- quickstart -->).*?(<!-- /quickstart -->)", re.DOTALL)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

Run = dict[str, Any]


def load_runs(path: Path = RESULTS) -> list[Run]:
    """The runs of the file: one run, a list of runs, or `runs` with settings that all of them share."""
    found = json.loads(path.read_text())
    if isinstance(found, list):
        return found
    shared = {key: value for key, value in found.items() if key != "runs"}
    return [{**shared, **run} for run in found.get("runs", [{}])]


def curve(run: Run) -> tuple[list[int], list[float]]:
    """Rollouts and the accuracy on held-out questions after them, in percent."""
    points = sorted((int(rollout), 100 * value) for rollout, value in run["eval_score"].items())
    return [rollout for rollout, _ in points], [value for _, value in points]


def between(values: Sequence[float], unit: str = "") -> str:
    """The values' range after rounding, such as "10%" or "55-61%"."""
    low, high = round(min(values)), round(max(values))
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def sentence(runs: list[Run]) -> str:
    """The result in one sentence. The first scores have no partial credit, so they are accuracies."""
    curves = [curve(run) for run in runs]
    seeds = "one seed" if len(runs) == 1 else f"{NUMBERS[len(runs)]} seeds"
    rollouts = curves[0][0][-1]
    timed = [run["wall_seconds"] / 60 for run in runs if "wall_seconds" in run]
    if len(timed) < len(runs):
        seeds += f", {NUMBERS[len(timed)]} timed"
    return (
        f"Accuracy on held-out questions rises from {between([values[0] for _, values in curves], '%')} to "
        f"{between([100 * run['eval_accuracy'][str(rollouts)] for run in runs], '%')} in {rollouts} rollouts "
        f"({between(timed)} minutes on {NUMBERS[runs[0]['cores']]} CPU cores, {seeds})."
    )


def write_pages(runs: list[Run]) -> None:
    """Puts the sentence between the marks of each page."""
    for name in PAGES:
        page = ROOT / name
        page.write_text(MARKED.sub(rf"\g<1>{sentence(runs)}\g<2>", page.read_text()))


def draw(runs: list[Run], path: Path, dark: bool) -> None:
    """Draws the accuracy of every run on held-out questions, and the reward of its rollouts behind it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ink, paper, grid, line = (
        ("#e6e6e6", "#1e2129", "#3a3f4b", "#8c9eff") if dark else ("#212121", "#ffffff", "#e0e0e0", "#3f51b5")
    )
    figure, axes = plt.subplots(figsize=(7.2, 3.4), dpi=150, facecolor=paper)
    axes.set_facecolor(paper)
    for run in runs:
        rewards = [100 * value for value in run.get("train_reward", [])]
        faint = {"color": line, "alpha": 0.45 / len(runs) ** 0.5, "linewidths": 0}
        label = "reward of a training rollout, x 100" if run is runs[0] else None
        axes.scatter(range(1, len(rewards) + 1), rewards, s=12, label=label, **faint)
    curves = [curve(run) for run in runs]
    for rollouts, values in curves if len(runs) > 1 else []:
        axes.plot(rollouts, values, color=line, linewidth=1, alpha=0.4)
    rollouts = curves[0][0]
    mean = [sum(values) / len(values) for values in zip(*(values for _, values in curves), strict=True)]
    label = "score on held-out questions" + (f", mean of {len(runs)} seeds" if len(runs) > 1 else "")
    axes.plot(rollouts, mean, color=line, linewidth=2.5, marker="o", markersize=5, label=label)
    for i in (0, -1):
        axes.annotate(
            f"{mean[i]:.0f}%", (rollouts[i], mean[i]), (0, 9), textcoords="offset points", ha="center", color=ink
        )
    legend = axes.legend(loc="upper left", frameon=False, labelcolor=ink, fontsize=8.5, reverse=True)
    for mark in legend.legend_handles:
        mark.set_alpha(1)
    axes.set_title("SmolLM2-135M-Instruct learns to add with GRPO", color=ink, fontsize=11, loc="left")
    axes.set_xlabel("rollout", color=ink)
    axes.set_ylabel("%", color=ink, rotation=0, labelpad=12)
    axes.set_xlim(-1, rollouts[-1] + 1)
    axes.set_ylim(0, 100)
    axes.grid(color=grid, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=ink, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, facecolor=paper, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file of the runs")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="directory of the pictures")
    parser.add_argument("--pages", action="store_true", help="also update the figures in README.md and the docs")
    given = parser.parse_args()
    runs = load_runs(given.results)
    draw(runs, given.images / "quickstart.png", dark=False)
    draw(runs, given.images / "quickstart-dark.png", dark=True)
    if given.pages:
        write_pages(runs)
    print(sentence(runs))


if __name__ == "__main__":
    main()

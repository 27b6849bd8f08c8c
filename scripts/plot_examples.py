"""Draws docs/images/examples.png and examples-dark.png: rewards of the examples, from benchmarks/results.

python scripts/plot_examples.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
PANELS = {
    "langgraph": ("SmolLM2 in a LangGraph agent", 8),
    "code": ("SmolLM2 writes Python", 8),
    "verifiers": ("SmolLM2 in verifiers", 8),
    "few_shot": ("Gemma 3 270M, few-shot", 6),
}
"""Example -> its title, and the rollouts between two evaluations."""


def load() -> dict[str, list[dict[str, Any]]]:
    """The runs of every example, each with `eval_reward`."""
    results = ROOT / "benchmarks" / "results"
    agents = json.loads((results / "agent_examples.json").read_text())["runs"]
    return {**agents, "few_shot": [json.loads((results / "few_shot.json").read_text())]}


def draw(runs: dict[str, list[dict[str, Any]]], path: Path, dark: bool) -> None:
    """Draws one panel per example: a line of `eval/reward` per seed, and a dot per training rollout."""
    ink, line = ("#e5e7eb", "#8c9eff") if dark else ("#111827", "#3f51b5")
    figure = Figure(figsize=(11, 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, (title, every)) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        for run in runs[name]:
            values = run["eval_reward"]
            axes.plot([every * i for i in range(len(values))], values, color=line, marker="o", markersize=4)
            rewards = run["train_reward"]
            axes.scatter(range(1, len(rewards) + 1), rewards, s=10, color=line, alpha=0.4, linewidths=0)
        axes.set(ylim=(0, 1), facecolor="none")
        seeds = len(runs[name])
        axes.set_title(f"{title}\n{seeds} seed{'s' * (seeds > 1)}", color=ink, fontsize=10)
        axes.set_xlabel("rollout", color=ink)
        axes.tick_params(colors=ink)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(ink)
    figure.axes[0].set_ylabel("reward", color=ink)
    figure.savefig(path, dpi=110, transparent=True, metadata={"Software": None})


def main() -> None:
    """Writes both pictures."""
    for dark in (False, True):
        draw(load(), ROOT / "docs" / "images" / f"examples{'-dark' * dark}.png", dark)


if __name__ == "__main__":
    main()

"""Draws docs/images/curves.png and curves-dark.png: learning curves at suitable and too high rates, from curves.json.

python scripts/plot_curves.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PANELS = {
    "eval/reward": "eval/reward",
    "reward/mean": "reward/mean (mean of 5 rollouts)",
    "policy/entropy": "policy/entropy",
}
COLORS = {False: ("tab:green", "tab:blue", "tab:red"), True: ("#4ade80", "#60a5fa", "#f87171")}
"""Colors of the runs, by dark."""
WINDOW = 5
"""Rollouts that the training reward is averaged over, because each has few prompts."""


def smooth(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values at each point."""
    parts = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def draw(runs: list[dict[str, Any]], path: Path, dark: bool) -> None:
    """Draws one panel per metric."""
    ink = "#e5e7eb" if dark else "#111827"
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for run, color in zip(runs, COLORS[dark], strict=True):
            steps, values = zip(*run["metrics"].get(name, [(None, None)]), strict=True)
            if steps[0] is None:
                continue
            smoothed = smooth(list(values), WINDOW if name == "reward/mean" else 1)
            axes.plot(steps, smoothed, color=color, label=run["label"], marker="o" if name == "eval/reward" else None)
        axes.set(ylim=(0, None), facecolor="none")
        axes.set_title(title, color=ink)
        axes.set_xlabel("rollout", color=ink)
        axes.tick_params(colors=ink)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(ink)
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right", labelcolor=ink)
    figure.savefig(path, dpi=110, transparent=True, metadata={"Software": None})


def main() -> None:
    """Writes both pictures."""
    runs = json.loads((IMAGES / "curves.json").read_text())["runs"]
    draw(runs, IMAGES / "curves.png", dark=False)
    draw(runs, IMAGES / "curves-dark.png", dark=True)


if __name__ == "__main__":
    main()

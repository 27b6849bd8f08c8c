"""Draws docs/images/curves.png: learning curves at a suitable and at a too high learning rate, from curves.json.

python scripts/plot_curves.py
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PANELS = {
    "eval/reward": "eval/reward",
    "reward/mean": "reward/mean (mean of 5 rollouts)",
    "policy/entropy": "policy/entropy",
}
COLORS = ("tab:green", "tab:blue", "tab:red")
WINDOW = 5
"""Rollouts that the training reward is averaged over, because each has few prompts."""


def smooth(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values at each point."""
    parts = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def main() -> None:
    """Writes the picture."""
    runs = json.loads((IMAGES / "curves.json").read_text())["runs"]
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for run, color in zip(runs, COLORS, strict=True):
            steps, values = zip(*run["metrics"].get(name, [(None, None)]), strict=True)
            if steps[0] is None:
                continue
            smoothed = smooth(list(values), WINDOW if name == "reward/mean" else 1)
            axes.plot(steps, smoothed, color=color, label=run["label"], marker="o" if name == "eval/reward" else None)
        axes.set(title=title, xlabel="rollout", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(IMAGES / "curves.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()

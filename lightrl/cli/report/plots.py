"""Draws the plots of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator

from lightrl.cli.report.read import Run, Series

SMOOTH_FROM, SMOOTH_PARTS = 60, 30
"""Minimum number of points for drawing a running mean over the raw line, and number of windows per line."""
COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#ca8a04", "#64748b")
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#e5e7eb",
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.dpi": 130,
    "figure.figsize": (6.0, 3.4),
    "font.size": 9,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 3.5,
    "text.parse_math": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


class Panel(NamedTuple):
    """A plot and its metrics."""

    name: str  # of the PNG file
    title: str  # above the axes
    unit: str  # label of the y axis
    lines: Sequence[tuple[str, str]]  # (metric, label) pairs, without those not logged; `*` ends a prefix
    scale: float = 1.0  # factor for the values
    band: str | None = None  # metric drawn as +- its value around the first line
    from_zero: bool = False  # the y axis includes 0


class Image(NamedTuple):
    """A drawn panel as PNG, and the values shown on hover."""

    name: str
    title: str
    png: bytes
    lines: dict[str, Series]  # label -> completed rollouts -> value, as plotted
    frame: tuple[float, ...]  # left, right, top, and bottom of the axes as fractions, then minimum and maximum x


PANELS = (
    Panel("evaluation", "Evaluation", "success rate or reward", (
        ("eval/pass@1", "pass@1"), ("eval/pass@*", ""), ("eval/maj@*", ""), ("eval/reward", "reward"),
    ), from_zero=True),
    Panel("reward", "Training reward", "reward", (("reward/mean", "mean"),), band="reward/std"),
    Panel("kl_reference", "KL to the reference", "nats per token", (("kl/ref", "KL to reference"),)),
    Panel("kl_coefficient", "KL coefficient", "coefficient", (("kl/coef", "coefficient"),), from_zero=True),
    Panel("entropy", "Policy entropy", "nats per token", (("policy/entropy", "entropy"),), from_zero=True),
    Panel("response_length", "Completion length", "tokens", (
        ("completions/length", "mean"), ("completions/length_max", "longest"),
    ), from_zero=True),
    Panel("truncated", "Truncated completions", "% of completions", (
        ("rollout/truncated_fraction", "training"), ("eval/truncated_fraction", "evaluation"),
    ), scale=100.0),
    Panel("supervised_loss", "Supervised loss", "nats per token", (
        ("loss/sft", "training"), ("eval/loss", "evaluation"),
    ), from_zero=True),
    Panel("times", "Time per rollout", "seconds", (
        ("time/generate", "generate"), ("time/score", "score (after generation)"), ("time/experience", "experience"),
        ("time/update", "update"), ("time/sync", "weight sync"),
    ), from_zero=True),
    Panel("throughput", "Throughput", "tokens / s", (("throughput/tokens_per_second", "tokens / s"),), from_zero=True),
    Panel("explained_variance", "Critic: explained variance", "fraction of variance", (
        ("value/explained_variance", "explained variance"),
    )),
    Panel("gradient_norm", "Gradient norm", "L2 norm before clipping", (("optim/grad_norm", "norm"),), from_zero=True),
    Panel("clip_fractions", "Clipped tokens", "% of tokens", (
        ("policy/clip_fraction_low", "ratio (lower bound)"), ("policy/clip_fraction_high", "ratio (upper bound)"),
        ("value/clip_fraction", "value"),
    ), scale=100.0),
    Panel("engine_gap", "Engine vs. trainer log-probs", "nats per token", (("kl/engine", "mean log-prob gap"),)),
)  # fmt: skip


def draw_panels(run: Run) -> list[Image]:
    """Draws the panels that the run has metrics for."""
    lines = ((panel, _lines(panel, run)) for panel in PANELS)
    return [_image(panel, found, run.metrics.get(panel.band or "", {})) for panel, found in lines if found]


def after_rollouts(run: Run, metric: str) -> Series:
    """A metric's finite values by number of completed rollouts."""
    return {step + 1: value for step, value in run.metrics.get(metric, {}).items() if not math.isnan(value)}


def running_mean(values: list[float], width: int) -> list[float]:
    """Mean of each value and the `width - 1` values before it."""
    windows = (values[max(i - width + 1, 0) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _lines(panel: Panel, run: Run) -> dict[str, Series]:
    """The panel's logged lines by label, without duplicates of earlier ones."""
    found: dict[str, Series] = {}
    for wanted, label in panel.lines:
        prefix = wanted.removesuffix("*")
        names = [name for name in run.metrics if (name == wanted if prefix == wanted else name.startswith(prefix))]
        for name in sorted(names, key=lambda x: (len(x), x)):
            series = after_rollouts(run, name)
            if series and series not in found.values():
                found[label or name.split("/")[-1]] = series
    return found


def _image(panel: Panel, lines: dict[str, Series], band: Series) -> Image:
    with matplotlib.rc_context(STYLE):
        figure = Figure()
        unit = "batches" if panel.name == "supervised_loss" else "rollouts"
        axes = figure.add_subplot(title=panel.title, xlabel=unit, ylabel=panel.unit)
        shown = {label: {x: y * panel.scale for x, y in series.items()} for label, series in lines.items()}
        for label, series in shown.items():
            x, y = list(series), list(series.values())
            width = max(len(x) // SMOOTH_PARTS, 3) if len(x) >= SMOOTH_FROM else 1
            marker = "o" if len(x) <= 25 else None
            (line,) = axes.plot(x, running_mean(y, width), marker=marker, label=label)
            if width > 1:
                axes.plot(x, y, color=line.get_color(), linewidth=0.8, alpha=0.35)
        if band:
            center = next(iter(shown.values()))
            x = [step for step in center if step - 1 in band]
            low, high = ([center[s] + sign * band[s - 1] for s in x] for sign in (-1, 1))
            axes.fill_between(x, low, high, alpha=0.15, linewidth=0, label="± 1 std over completions")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        if panel.from_zero:
            axes.set_ylim(bottom=min(0.0, axes.dataLim.y0))
        if len(lines) > 1 or band:
            axes.legend()
        buffer = BytesIO()
        figure.savefig(buffer, format="png")
    box = axes.get_position()
    frame = (box.x0, box.x1, 1 - box.y1, 1 - box.y0, *axes.get_xlim())
    return Image(panel.name, panel.title, buffer.getvalue(), shown, frame)

"""Draws the plots of the report in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightrl.cli.report.read import Run, Series

SIZE, DPI = (6.0, 3.4), 130
SMOOTH_FROM, SMOOTH_PARTS = 60, 30
"""Minimum number of points for drawing a running mean over the raw line, and number of windows per line."""
LONGEST = 60
"""Maximum length of a label in characters."""


class Theme(NamedTuple):
    """Colors of a page."""

    background: str
    text: str
    grid: str
    lines: tuple[str, ...]


LIGHT = Theme("#ffffff", "#1f2937", "#e5e7eb", ("#2563eb", "#ea580c", "#059669", "#9333ea", "#ca8a04", "#64748b"))
DARK = Theme("#161b22", "#d1d5db", "#30363d", ("#60a5fa", "#fb923c", "#34d399", "#c084fc", "#facc15", "#94a3b8"))


class Line(NamedTuple):
    """A metric, its label, and its values by number of rollouts."""

    metric: str
    label: str
    series: Series


@dataclass(frozen=True)
class Panel:
    """A plot and its metrics.

    Attributes:
        name: Name of the PNG file.
        title: Title above the axes.
        unit: Label of the y axis.
        lines: (metric, label) pairs. A metric ending in `*` is a prefix. Metrics that were not logged are skipped.
        kind: `line`, `percent` (fractions shown in percent), or `area` (stacked lines).
        band: Metric drawn as a band of +- its value around the first line.
        low: Lower limit of the y axis. Defaults to the data's minimum.
    """

    name: str
    title: str
    unit: str
    lines: Sequence[tuple[str, str]]
    kind: str = "line"
    band: str | None = None
    low: float | None = None

    @property
    def scale(self) -> float:
        """Factor for the plotted values."""
        return 100.0 if self.kind == "percent" else 1.0


@dataclass(frozen=True)
class Image:
    """A drawn panel: PNG bytes in light and dark mode, and the values shown on hover.

    Attributes:
        lines: Label -> completed rollouts -> value, as plotted.
        frame: Position of the axes in the image (left, right, top, bottom, as fractions), then minimum and maximum x.
    """

    name: str
    title: str
    light: bytes
    dark: bytes
    lines: dict[str, Series]
    frame: tuple[float, ...]


PANELS = (
    Panel("evaluation", "Evaluation", "success rate or reward", (
        ("eval/pass@1", "pass@1"), ("eval/pass@*", ""), ("eval/maj@*", ""), ("eval/reward", "reward"),
    ), low=0.0),
    Panel("reward", "Training reward", "reward", (("reward/mean", "mean"),), band="reward/std"),
    Panel("kl_reference", "KL to the reference", "nats per token", (("kl/ref", "KL to reference"),)),
    Panel("kl_coefficient", "KL coefficient", "coefficient", (("kl/coef", "coefficient"),), low=0.0),
    Panel("entropy", "Policy entropy", "nats per token", (("policy/entropy", "entropy"),), low=0.0),
    Panel("response_length", "Completion length", "tokens", (
        ("completions/length", "mean"), ("completions/length_max", "longest"),
    ), low=0.0),
    Panel("truncated", "Truncated completions", "% of completions", (
        ("rollout/truncated_fraction", "training"), ("eval/truncated_fraction", "evaluation"),
    ), kind="percent"),
    Panel("supervised_loss", "Supervised loss", "nats per token", (
        ("loss/sft", "training"), ("eval/loss", "evaluation"),
    ), low=0.0),
    Panel("times", "Time per rollout", "seconds", (
        ("time/generate", "generate"), ("time/score", "score (after generation)"), ("time/experience", "experience"),
        ("time/update", "update"), ("time/sync", "weight sync"), ("time/other", "other"),
    ), kind="area", low=0.0),
    Panel("throughput", "Throughput", "tokens / s", (("throughput/tokens_per_second", "tokens / s"),), low=0.0),
    Panel("explained_variance", "Critic: explained variance", "fraction of variance", (
        ("value/explained_variance", "explained variance"),
    )),
    Panel("gradient_norm", "Gradient norm", "L2 norm before clipping", (("optim/grad_norm", "norm"),), low=0.0),
    Panel("clip_fractions", "Clipped tokens", "% of tokens", (
        ("policy/clip_fraction_low", "ratio (lower bound)"), ("policy/clip_fraction_high", "ratio (upper bound)"),
        ("value/clip_fraction", "value"),
    ), kind="percent"),
    Panel("engine_gap", "Engine vs. trainer log-probs", "nats per token", (("kl/engine", "mean log-prob gap"),)),
)  # fmt: skip


def draw_panels(run: Run, before: Run | None) -> list[Image]:
    """Draws the panels that the run has metrics for. `before` is an evaluation before training, at 0 rollouts."""
    metrics = dict(run.metrics)
    if "time/step" in metrics:
        metrics["time/other"] = other_time(metrics)
    images = []
    for panel in PANELS:
        if lines := _lines(panel, metrics, before):
            target = run.kl_target if panel.name == "kl_reference" else None
            images.append(_image(panel, lines, metrics.get(panel.band or "", {}), target))
    return images


def draw_comparison(runs: Sequence[Run]) -> list[Image]:
    """Draws each panel's first metric that any of the runs has, with one line per run."""
    images = []
    for panel in PANELS:
        metric = next((name for name, _ in panel.lines if any(name in run.metrics for run in runs)), None)
        if metric is not None and panel.kind != "area":
            lines = [Line(run.name, run.name, after_rollouts(run, metric)) for run in runs if metric in run.metrics]
            if lines := [line for line in lines if _drawable(line.series)]:
                images.append(_image(replace(panel, title=f"{panel.title}: {metric}"), lines, {}, None))
    return images


def after_rollouts(run: Run, metric: str, before: Run | None = None) -> Series:
    """A metric by number of completed rollouts, with an evaluation of the run `before` at 0."""
    series = {step + 1: value for step, value in run.metrics.get(metric, {}).items()}
    if before is not None and metric.startswith("eval/") and metric in before.metrics:
        series = {0: list(before.metrics[metric].values())[-1], **series}
    return series


def other_time(metrics: dict[str, Series]) -> Series:
    """Seconds of a rollout that no other `time/*` metric includes."""
    named = [series for name, series in metrics.items() if name.startswith("time/") and name != "time/step"]
    whole = metrics["time/step"]
    return {step: max(total - sum(series.get(step, 0.0) for series in named), 0.0) for step, total in whole.items()}


def running_mean(values: list[float], width: int) -> list[float]:
    """Mean of each value and the `width - 1` values before it, ignoring NaN."""
    windows = ([v for v in values[max(i - width + 1, 0) : i + 1] if not math.isnan(v)] for i in range(len(values)))
    return [sum(window) / len(window) if window else math.nan for window in windows]


def smoothing(length: int) -> int:
    """Number of values in the running mean of a line; 1 for a short line."""
    return max(length // SMOOTH_PARTS, 3) if length >= SMOOTH_FROM else 1


def _drawable(series: Series) -> bool:
    return any(not math.isnan(value) for value in series.values())


def _lines(panel: Panel, metrics: dict[str, Series], before: Run | None) -> list[Line]:
    """The panel's logged lines, without duplicates of earlier ones."""
    found: list[Line] = []
    run = Run("", metrics)
    for wanted, label in panel.lines:
        prefix = wanted.removesuffix("*")
        names = [name for name in metrics if (name == wanted if prefix == wanted else name.startswith(prefix))]
        for name in sorted(names, key=lambda x: (len(x), x)):
            series = after_rollouts(run, name, before)
            if _drawable(series) and all(name != line.metric and series != line.series for line in found):
                found.append(Line(name, label or name.split("/")[-1], series))
    return found


def _image(panel: Panel, lines: list[Line], band: Series, target: float | None) -> Image:
    (light, frame), (dark, _) = (_draw(panel, lines, band, target, theme) for theme in (LIGHT, DARK))
    shown = {line.label: {x: y * panel.scale for x, y in line.series.items()} for line in lines}
    return Image(panel.name, panel.title, light, dark, shown, frame)


def _draw(
    panel: Panel, lines: list[Line], band: Series, target: float | None, theme: Theme
) -> tuple[bytes, tuple[float, ...]]:
    """Draws a panel as PNG. Also returns the position of its axes (`Image.frame`)."""
    figure = Figure(figsize=SIZE, dpi=DPI, facecolor=theme.background, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=theme.background)
    if panel.kind == "area":
        _draw_area(axes, lines, theme)
    else:
        for line, color in zip(lines, cycle(theme.lines)):
            x, y = list(line.series), [value * panel.scale for value in line.series.values()]
            width, label = smoothing(len(x)), plain(line.label)
            if width > 1:
                axes.plot(x, y, color=color, linewidth=0.8, alpha=0.35)
            marker = "o" if len(x) <= 25 else None
            axes.plot(x, running_mean(y, width), color=color, linewidth=1.7, marker=marker, markersize=3.5, label=label)
    if band:
        center = lines[0].series
        x = [step for step in center if step - 1 in band]
        low, high = ([center[s] + sign * band[s - 1] for s in x] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=theme.lines[0], alpha=0.15, linewidth=0, label="± 1 std over completions")
    if target is not None:
        axes.axhline(target, color=theme.lines[1], linestyle="--", linewidth=1.2, label="target")
    _finish(axes, panel, theme, max(smoothing(len(line.series)) for line in lines))
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    box = axes.get_position()
    return buffer.getvalue(), (box.x0, box.x1, 1 - box.y1, 1 - box.y0, *axes.get_xlim())


def plain(label: str) -> str:
    """Escapes a label so that matplotlib draws it literally: no formula, control character, or leading "_"."""
    text = "".join(x if x.isprintable() else "?" for x in label[:LONGEST]).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _draw_area(axes: Any, lines: list[Line], theme: Theme) -> None:
    x = sorted({step for line in lines for step in line.series})
    rows = [[0.0 if math.isnan(v := line.series.get(step, 0.0)) else v for step in x] for line in lines]
    axes.stackplot(x, rows, labels=[line.label for line in lines], colors=theme.lines, alpha=0.85, linewidth=0)
    totals = sorted(sum(column) for column in zip(*rows, strict=True))
    typical = totals[len(totals) * 9 // 10]
    axes.set_ylim(0, 1.35 * totals[-1] or 1.0)  # room for the legend
    if totals[-1] > 3 * typical > 0:  # the first rollout includes engine startup and would flatten the others
        axes.set_ylim(0, 1.8 * typical)
        axes.set_title(f"maximum: {totals[-1]:.3g} s", loc="right", fontsize=8, color=theme.text)


def _finish(axes: Any, panel: Panel, theme: Theme, width: int) -> None:
    """Sets title, labels, limits, grid, and legend."""
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=theme.text)
    unit = "batches" if panel.name == "supervised_loss" else "rollouts"
    note = f" (bold: mean of {width})" if width > 1 and panel.kind != "area" else ""
    axes.set_xlabel(unit + note, fontsize=9, color=theme.text)
    axes.set_ylabel(panel.unit, fontsize=9, color=theme.text)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    if panel.kind == "percent":
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.0))
    elif panel.low is not None and panel.kind != "area":
        low, high = min(panel.low, axes.dataLim.y0), axes.dataLim.y1
        axes.set_ylim(low, high + 0.08 * max(high - low, 1e-12))
    axes.tick_params(colors=theme.text, labelsize=8, length=0)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        columns = 3 if panel.kind == "area" else 1
        place = "upper center" if panel.kind == "area" else "best"
        axes.legend(fontsize=8, frameon=False, labelcolor=theme.text, ncols=columns, loc=place)

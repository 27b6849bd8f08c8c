"""Draws the panels of the report: one small figure each, all of one size, for light and for dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import cycle
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightrl.cli.report.read import Run, Series

SIZE, DPI = (6.0, 3.4), 130


@dataclass(frozen=True)
class Theme:
    """Colours of a page: of its background, text and grid, and of the lines in their order."""

    background: str
    text: str
    grid: str
    lines: tuple[str, ...]


THEMES = {
    "light": Theme("#ffffff", "#1f2937", "#e5e7eb", ("#2563eb", "#ea580c", "#059669", "#9333ea", "#ca8a04", "#64748b")),
    "dark": Theme("#161b22", "#d1d5db", "#30363d", ("#60a5fa", "#fb923c", "#34d399", "#c084fc", "#facc15", "#94a3b8")),
}
SMOOTH_FROM = 60
"""Number of points from which on a running mean is drawn over the raw line."""
SMOOTH_PARTS = 30
LONGEST = 60
"""Characters of a label that are shown."""


@dataclass(frozen=True)
class Panel:
    """One figure: which metrics, under which labels.

    Args:
        name: of the PNG file. title: above the axes. unit: label of the y axis.
        lines: (metric, label); a metric ending in `*` takes all that start so. Those not logged are left out.
        kind: `line`; `percent` (0 to 100 %); `area` stacks the lines.
        band: metric that is drawn as a band of +- its value around the first line.
        low: lower end of the y axis, free where None.
    """

    name: str
    title: str
    unit: str
    lines: Sequence[tuple[str, str]]
    kind: str = "line"
    band: str | None = None
    low: float | None = None


@dataclass(frozen=True)
class Image:
    """A drawn panel: name, title, PNG bytes for a light and a dark page, and what the page shows under the mouse.

    Attributes:
        lines: label -> rollouts done -> value, as drawn.
        frame: of the axes in the picture: left, right, top, bottom (fractions of it), lowest and highest x.
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
    Panel("response_length", "Response length", "tokens", (
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
    Panel("explained_variance", "Critic: explained variance", "fraction of the variance", (
        ("value/explained_variance", "explained variance"),
    )),
    Panel("gradient_norm", "Gradient norm", "L2 norm before clipping", (("optim/grad_norm", "norm"),), low=0.0),
    Panel("clip_fractions", "Clipped tokens", "% of tokens", (
        ("policy/clip_fraction_low", "ratio too low"), ("policy/clip_fraction_high", "ratio too high"),
        ("value/clip_fraction", "value"),
    ), kind="percent"),
    Panel("engine_gap", "Engine against trainer", "nats per token", (("kl/engine", "mean log-prob gap"),)),
)  # fmt: skip


def draw_panels(run: Run, before: Run | None) -> list[Image]:
    """Draws the panels that the run has numbers for.

    Args:
        run: the run. before: evaluation before training, drawn at 0 rollouts.
    """
    metrics = dict(run.metrics)
    if "time/step" in metrics:
        metrics["time/other"] = other_time(metrics)
    images = []
    for panel in PANELS:
        lines = panel_lines(panel, metrics, before)
        if lines:
            target = run.kl_target if panel.name == "kl_reference" else None
            images.append(_image(panel, lines, metrics, target))
    return images


def draw_comparison(runs: Sequence[Run]) -> list[Image]:
    """Draws each panel's first metric that any of several runs has, a line for each run.

    Args:
        runs: with names that differ.
    """
    images = []
    for panel in PANELS:
        wanted = next((name for name, _ in panel.lines if any(name in run.metrics for run in runs)), None)
        if wanted is None or panel.kind == "area":
            continue
        lines = [
            (run.name, run.name, {step + 1: value for step, value in run.metrics[wanted].items()})
            for run in runs
            if any(not math.isnan(value) for value in run.metrics.get(wanted, {}).values())
        ]
        if lines:
            images.append(_image(replace(panel, title=f"{panel.title}: {wanted}", band=None), lines, {}, None))
    return images


def _image(
    panel: Panel, lines: list[tuple[str, str, Series]], metrics: dict[str, Series], target: float | None
) -> Image:
    (light, frame), (dark, _) = (draw(panel, lines, metrics, target, theme) for theme in ("light", "dark"))
    scale = 100.0 if panel.kind == "percent" else 1.0
    shown = {label: {x: y * scale for x, y in series.items()} for _, label, series in lines}
    return Image(panel.name, panel.title, light, dark, shown, frame)


def other_time(metrics: dict[str, Series]) -> Series:
    """Seconds of a rollout that no `time/*` metric names."""
    named = [series for name, series in metrics.items() if name.startswith("time/") and name != "time/step"]
    whole = metrics["time/step"]
    return {step: max(total - sum(series.get(step, 0.0) for series in named), 0.0) for step, total in whole.items()}


def panel_lines(panel: Panel, metrics: dict[str, Series], before: Run | None) -> list[tuple[str, str, Series]]:
    """(metric, label, rollouts done -> value) of the lines that are there, without those that equal an earlier one."""
    found: list[tuple[str, str, Series]] = []
    for wanted, label in panel.lines:
        prefix = wanted.removesuffix("*")
        names = [name for name in metrics if (name == wanted if prefix == wanted else name.startswith(prefix))]
        for name in sorted(names, key=lambda x: (len(x), x)):
            series = {step + 1: value for step, value in metrics[name].items()}
            if before is not None and name.startswith("eval/") and name in before.metrics:
                series = {0: list(before.metrics[name].values())[-1], **series}
            drawable = any(not math.isnan(value) for value in series.values())
            if drawable and all(name != other and series != values for other, _, values in found):
                found.append((name, label or name.split("/")[-1], series))
    return found


def draw(
    panel: Panel, lines: list[tuple[str, str, Series]], metrics: dict[str, Series], target: float | None, theme: str
) -> tuple[bytes, tuple[float, ...]]:
    """One panel as PNG, and where in it the axes are (`Image.frame`)."""
    colors, palette = THEMES[theme], THEMES[theme].lines
    lines = [(name, _plain(label), series) for name, label, series in lines]
    figure = Figure(figsize=SIZE, dpi=DPI, facecolor=colors.background, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=colors.background)
    scale = 100.0 if panel.kind == "percent" else 1.0
    if panel.kind == "area":
        draw_area(axes, lines, colors)
    else:
        for (_, label, series), color in zip(lines, cycle(palette)):
            draw_line(axes, {x: y * scale for x, y in series.items()}, label, color)
    if panel.band is not None and panel.band in metrics:
        center, half = lines[0][2], metrics[panel.band]
        x = [step for step in center if step - 1 in half]
        low, high = ([center[s] + sign * half[s - 1] for s in x] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=palette[0], alpha=0.15, linewidth=0, label="± 1 std over completions")
    if target is not None and not math.isnan(target):
        axes.axhline(target, color=palette[1], linestyle="--", linewidth=1.2, label="target")
    finish(axes, panel, colors, max(smoothing(len(series)) for _, _, series in lines))
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    box = axes.get_position()
    return buffer.getvalue(), (box.x0, box.x1, 1 - box.y1, 1 - box.y0, *axes.get_xlim())


def _plain(label: str) -> str:
    """A label that matplotlib draws as it stands: no formula, no control characters, and none that hides it."""
    text = "".join(x if x.isprintable() else "?" for x in label[:LONGEST]).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def draw_line(axes: Any, series: Series, label: str, color: str) -> None:
    """A line; a long one faint, under its running mean; a short one with a dot at each point."""
    x, y = list(series), list(series.values())
    if smoothing(len(x)) == 1:
        axes.plot(x, y, color=color, linewidth=1.7, marker="o" if len(x) <= 25 else None, markersize=3.5, label=label)
        return
    width = smoothing(len(x))
    axes.plot(x, y, color=color, linewidth=0.8, alpha=0.35)
    axes.plot(x, running_mean(y, width), color=color, linewidth=1.8, label=label)


def smoothing(length: int) -> int:
    """Values in the running mean of a line, 1 for a short one."""
    return max(length // SMOOTH_PARTS, 3) if length >= SMOOTH_FROM else 1


def running_mean(values: list[float], width: int) -> list[float]:
    """Mean of each value and the `width - 1` before it; NaN ones do not count."""
    windows = ([v for v in values[max(i - width + 1, 0) : i + 1] if not math.isnan(v)] for i in range(len(values)))
    return [sum(window) / len(window) if window else math.nan for window in windows]


def draw_area(axes: Any, lines: list[tuple[str, str, Series]], colors: Theme) -> None:
    """Stacked areas over the steps that any line has."""
    x = sorted({step for _, _, series in lines for step in series})
    rows = [[0.0 if math.isnan(v := series.get(step, 0.0)) else v for step in x] for _, _, series in lines]
    axes.stackplot(x, rows, labels=[label for _, label, _ in lines], colors=colors.lines, alpha=0.85, linewidth=0)
    totals = sorted(sum(column) for column in zip(*rows, strict=True))
    typical = totals[len(totals) * 9 // 10]
    axes.set_ylim(0, 1.35 * totals[-1] or 1.0)  # room for the legend
    if totals[-1] > 3 * typical > 0:  # the first rollout starts the engine: do not let it flatten the others
        axes.set_ylim(0, 1.8 * typical)
        axes.set_title(f"highest: {totals[-1]:.3g} s", loc="right", fontsize=8, color=colors.text)


def finish(axes: Any, panel: Panel, colors: Theme, width: int) -> None:
    """Title, labels, limits, grid and legend."""
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=colors.text)
    unit = "batches" if panel.name == "supervised_loss" else "rollouts"
    note = f" (bold: mean of {width})" if width > 1 and panel.kind != "area" else ""
    axes.set_xlabel(unit + note, fontsize=9, color=colors.text)
    axes.set_ylabel(panel.unit, fontsize=9, color=colors.text)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    if panel.kind == "percent":
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.0))
    elif panel.low is not None and panel.kind != "area":
        low, high = min(panel.low, axes.dataLim.y0), axes.dataLim.y1
        axes.set_ylim(low, high + 0.08 * max(high - low, 1e-12))
    if panel.name == "evaluation" and axes.dataLim.y1 <= 1.0:
        axes.set_ylim(top=1.03)
    axes.tick_params(colors=colors.text, labelsize=8, length=0)
    axes.grid(color=colors.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colors.grid)
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = 3 if len(handles) > 4 else 1
        axes.legend(
            handles,
            labels,
            fontsize=8,
            frameon=False,
            labelcolor=colors.text,
            ncols=columns,
            loc="upper center" if panel.kind == "area" else "best",
        )

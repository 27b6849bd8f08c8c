"""Writes the report's page: one HTML file that needs nothing else, for wide screens and phones, light and dark."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lightrl.cli.report.assets import asset
from lightrl.cli.report.plots import Image, running_mean, smoothing
from lightrl.cli.report.read import Run, Series

# (metric, label, unit, which value is the best one, or None where neither direction is)
SUMMARY = (
    ("eval/pass@1", "Evaluation: pass@1", "", max),
    ("eval/reward", "Evaluation: reward", "", max),
    ("reward/mean", "Training reward", "", max),
    ("eval/loss", "Evaluation: loss", "nats/token", min),
    ("loss/sft", "Supervised loss", "nats/token", min),
    ("kl/ref", "KL to the reference", "nats/token", None),
    ("policy/entropy", "Entropy", "nats/token", None),
    ("completions/length", "Response length", "tokens", None),
    ("rollout/truncated_fraction", "Truncated fraction", "", min),
    ("throughput/tokens_per_second", "Throughput", "tokens/s", max),
    ("time/step", "Time per rollout", "s", min),
)
TILES = 4


def render_page(run: Run, before: Run | None, images: Sequence[Image]) -> str:
    """The whole page.

    Args:
        run: the run. before: evaluation before training. images: drawn panels.
    """
    rows = summary_rows(run, before)
    seconds = sum(value for value in run.metrics.get("time/step", {}).values() if not math.isnan(value))
    facts = [f"{run.num_rollouts:,} {'rollouts' if 'reward/mean' in run.metrics else 'batches'}"]
    facts += [f"{duration(seconds)} of training"] if seconds else []
    body = [
        f"<h1>{escape(run.name)}</h1><p class=soft>LightRL run report: {', '.join(facts)}.</p>",
        fallen(run),
        missing([run] if before is None else [run, before]),
        f"<div class=tiles>{''.join(tile(row) for row in rows[:TILES])}</div>",
        f"<h2>First, last and best</h2>{summary_table(rows)}" if rows else "",
        f"<h2>Over the run</h2><div class=grid>{''.join(plot(image) for image in images)}</div>" if images else "",
        samples_section(run, before),
    ]
    return document(f"{run.name} - LightRL report", body)


def document(title: str, body: Sequence[str]) -> str:
    """The whole file, with "?" for what is no text (halves of pairs of UTF-16)."""
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{asset('report.css')}</style></head>"
        f"<body><main>{''.join(body)}</main><script>{asset('report.js')}</script></body></html>\n"
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def render_comparison(
    runs: Sequence[Run],
    images: Sequence[Image],
    pages: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page of several runs: a table of them, and plots with a line for each.

    Args:
        runs: with names that differ. images: drawn panels.
        pages: name -> URL of the run's own page, for those that have one.
        notes: lines to say above the table.
    """
    pages = pages or {}
    summaries = {run.name: {row["label"]: row for row in summary_rows(run, None)} for run in runs}
    labels = [label for _, label, _, _ in SUMMARY if any(label in rows for rows in summaries.values())]
    head = "".join(f"<th>{escape(label)}</th>" for label in labels)
    lines = []
    for run in runs:
        cells = []
        for label in labels:
            row = summaries[run.name].get(label)
            best = "" if row is None or row["best"] is None else f" <small>best {number(row['best'][1])}</small>"
            cells.append(f"<td>{'-' if row is None else number(row['last'][1])}{best}</td>")
        name = escape(run.name)
        if run.name in pages:
            name = f'<a href="{escape(pages[run.name])}">{name}</a>'
        lines.append(f"<tr><td>{name}</td><td>{run.num_rollouts:,}</td>{''.join(cells)}</tr>")
    table = f"<table><tr><th>Run</th><th>Rollouts</th>{head}</tr>{''.join(lines)}</table>"
    body = [
        f"<h1>{len(runs)} runs</h1><p class=soft>LightRL run comparison: last values, best ones beside them.</p>",
        *(f"<p class=soft>{escape(note)}</p>" for note in notes),
        *(fallen(run) for run in runs),
        missing(runs),
        f"<div class='card wide'>{table}</div>",
        f"<h2>Over the runs</h2><div class=grid>{''.join(plot(image) for image in images)}</div>",
    ]
    return document("LightRL run comparison", body)


def fallen(run: Run) -> str:
    """A note on a run that had been better than it ended, with the checkpoint nearest to its best; "" elsewhere.

    It is one where evaluation (or else the running mean of the training reward) ended below its best by more than a
    tenth of what the run had gained until then.
    """
    rows = {row["label"]: row for row in summary_rows(run, None)}
    row = next((rows[label] for _, label, _, best in SUMMARY[:3] if best is max and label in rows), None)
    if row is None:
        return ""
    steps, values = list(row["series"]), list(row["series"].values())
    values = running_mean(values, smoothing(len(values)))
    top = values.index(max(values))
    lost, gained = values[top] - values[-1], values[top] - values[0]
    if len(values) < 3 or gained <= 0 or lost <= 0.1 * gained:
        return ""
    nearest = min(run.checkpoints, key=lambda c: (abs(c[0] - steps[top]), c), default=None)
    way = "no checkpoint of it was kept (RolloutCheckpoint.monitor keeps the best)"
    if nearest is not None:
        way = f"the nearest checkpoint is {nearest[1]}"
    return (
        f"<p class='card warn'><b>{escape(run.name)} peaked and fell.</b> {escape(row['label'])} was "
        f"{number(values[top])} after {steps[top]:,} rollouts and ended at {number(values[-1])}: {escape(way)}.</p>"
    )


def missing(runs: Sequence[Run]) -> str:
    """A note on what of the runs could not be read; "" where all could."""
    lines = "<br>".join(escape(line) for run in runs for line in run.left_out)
    return f"<p class='card warn'><b>Left out:</b> {lines}</p>" if lines else ""


def duration(seconds: float) -> str:
    """As `45 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def number(value: float) -> str:
    """Four significant digits, thousands separated, never in scientific notation for everyday sizes."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def summary_rows(run: Run, before: Run | None) -> list[dict[str, Any]]:
    """For each metric that is there: label, unit, and (rollouts done, value) of the first, last and best."""
    rows: list[dict[str, Any]] = []
    for name, label, unit, best in SUMMARY:
        values = run.metrics.get(name, {})
        series: Series = {step + 1: value for step, value in values.items() if not math.isnan(value)}
        if before is not None and name.startswith("eval/") and name in before.metrics:
            series = {0: list(before.metrics[name].values())[-1], **series}
        if not series or any(name == "eval/reward" and row["series"] == series for row in rows):
            continue
        points = list(series.items())
        top = None if best is None else best(points, key=lambda point: point[1])
        rows.append(
            {"label": label, "unit": unit, "series": series, "first": points[0], "last": points[-1], "best": top}
        )
    return rows


def tile(row: dict[str, Any]) -> str:
    """The last value, large, with the first one below."""
    unit = f" <small>{escape(row['unit'])}</small>" if row["unit"] else ""
    after = number(row["last"][1])
    return (
        f"<div class='card tile'><small>{escape(row['label'])}</small><b>{after}{unit}</b>"
        f"<small>first: {number(row['first'][1])}</small></div>"
    )


def summary_table(rows: list[dict[str, Any]]) -> str:
    """First, last and best of each metric, with the rollout it was at."""

    def cell(point: tuple[int, float] | None, *, at: bool = False) -> str:
        if point is None:
            return "<td>-</td>"
        return f"<td>{number(point[1])}{f' <small>(at {point[0]:,})</small>' if at else ''}</td>"

    lines = [
        f"<tr><td>{escape(row['label'])} <small>{escape(row['unit'])}</small></td>"
        f"{cell(row['first'])}{cell(row['last'])}{cell(row['best'], at=True)}</tr>"
        for row in rows
    ]
    head = "<tr><th>Metric</th><th>First</th><th>Last</th><th>Best</th></tr>"
    return f"<div class='card wide'><table>{head}{''.join(lines)}</table></div>"


def plot(image: Image) -> str:
    """A panel in both colour schemes; the browser shows the one that fits the page."""
    light, dark = (f"data:image/png;base64,{b64encode(data).decode()}" for data in (image.light, image.dark))
    lines = {
        label: [[x, float(f"{y:.4g}")] for x, y in s.items() if not math.isnan(y)] for label, s in image.lines.items()
    }
    data = json.dumps({"frame": image.frame, "lines": lines}).replace("<", "\\u003c")
    return (
        "<figure class='card plot'><div class=line></div><div class=tip></div>"
        f'<script type="application/json">{data}</script><picture>'
        f'<source media="(prefers-color-scheme:dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(image.title)}" width="780" height="442"></picture></figure>'
    )


def samples_section(run: Run, before: Run | None) -> str:
    """Completions of the same prompts before and after, or the first and last logged ones where prompts differ."""
    samples = [r for r in run.samples if r["phase"] == "eval"]
    earlier = [r for r in before.samples if r["phase"] == "eval"] if before is not None else []
    pairs = pair_by_prompt(at_step(earlier, -1) if earlier else at_step(samples, 0), at_step(samples, -1))
    if pairs and (earlier or samples[0]["step"] != samples[-1]["step"]):
        start = "before training" if earlier else done(samples[0])
        cards = [
            f"<div class='card sample'>{question(new)}<div class=pair>"
            f"{completion(old, start)}{completion(new, done(new), better_than=old)}</div></div>"
            for old, new in pairs
        ]
        return f"<h2>The same evaluation prompts, before and after</h2>{''.join(cards)}"
    logged = [r for r in run.samples if r["phase"] == "train"] or samples
    if not logged:
        return ""
    first, last = at_step(logged, 0), at_step(logged, -1)
    shown = [*first, *last] if first[0]["step"] != last[0]["step"] else first
    cards = [f"<div class='card sample'>{question(r)}{completion(r, done(r))}</div>" for r in shown]
    return f"<h2>Sampled completions, first and last logged</h2>{''.join(cards)}"


def question(record: dict[str, Any]) -> str:
    """The prompt, under a picture of what it shows."""
    media, picture = record.get("media", ""), record.get("thumbnail")
    image = ""
    if picture is not None:
        data = b64encode(picture.read_bytes()).decode()
        image = f'<img class=thumbnail src="data:image/png;base64,{data}" alt="{escape(media)}">'
    label = f"<div class=label><span>prompt</span><span>{escape(media)}</span></div>"
    return f"{label}{image}<pre>{escape(record['prompt'])}</pre>"


def at_step(records: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """The records of the first (0) or last (-1) step."""
    return [r for r in records if r["step"] == records[index]["step"]]


def pair_by_prompt(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Records of equal prompts and pictures, in the order of `new`; completions of a prompt pair up in their order."""

    def key(record: dict[str, Any]) -> tuple[str, str]:
        return record["prompt"], record["thumbnail"].name if "thumbnail" in record else ""

    left = list(old)
    pairs = []
    for record in new:
        match = next((r for r in left if key(r) == key(record)), None)
        if match is not None:
            left.remove(match)
            pairs.append((match, record))
    return pairs


def done(record: dict[str, Any]) -> str:
    """When a record was sampled."""
    count = record["step"] + 1
    if count == 0:
        return "before training"
    when = "after" if record["phase"] == "eval" else "in"
    return f"{when} rollout {count:,}"


def completion(record: dict[str, Any], when: str, better_than: dict[str, Any] | None = None) -> str:
    """One completion with its reward and length."""
    reward = record.get("reward")
    text = "no reward" if reward is None else f"reward {number(reward)}"
    old = None if better_than is None else better_than.get("reward")
    rose = reward is not None and old is not None and reward > old
    cut = ", cut" if record.get("truncated") else ""
    parts = record.get("reward_parts") or {}
    given = {name: number(value) for name, value in parts.items() if value is not None} if len(parts) > 1 else {}
    given |= record.get("extra") or {}
    more = "".join(f"<div class=label><span>{escape(n)}</span><span>{escape(v)}</span></div>" for n, v in given.items())
    return (
        f"<div><div class=label><span>{escape(when)}</span><span{' class=up' if rose else ''}>{text}"
        f"{' ↑' if rose else ''} · {record['num_tokens']} tokens{cut}</span></div>"
        f"<pre>{escape(record['completion']) or ' '}</pre>{more}</div>"
    )

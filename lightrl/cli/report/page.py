"""Writes the report as a self-contained HTML page, for desktop and mobile, in light and dark mode."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from lightrl.cli.report.assets import asset
from lightrl.cli.report.header import header
from lightrl.cli.report.plots import Image, after_rollouts
from lightrl.cli.report.read import Run, Series
from lightrl.ops.progress import clock, count

# (metric, label, unit, which value is best: max, min, or None)
SUMMARY = (
    ("eval/pass@1", "Evaluation: pass@1", "", max),
    ("eval/reward", "Evaluation: reward", "", max),
    ("reward/mean", "Training reward", "", max),
    ("eval/loss", "Evaluation: loss", "nats/token", min),
    ("loss/sft", "Supervised loss", "nats/token", min),
    ("kl/ref", "KL to the reference", "nats/token", None),
    ("policy/entropy", "Entropy", "nats/token", None),
    ("completions/length", "Completion length", "tokens", None),
    ("rollout/truncated_fraction", "Truncated fraction", "", min),
    ("throughput/tokens_per_second", "Throughput", "tokens/s", max),
    ("time/step", "Time per rollout", "s", min),
)
CHANGED = 12
"""Maximum number of evaluation prompts shown before and after training."""


class Row(NamedTuple):
    """A metric's first, last, and best point as (completed rollouts, value)."""

    label: str
    unit: str
    series: Series
    first: tuple[int, float]
    last: tuple[int, float]
    best: tuple[int, float] | None


def summary(run: Run) -> list[Row]:
    """A row for each logged metric of `SUMMARY`."""
    rows: list[Row] = []
    for name, label, unit, best in SUMMARY:
        series = after_rollouts(run, name)
        if not series or any(name == "eval/reward" and row.series == series for row in rows):
            continue
        points = list(series.items())
        top = None if best is None else best(points, key=lambda point: point[1])
        rows.append(Row(label, unit, series, points[0], points[-1], top))
    return rows


def render_page(run: Run, images: Sequence[Image]) -> str:
    """Renders the page of a run."""
    rows = summary(run)
    seconds = sum(after_rollouts(run, "time/step").values())
    facts = [count(run.num_rollouts, "rollout" if "reward/mean" in run.metrics else "batch")]
    facts += [f"{clock(seconds)} of training"] if seconds else []
    body = [
        f"<h1>{escape(run.name)}</h1><p class=soft>LightRL run report: {', '.join(facts)}.</p>",
        header(run),
        f"<h2>Summary</h2>{_summary_table(rows)}" if rows else "",
        f"<h2>Metrics</h2><div class=grid>{''.join(_plot(image) for image in images)}</div>" if images else "",
        _samples(run),
    ]
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(run.name)} - LightRL report</title><style>{asset('report.css')}</style></head>"
        f"<body><main>{''.join(body)}</main><script>{asset('report.js')}</script></body></html>\n"
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # unpaired surrogates become "?"


def number(value: float) -> str:
    """Formats a number with four significant digits and thousands separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _summary_table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        best = "-" if row.best is None else f"{number(row.best[1])} <small>(at {row.best[0]:,})</small>"
        name = f"{escape(row.label)} <small>{escape(row.unit)}</small>"
        cells = (name, number(row.first[1]), number(row.last[1]), best)
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>Metric</th><th>First</th><th>Last</th><th>Best</th></tr>"
    return f"<div class='card wide'><table>{head}{''.join(lines)}</table></div>"


def _plot(image: Image) -> str:
    lines = {label: [[x, float(f"{y:.4g}")] for x, y in series.items()] for label, series in image.lines.items()}
    data = json.dumps({"frame": image.frame, "lines": lines}).replace("<", "\\u003c")
    return (
        "<figure class='card plot'><div class=line></div><div class=tip></div>"
        f'<script type="application/json">{data}</script>'
        f'<img src="data:image/png;base64,{b64encode(image.png).decode()}" alt="{escape(image.title)}" width="780" '
        'height="442"></figure>'
    )


def _samples(run: Run) -> str:
    """Completions of the same prompts before and after training, or the first and last logged ones."""
    samples = [r for r in run.samples if r["phase"] == "eval"]
    pairs = _pairs(_at_step(samples, 0), _at_step(samples, -1))
    if pairs and samples[0]["step"] != samples[-1]["step"]:
        changed = [pair for pair in pairs if pair[0]["completion"] != pair[1]["completion"]]
        gains = [_gain(pair) for pair in changed]
        changed.sort(key=lambda pair: -abs(_gain(pair)))
        cards = [
            f"<div class='card sample'>{_question(new)}<div class=pair>"
            f"{_completion(old, _when(old))}{_completion(new, _when(new), old)}</div></div>"
            for old, new in (changed or pairs)[:CHANGED]
        ]
        rose, fell = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        told = (
            f"{len(changed)} of {len(pairs)} completions changed: {rose} have a higher reward, {fell} a lower reward."
        )
        return f"<h2>Evaluation completions before and after training</h2><p class=soft>{told}</p>{''.join(cards)}"
    logged = [r for r in run.samples if r["phase"] == "train"] or samples
    first, last = _at_step(logged, 0), _at_step(logged, -1)
    shown = [*first, *last] if first != last else first
    cards = [f"<div class='card sample'>{_question(r)}{_completion(r, _when(r))}</div>" for r in shown]
    return f"<h2>First and last logged completions</h2>{''.join(cards)}" if cards else ""


def _gain(pair: tuple[dict[str, Any], dict[str, Any]]) -> float:
    old, new = (record.get("reward") for record in pair)
    return 0.0 if old is None or new is None else new - old


def _question(record: dict[str, Any]) -> str:
    """The last user message, and the full prompt in a collapsible element."""
    label = f"<div class=label><span>prompt</span><span>{escape(record.get('media', ''))}</span></div>"
    asked, prompt = str(record.get("question") or record["prompt"]), record["prompt"]
    more = "" if asked == prompt else f"<details><summary>full prompt</summary><pre>{escape(prompt)}</pre></details>"
    return f"{label}<pre>{escape(asked)}</pre>{more}"


def _at_step(records: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """The records of the first (0) or last (-1) step."""
    return [r for r in records if r["step"] == records[index]["step"]]


def _pairs(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of records with equal prompts, in the order of `new`. Evaluations have the same order."""
    left, pairs = list(old), []
    for record in new:
        match = next((r for r in left if r["prompt"] == record["prompt"]), None)
        if match is not None:
            left.remove(match)
            pairs.append((match, record))
    return pairs


def _when(record: dict[str, Any]) -> str:
    """Describes when a record was sampled."""
    count = record["step"] + 1
    if count == 0:
        return "before training"
    return f"{'after' if record['phase'] == 'eval' else 'in'} rollout {count:,}"


def _completion(record: dict[str, Any], when: str, before: dict[str, Any] | None = None) -> str:
    """A completion with its reward and length, highlighted if its reward is higher than in `before`."""
    reward, old = record.get("reward"), None if before is None else before.get("reward")
    text = "no reward" if reward is None else f"reward {number(reward)}"
    rose = reward is not None and old is not None and reward > old
    cut = ", truncated" if record.get("truncated") else ""
    parts = record.get("reward_parts") or {}
    given = {name: number(value) for name, value in parts.items() if value is not None} if len(parts) > 1 else {}
    given |= {name: str(value) for name, value in (record.get("extra") or {}).items() if value is not None}
    more = "".join(f"<div class=label><span>{escape(n)}</span><span>{escape(v)}</span></div>" for n, v in given.items())
    return (
        f"<div><div class=label><span>{escape(when)}</span><span{' class=up' if rose else ''}>{text}"
        f"{' ↑' if rose else ''} · {record['num_tokens']} tokens{cut}</span></div>"
        f"<pre>{escape(record['completion']) or ' '}</pre>{more}</div>"
    )

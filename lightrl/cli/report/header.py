"""The first lines of a report: model, data, settings, hardware, command, and result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from lightrl.cli.report.read import Run
from lightrl.ops.progress import count, headline, result_line

LONGEST = 160
"""Maximum number of characters of a source of data."""
SETTINGS = (
    ("optimizer.lr", "learning rate {}"),
    ("group_size", "{} completions per prompt"),
    ("prompts_per_rollout", "{} prompts per rollout"),
    ("batch_size", "batches of {}"),
    ("sampling.max_new_tokens", "at most {} new tokens"),
    ("sampling.temperature", "temperature {}"),
    ("kl.coef", "KL coefficient {}"),
)
"""Arguments of the module or the data module, and how the report names them."""


def header(run: Run, before: Run | None) -> str:
    """The table of facts and the result line, as far as the run has left them."""
    facts = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in _facts(run.settings) if text)
    line = result(run, before)
    return (f"<p class=result>{escape(line)}</p>" if line else "") + (
        f"<div class='card wide'><table class=facts>{facts}</table></div>" if facts else ""
    )


def result(run: Run, before: Run | None) -> str:
    """The line that the run ended with, or that of what it has logged so far; `before` as in `lightrl report`."""
    if before is None and "result" in run.settings:
        return str(run.settings["result"])
    series = {name: {step: x for step, x in each.items() if x == x} for name, each in run.metrics.items()}
    series = {name: each for name, each in series.items() if each}
    binary = all(r.get("reward") in (0, 1, None) for r in run.samples if r["phase"] == "eval")
    binary &= any(r["phase"] == "eval" for r in run.samples)
    last = headline({name: list(each.values())[-1] for name, each in series.items()}, binary)
    start = series if before is None else before.metrics
    first = headline({name: next(iter(each.values())) for name, each in start.items()}, binary)
    steps = [next(iter(each)) for name, each in series.items() if name.startswith("eval/")]
    at = steps[0] + 1 if steps and before is None else 0
    done = count(run.num_rollouts, "rollout" if "reward/mean" in series else "batch")
    seconds = sum(series.get("time/step", {}).values())
    return result_line(first, last, at, done, seconds) if last else ""


def _facts(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, data = settings.get("model"), settings.get("data")
    path = next((str(found) for role in ("actor", "model") if (found := _at(model, f"{role}.path"))), "")
    evaluated = _at(data, "evaluation.prompts") or _at(data, "val")
    sources = [
        _source(_at(data, "prompts") or _at(data, "train")),
        _source(evaluated) and f"evaluation: {_source(evaluated)}",
    ]
    chosen = [_class(_at(data, "engine"))]
    for name, text in SETTINGS:
        value = next((x for part in (model, data) if (x := _at(part, name)) is not None), None)
        chosen += [] if value is None else [text.format(value)]
    if (seed := settings.get("seed_everything")) is not None:
        chosen.append(f"seed {seed}")
    versions = settings.get("versions") if isinstance(settings.get("versions"), Mapping) else {}
    return [
        ("Model", ", ".join(filter(None, [path, _class(model)]))),
        ("Data", "; ".join(filter(None, sources))),
        ("Settings", ", ".join(filter(None, chosen))),
        ("Hardware", str(settings.get("hardware") or "")),
        ("Versions", ", ".join(f"{name} {version}" for name, version in (versions or {}).items())),
        ("Command", str(settings.get("command") or "")),
    ]


def _at(value: Any, place: str) -> Any:
    """An entry by its dotted name, with or without `init_args` on the way; None if there is none."""
    for name in place.split("."):
        inner = value.get("init_args") or value if isinstance(value, Mapping) else {}
        value = inner.get(name) if isinstance(inner, Mapping) else None
    return value


def _class(value: Any) -> str:
    return str(value.get("class_path", "")).rpartition(".")[2] if isinstance(value, Mapping) else ""


def _source(value: Any) -> str:
    """Where rows come from, in a few words."""
    if not isinstance(value, Mapping):
        return str(value or "")[:LONGEST]
    rows = _at(value, "rows")
    if isinstance(rows, Mapping):
        arguments = ", ".join(f"{k}={v}" for k, v in (rows.get("init_args") or {}).items() if v is not None)
        return f"{_class(rows)}({arguments})"[:LONGEST]
    named = _at(value, "path") or _at(value, "name") or rows
    if named:
        return str(named)[:LONGEST]
    inner = (
        value.get("sources")
        or (value.get("init_args") or {}).get("source")
        or (value.get("init_args") or {}).get("sources")
    )
    several = inner if isinstance(inner, list) else [inner] if inner else list(value.values())
    return ", ".join(filter(None, (_source(each) for each in several if isinstance(each, Mapping | str))))[:LONGEST]

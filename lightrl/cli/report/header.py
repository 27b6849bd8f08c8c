"""Header of a report: model, data, settings, hardware, command, and result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from lightrl.cli.report.plots import after_rollouts
from lightrl.cli.report.read import Run
from lightrl.ops.progress import count, result_line

LONGEST = 160
"""Maximum length of a data source in characters."""
SETTINGS = (
    ("optimizer.lr", "learning rate {}"),
    ("group_size", "{} completions per prompt"),
    ("prompts_per_rollout", "{} prompts per rollout"),
    ("batch_size", "batch size {}"),
    ("sampling.max_new_tokens", "at most {} new tokens"),
    ("sampling.temperature", "temperature {}"),
    ("kl.coef", "KL coefficient {}"),
)
"""Arguments of the module or the data module, and their labels in the report."""


def header(run: Run) -> str:
    """The result line and the table of facts, if the run recorded them."""
    facts = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in _facts(run.settings) if text)
    line = result(run)
    return (f"<p class=result>{escape(line)}</p>" if line else "") + (
        f"<div class='card wide'><table class=facts>{facts}</table></div>" if facts else ""
    )


def result(run: Run) -> str:
    """The run's final result line, or one computed from the metrics so far."""
    if "result" in run.settings:
        return str(run.settings["result"])
    rewards = [record.get("reward") for record in run.samples if record["phase"] == "eval"]
    binary = bool(rewards) and all(reward in (0, 1, None) for reward in rewards)
    points = {name: list(each.items()) for name in run.metrics if (each := after_rollouts(run, name))}
    first, last = ({name: each[at] for name, each in points.items()} for at in (0, -1))
    seconds = sum(after_rollouts(run, "time/step").values())
    unit = "rollout" if "reward/mean" in run.metrics else "batch"
    return result_line(first, last, binary, count(run.num_rollouts, unit), seconds)


def _facts(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, data = settings.get("model"), settings.get("data")
    evaluated = _source(_at(data, "evaluation.prompts") or _at(data, "val"))
    sources = [_source(_at(data, "prompts") or _at(data, "train")), evaluated and f"evaluation: {evaluated}"]
    chosen = [_class(_at(data, "engine"))]
    for name, text in SETTINGS:
        value = next((x for part in (model, data) if (x := _at(part, name)) is not None), None)
        chosen += [] if value is None else [text.format(value)]
    return [
        (
            "Model",
            ", ".join(filter(None, [str(_at(model, "actor.path") or _at(model, "model.path") or ""), _class(model)])),
        ),
        ("Data", "; ".join(filter(None, sources))),
        ("Settings", ", ".join(filter(None, chosen))),
        ("Hardware", str(settings.get("hardware") or "")),
        ("Command", str(settings.get("command") or "")),
    ]


def _at(value: Any, place: str) -> Any:
    """An entry by its dotted name, with or without `init_args` in between; None if missing."""
    for name in place.split("."):
        inner = value.get("init_args") or value if isinstance(value, Mapping) else {}
        value = inner.get(name) if isinstance(inner, Mapping) else None
    return value


def _class(value: Any) -> str:
    return str(value.get("class_path", "")).rpartition(".")[2] if isinstance(value, Mapping) else ""


def _source(value: Any) -> str:
    """A short description of a data source."""
    found = next((each for name in ("path", "name", "rows") if (each := _at(value, name))), None)
    if isinstance(found, Mapping):
        arguments = ", ".join(f"{k}={v}" for k, v in (found.get("init_args") or {}).items() if v is not None)
        return _cut(f"{_class(found)}({arguments})")
    inner = found or _at(value, "sources") or _at(value, "source") or value or ""
    several = list(inner.values()) if isinstance(inner, Mapping) else inner if isinstance(inner, list) else []
    parts = [_source(each) for each in several if isinstance(each, Mapping | str)]
    return _cut(", ".join(filter(None, parts)) if several else str(inner))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 4].rstrip(", ") + " ..."

"""`lightrl view RUN_DIR`: trajectories saved by `RolloutWriter` as a self-contained HTML page."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from lightrl.checkpoints.files import atomic_write
from lightrl.cli.report.assets import asset
from lightrl.cli.report.read import is_file_inside, read_records

PER_TOKEN = ("advantages", "engine_logprobs", "old_logprobs", "new_logprobs", "ref_logprobs", "values", "entropy")
THUMBNAIL = 384


def view(run_dir: Path | str, out: Path | str | None = None, max_trajectories: int = 2000) -> Path:
    """Write a run's trajectories to an HTML page. Prints the path of the page as the last line.

    Args:
        run_dir: Directory of a run with the callback `RolloutWriter`, its `rollouts` directory, or one `rollout=...`.
        out: File to write. Defaults to `run_dir/trajectories.html`.
        max_trajectories: Maximum number of trajectories, from the newest rollouts. The newest one is always complete.

    Returns:
        Path of the page. It needs no server or network and executes nothing from a trajectory.

    Raises:
        ValueError: `run_dir` contains no readable trajectories.
    """
    folder = Path(run_dir)
    page = Path(out) if out is not None else folder / "trajectories.html"
    records, older = _newest(folder, max_trajectories)
    if not records:
        raise ValueError(
            f"run_dir={str(folder)!r}: no trajectories in rollouts/. Add the RolloutWriter callback to the run, or "
            "lower its every_n_rollouts."
        )
    with atomic_write(page, "w") as file:
        file.write(render(records, folder.resolve().name, older))
    print(page)
    return page


def _newest(folder: Path, most: int) -> tuple[list[dict[str, Any]], int]:
    """Records of the newest rollouts in chronological order, and the number of omitted rollouts."""
    found = sorted(folder.glob("**/rollout=*/rank*.jsonl")) or sorted(folder.glob("rank*.jsonl"))
    rollouts = [(place, list(files)) for place, files in groupby(found, key=lambda path: path.parent)]
    rollouts.sort(key=lambda pair: pair[0].name, reverse=True)
    kept: list[dict[str, Any]] = []
    for number, (place, files) in enumerate(rollouts):
        new = [{**record, "folder": place} for path in files for record in read_records(path, folder)]
        if kept and len(kept) + len(new) > most:
            return kept, len(rollouts) - number
        kept = new + kept
    return kept, 0


def render(records: list[dict[str, Any]], name: str, older: int) -> str:
    """Renders records of `RolloutWriter`, each with its `folder`; `older` rollouts of the run are omitted.

    The page contains texts as JSON without "<" and inserts them as text nodes, so they are never executed.
    """
    pieces: dict[str, int] = {}
    pictures: dict[Path, int] = {}
    shown = [_shown(record, pieces, pictures) for record in records]
    has = {key for _, detail in shown for row in detail["rows"] for key in row["values"]}
    for (summary, _), title in zip(shown, _titles([summary["question"] for summary, _ in shown]), strict=True):
        summary["title"] = title
    head = {"name": name, "leftOut": older, "has": sorted(has), "pictures": [_data_url(path) for path in pictures]}
    start = f'{_json(head)[:-1]},"list":[{",".join(_json(summary) for summary, _ in shown)}]}}'
    details = "".join(
        f'<script type="application/json" id="t{i}">{_json(detail)}</script>' for i, (_, detail) in enumerate(shown)
    )
    title = escape(name.encode("utf-8", "replace").decode("utf-8"))
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{title} - trajectories</title><style>{asset('viewer.css')}</style></head><body>"
        f'<script type="application/json" id="head">{start}</script>'
        f'<script type="application/json" id="pieces">{_json(list(pieces))}</script>'
        f"{details}<script>{asset('viewer.js')}</script></body></html>\n"
    )


def _json(value: Any) -> str:
    """ASCII JSON that can't close its HTML element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _shown(
    record: dict[str, Any], pieces: dict[str, int], pictures: dict[Path, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(data for the list and the filters, data for a selected trajectory) of a record."""
    rows = []
    for row in record["rows"]:
        turns = row["turns"]
        texts = row.get("tokens") or [f"[{token}]" for token in row["token_ids"]]
        sampled = [i for i, turn in enumerate(turns) if turn >= 0]
        rows.append(
            {
                "tokens": [pieces.setdefault(text, len(pieces)) for text in texts],
                "special": row.get("special", []),
                "turns": [[turn, len(list(run))] for turn, run in groupby(turns)],
                "values": {name: [row[name][i] for i in sampled] for name in PER_TOKEN if name in row},
                "versions": sorted({row["policy_versions"][i] for i in sampled} if "policy_versions" in row else ()),
            }
        )
    said = [
        message["content"] if isinstance(message.get("content"), str) else json.dumps(message, default=str)
        for message in record.get("messages") or []
    ]
    turns = record.get("turns", [])
    advantages = [turn["advantage"] for turn in turns if turn.get("advantage") is not None]
    media = record.get("media") or {}
    images = [record["folder"] / name for name in media.get("images", [])]
    summary = {
        "rollout": record.get("rollout"),
        "group": (f"rank {record['rank']}, " if record.get("rank") else "") + f"group {record.get('group')}",
        "trajectory": record.get("trajectory"),
        "reward": record.get("reward"),
        "advantage": max(advantages, key=abs, default=None),
        "stop": record.get("stop_reason") or ("length" if record.get("truncated") else "stop"),
        "turns": len(turns),
        "tokens": sum(turn["tokens"] for turn in turns),
        "trained": record.get("trained", True),
        "text": "\n".join([record.get("prompt", ""), record.get("completion", ""), *said]),
        "question": str(record.get("question") or record.get("prompt", "")).strip(),
    }
    detail = {
        "rows": rows,
        "turns": turns,
        "parts": record.get("reward_parts", {}),
        "columns": record.get("columns", {}),
        "pictures": [
            pictures.setdefault(path, len(pictures)) for path in images if is_file_inside(path, record["folder"])
        ],
        "media": [name for kind, names in media.items() if kind != "images" for name in names],
        # Shown in addition to token IDs if the tokens' texts are unknown.
        "messages": [] if all("tokens" in row for row in record["rows"]) else record.get("messages") or [],
    }
    return summary, detail


def _titles(questions: list[str]) -> list[str]:
    """Beginnings of the questions, without lines or long passages that all of them start with."""
    first, last = min(questions), max(questions)
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    cut = first.rfind("\n", 0, shared) + 1
    if shared - cut > 60:
        cut = first.rfind(" ", 0, shared) + 1
    return [("\u2026 " if cut else "") + " ".join(question[cut : cut + 400].split())[:160] for question in questions]


def _data_url(path: Path) -> str:
    """A thumbnail of an image as a data URL."""
    from PIL import Image

    from lightrl.rewards.encoding import IMAGE_FORMATS

    buffer = io.BytesIO()
    with Image.open(path, formats=IMAGE_FORMATS) as picture:
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        picture.save(buffer, format="PNG")
    return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"

"""`lightrl view RUN`: the trajectories that `RolloutWriter` wrote, as one HTML page that needs nothing else."""

from __future__ import annotations

import io
import json
import sys
from base64 import b64encode
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from lightrl import __version__
from lightrl.checkpoints.files import atomic_write
from lightrl.cli.report.assets import asset
from lightrl.cli.report.atif import BROKEN, write_atif
from lightrl.cli.report.read import is_file_inside, require_inside, tell
from lightrl.compat.arguments import at_least
from lightrl.rewards.media import open_image

OF_TOKENS = ("advantages", "engine_logprobs", "old_logprobs", "new_logprobs", "ref_logprobs", "values", "entropy")
THUMBNAIL = 384


def view(
    run_dir: Path | str,
    out: Path | str | None = None,
    max_trajectories: int = 2000,
    atif: Path | str | None = None,
) -> Path:
    """Writes a run's trajectories as one HTML page and prints its path as the last line.

    Args:
        run_dir: folder of a run with the callback `RolloutWriter`; its `rollouts` folder, or one `rollout=...`, too.
        out: file to write; `run_dir/trajectories.html` where None.
        max_trajectories: most trajectories on the page, at least 1: those of the newest rollouts, whole groups.
        atif: folder to write the same trajectories to, each as a file in the Agent Trajectory Interchange Format 1.7;
            None writes none.

    Returns:
        the path of the page: it opens without a server or a network, and runs nothing that a trajectory says. Lines
        that are no trajectories are left out, which the page and stderr say.

    Raises:
        ValueError: no trajectories were saved in `run_dir`, or all that were are damaged.
    """
    at_least("max_trajectories", max_trajectories, 1)
    folder = Path(run_dir)
    page = Path(out) if out is not None else folder / "trajectories.html"
    left_out: list[str] = []
    records, older = _newest(folder, max_trajectories, left_out)
    text = render(records, folder.resolve().name, older, left_out)
    for line in left_out:
        print(f"Left out: {line}", file=sys.stderr)
    with atomic_write(page, "w") as file:
        file.write(text)
    if atif is not None:
        left_out.clear()
        files = write_atif(records, Path(atif), folder.resolve().name, __version__, left_out)
        for line in left_out:
            print(f"Left out: {line}", file=sys.stderr)
        print(f"{len(files)} trajectories in {atif}")
    print(page)
    return page


def _newest(folder: Path, most: int, left_out: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Records of the newest rollouts, the oldest of them first, and the number of rollouts that are older."""
    found = sorted(folder.glob("**/rollout=*/rank*.jsonl")) or sorted(folder.glob("rank*.jsonl"))
    if not folder.is_dir():
        raise ValueError(f"run_dir={str(folder)!r}: there is no such folder.")
    require_inside(found, folder, "run_dir")
    if not found:
        raise ValueError(
            f"run_dir={str(folder)!r}: no saved trajectories (rollouts/rollout=*/rank*.jsonl) in it. Train with the "
            "callback RolloutWriter."
        )
    rollouts = [(name, list(files)) for name, files in groupby(found, key=lambda path: path.parent)]
    rollouts.sort(key=lambda pair: pair[0].name)
    kept: list[dict[str, Any]] = []
    count = 0
    for _, files in reversed(rollouts):
        if count and len(kept) >= most:
            break
        kept = [record for path in files for record in _read(path, left_out)] + kept
        count += 1
    if len(kept) > most:
        begin = len(kept) - most
        key = _group_key(kept[begin - 1])
        while begin < len(kept) and _group_key(kept[begin]) == key:
            begin += 1
        kept = kept[begin:] or kept[-most:]
    return kept, len(rollouts) - count


def _group_key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record.get("rollout"), record.get("rank"), record.get("group")


def _read(path: Path, left_out: list[str]) -> Iterator[dict[str, Any]]:
    odd = []
    # Not `splitlines`: a text may hold other ends of lines.
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=lambda name: None)  # NaN, which browsers do not read
        except ValueError as error:
            odd.append(f"line {number}: not JSON: {error}")
            continue
        if not isinstance(record, dict) or "rows" not in record:
            odd.append(f"line {number}: not a trajectory of RolloutWriter: {line[:80]}")
            continue
        record["folder"], record["place"] = path.parent, f"{path}, line {number}"
        yield record
    tell(left_out, path, "lines", odd)


def render(records: list[dict[str, Any]], name: str, older: int, left_out: list[str]) -> str:
    """The page of some records of `RolloutWriter`, each with its `folder` and `place`.

    Texts stand in the page as JSON without a "<" and become text nodes, so that nothing in them is ever run.

    Args:
        records: those that cannot be shown are taken out, and said in `left_out`.
        name: of the run. older: number of rollouts that are not on the page. left_out: what is not, beside these.
    """
    pieces: dict[str, int] = {}
    pictures: dict[Path, int] = {}
    shown, good, has = [], [], set()
    odd: list[str] = []
    for record in records:
        try:
            summary, detail = _shown(record, pieces, pictures)
            shown.append((_json(summary), _json(detail)))
        except BROKEN as error:
            odd.append(f"{record['place']}: not a trajectory of RolloutWriter: {type(error).__name__}: {error}")
            continue
        good.append(record)
        has |= {name for row in detail["rows"] for name in row["values"]}
    records[:] = good
    if odd:
        left_out.append(f"{'one trajectory' if len(odd) == 1 else f'{len(odd)} trajectories'}; the first: {odd[0]}")
    if not shown:
        raise ValueError(f"No trajectory of run {name!r} can be shown. {' '.join(left_out)}")
    head = {
        "name": name,
        "leftOut": older,
        "has": sorted(has),
        "pictures": [_data_url(path, left_out) for path in pictures],
        "missing": left_out,
    }
    start = f'{_json(head)[:-1]},"list":[{",".join(summary for summary, _ in shown)}]}}'
    details = "".join(
        f'<script type="application/json" id="t{i}">{detail}</script>' for i, (_, detail) in enumerate(shown)
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
    """ASCII JSON that cannot end the element it stands in; a ValueError for infinity, which browsers do not read."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _shown(
    record: dict[str, Any], pieces: dict[str, int], pictures: dict[Path, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the list and the filters need of a record, and what only a trajectory that is looked at needs."""
    rows = []
    for row in record["rows"]:
        turns = row["turns"]
        texts = row.get("tokens") or [f"[{token}]" for token in row["token_ids"]]
        sampled = [i for i, turn in enumerate(turns) if turn >= 0]
        rows.append(
            {
                "tokens": [pieces.setdefault(text, len(pieces)) for text in texts],
                "turns": [[turn, len(list(run))] for turn, run in groupby(turns)],
                "values": {name: [row[name][i] for i in sampled] for name in OF_TOKENS if name in row},
                "versions": sorted({row["policy_versions"][i] for i in sampled} if "policy_versions" in row else ()),
            }
        )
    texts = [record.get("prompt", ""), record.get("completion", ""), *map(_said, record.get("messages") or [])]
    advantages = [turn["advantage"] for turn in record.get("turns", []) if turn.get("advantage") is not None]
    summary = {
        "rollout": record.get("rollout"),
        "group": (f"rank {record['rank']}, " if record.get("rank") else "") + f"group {record.get('group')}",
        "trajectory": record.get("trajectory"),
        "reward": record.get("reward"),
        "advantage": max(advantages, key=abs, default=None),
        "stop": record.get("stop_reason") or ("length" if record.get("truncated") else "stop"),
        "turns": len(record.get("turns", [])),
        "tokens": sum(turn["tokens"] for turn in record.get("turns", [])),
        "trained": record.get("trained", True),
        "text": "\n".join(texts),
        "title": str(record.get("prompt", ""))[-120:],
    }
    media = record.get("media") or {}
    images = [record["folder"] / name for name in media.get("images", [])]
    found = [path for path in images if is_file_inside(path, record["folder"])]
    detail = {
        "rows": rows,
        "turns": record.get("turns", []),
        "parts": record.get("reward_parts", {}),
        "columns": record.get("columns", {}),
        "pictures": [pictures.setdefault(path, len(pictures)) for path in found],
        "media": [name for kind, names in media.items() if kind != "images" for name in names],
        # Where the tokens' texts are not known, the conversation is shown beside the ids.
        "messages": [] if all("tokens" in row for row in record["rows"]) else record.get("messages") or [],
    }
    return summary, detail


def _said(message: Any) -> str:
    return message["content"] if isinstance(message.get("content"), str) else json.dumps(message, default=str)


def _data_url(path: Path, left_out: list[str]) -> str:
    """A small copy of a picture; "" where it cannot be read, which `left_out` then says."""
    buffer = io.BytesIO()
    try:
        with open_image(path) as picture:
            picture.thumbnail((THUMBNAIL, THUMBNAIL))
            picture.save(buffer, format="PNG")
    except Exception as error:  # of broken files PIL raises nearly anything
        left_out.append(f"{path} cannot be read as a picture: {error}.")
        return ""
    return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"

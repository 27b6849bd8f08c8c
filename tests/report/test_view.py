"""The page of `lightrl view`, read as a file."""

from __future__ import annotations

import base64
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightrl.cli.report.view import view

HOSTILE = "</script><script>window.owned=1</script><img src=x onerror='window.owned=1'>\u2028😀 &amp; ${1}"
WORDS = ["What ", "is ", "7 * ", "8?", " <tool>", "multiply", "(7, 8)", "</tool>", "\n", "56", "It ", "is ", "56", "."]


def record(
    group: int, trajectory: int, rng: random.Random, *, text: str = "", length: int = 14, turns: int = 2
) -> dict[str, Any]:
    """A trajectory of some turns of four sampled tokens, context before each."""
    tokens, turn_ids = [], []
    for turn in range(turns):
        tokens += [rng.choice(WORDS) for _ in range(length - 4)] + [rng.choice(WORDS) for _ in range(4)]
        turn_ids += [-1] * (length - 4) + [turn] * 4
    if text:
        tokens[0] = text
        tokens[-1] = text
    sampled = [turn >= 0 for turn in turn_ids]

    def numbers(low: float, high: float) -> list[float]:
        return [round(rng.uniform(low, high), 5) if on else 0.0 for on in sampled]

    failed = trajectory % 8 == 7
    advantage = 0.0 if failed else rng.choice([-1.0, 0.0, 1.0])
    return {
        "rollout": 10, "rank": 0, "group": group, "trajectory": trajectory, "policy_version": 9,
        "prompt": text or f"What is {group} * 8?", "completion": text or "It is 56.",
        "messages": [{"role": "user", "content": text or "needle in the conversation" if trajectory == 5 else "hi"}],
        "columns": {"answer": text or 56}, "stop_reason": "failure" if failed else "stop", "truncated": False,
        "reward": None if failed else advantage / 2, "reward_parts": {"exact": 0.5}, "trained": not failed,
        "turns": [
            {"turn": t, "rewards": {"environment": 0.25 * t}, "advantage": advantage, "tokens": 4} for t in range(turns)
        ],
        "rows": [
            {
                "token_ids": list(range(len(tokens))), "tokens": tokens, "turns": turn_ids,
                "policy_versions": [9 if on else -1 for on in sampled],
                "advantages": [advantage * on for on in sampled],
                "engine_logprobs": numbers(-3, 0), "old_logprobs": numbers(-3, 0), "new_logprobs": numbers(-3, 0),
                "entropy": numbers(0, 3),
            }
        ],
    }  # fmt: skip


def write(folder: Path, records: list[dict[str, Any]], rollout: int = 10) -> Path:
    place = folder / "rollouts" / f"rollout={rollout:06d}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "rank0.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return folder


def run_of(folder: Path, count: int, **kwargs: Any) -> Path:
    rng = random.Random(0)
    return write(folder, [record(i // 4, i, rng, **kwargs) for i in range(count)])


def test_hostile_text_is_inert(tmp_path: Path) -> None:
    run = write(tmp_path / "<b>run", [record(0, i, random.Random(i), text=HOSTILE) for i in range(2)])
    text = view(run).read_text()
    assert not [part for part in ("<script>window", "<img src=x", "<b>run", "\u2028") if part in text]
    assert text.count("window.owned") > 2, "it is there as text"


def test_pictures_of_the_run_alone_are_in_the_page(tmp_path: Path) -> None:
    one = {**record(0, 0, random.Random(0)), "media": {"images": ["media/a.png", "../../../secret.png"]}}
    run = write(tmp_path / "run", [one])
    folder = run / "rollouts" / "rollout=000010"
    (folder / "media").mkdir()
    Image.new("RGB", (800, 400), (255, 0, 0)).save(folder / "media" / "a.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    found = re.findall(r"data:image/\w+;base64,([\w+/=]+)", view(run).read_text())
    assert [Image.open(io.BytesIO(base64.b64decode(data))).size for data in found] == [(384, 192)]


def test_nothing_is_fetched(tmp_path: Path) -> None:
    text = view(run_of(tmp_path, 4)).read_text()
    assert "http:" not in text and "https:" not in text and "default-src 'none'" in text


def test_the_newest_rollouts_are_kept(tmp_path: Path) -> None:
    for rollout in (2, 4, 6):
        rows = [{**record(i // 4, i, random.Random(i)), "rollout": rollout} for i in range(8)]
        write(tmp_path, rows, rollout)
    text = view(tmp_path, max_trajectories=14).read_text()
    head = json.loads(text.split('id="head">')[1].split("</script>")[0])
    assert [(t["rollout"], t["trajectory"]) for t in head["list"]] == [(6, i) for i in range(8)]
    assert head["leftOut"] == 2


def test_a_picture_that_is_a_program_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL has Ghostscript run PostScript, whatever the file is called."""
    ran: list[Any] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args: ran.append(args))
    run = write(tmp_path, [{**record(0, 0, random.Random(0)), "media": {"images": ["a.png"]}}])
    start = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(a) print\n%%EOF\n"
    (run / "rollouts" / "rollout=000010" / "a.png").write_bytes(start)
    with pytest.raises(ValueError, match="PostScript"):
        view(run)
    assert ran == []

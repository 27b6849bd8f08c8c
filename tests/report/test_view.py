"""The page of `lightrl view`, read as a file."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, UnidentifiedImageError

from lightrl.cli.report.view import view
from tests.report.browser import Browser, open_browser, why_not

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
    """PIL would run PostScript with Ghostscript, regardless of the file name."""
    ran: list[Any] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args: ran.append(args))
    run = write(tmp_path, [{**record(0, 0, random.Random(0)), "media": {"images": ["a.png"]}}])
    start = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(a) print\n%%EOF\n"
    (run / "rollouts" / "rollout=000010" / "a.png").write_bytes(start)
    with pytest.raises(UnidentifiedImageError):
        view(run)
    assert ran == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with open_browser() as opened:
        yield opened


def shown(browser: Browser) -> list[int]:
    """Numbers of the trajectories in the list."""
    return browser.run("return [...document.querySelectorAll('nav button')].map(b => Number(b.dataset.i))")  # type: ignore[no-any-return]


def pick(browser: Browser, name: str, value: str) -> None:
    script = "const n = document.getElementById(arguments[0]); n.value = arguments[1];"
    script += "n.dispatchEvent(new Event('change')); n.dispatchEvent(new Event('input'));"
    browser.run(script, name, value)
    time.sleep(0.3)


def test_search_filters_and_order_choose_trajectories(browser: Browser, tmp_path: Path) -> None:
    run = run_of(tmp_path, 24)
    browser.open(view(run))
    records = [json.loads(line) for line in next(run.glob("rollouts/*/rank0.jsonl")).open()]
    assert shown(browser) == list(range(24))
    pick(browser, "search", "NEEDLE in the")
    assert shown(browser) == [5]
    assert browser.run("return document.getElementById('count').textContent") == "1 of 24 trajectories"
    pick(browser, "search", "nowhere to be found")
    assert shown(browser) == [] and "No matching" in browser.run("return document.querySelector('main').textContent")
    pick(browser, "search", "")
    pick(browser, "stop", "failure")
    assert shown(browser) == [7, 15, 23]
    pick(browser, "stop", "")
    pick(browser, "learnt", "up")
    assert shown(browser) == [i for i, r in enumerate(records) if r["trained"] and r["turns"][0]["advantage"] > 0]
    pick(browser, "learnt", "untrained")
    assert shown(browser) == [7, 15, 23]
    pick(browser, "learnt", "")
    pick(browser, "order", "high")
    rewards = [records[i]["reward"] for i in shown(browser)]
    assert rewards[-3:] == [None] * 3 and rewards[:-3] == sorted(rewards[:-3], reverse=True)
    assert browser.console() == []


def test_overlays_colour_the_sampled_tokens(browser: Browser, tmp_path: Path) -> None:
    browser.open(view(run_of(tmp_path, 4)))
    colours = "return [...document.querySelectorAll('pre.sampled span')].map(s => s.style.background)"
    found = {}
    for name in ("mask", "advantage", "ratio", "gap", "entropy", "surprise", "none"):
        pick(browser, "overlay", name)
        found[name] = browser.run(colours)
    assert len(found["mask"]) == 4 * 2 * 4 and len(set(found["mask"])) == 1 and set(found["none"]) == {""}
    records = [json.loads(line) for line in next(tmp_path.glob("rollouts/*/rank0.jsonl")).open()]
    rows = [r["rows"][0] for r in records]
    sampled = [(row, i) for row in rows for i, turn in enumerate(row["turns"]) if turn >= 0]
    most = max(row["entropy"][i] for row, i in sampled)
    for (row, i), ratio, gap, entropy in zip(sampled, found["ratio"], found["gap"], found["entropy"], strict=True):
        new, old, engine = (row[f"{name}_logprobs"][i] for name in ("new", "old", "engine"))
        assert ("--pos" in ratio) == (new > old) and ("--pos" in gap) == (engine > old)
        assert abs(float(entropy.split(",")[-1].strip(" )")) - 0.75 * row["entropy"][i] / most) < 1e-3
    legend = browser.run("return ['ratio', 'gap'].map(name => { const n = document.getElementById('overlay');"
        "n.value = name; n.dispatchEvent(new Event('change'));"
        "return [...document.querySelectorAll('#legend span')].map(s => Number(s.textContent)) })")  # fmt: skip
    furthest = max(abs(row["new_logprobs"][i] - row["old_logprobs"][i]) for row, i in sampled)
    assert legend[0] == pytest.approx([math.exp(-furthest), 0, math.exp(furthest)], abs=2e-3), "a ratio, not its log"
    assert legend[1][0] == -legend[1][2]
    advantages = [a for row in rows for a, t in zip(row["advantages"], row["turns"], strict=True) if t >= 0]
    for advantage, colour in zip(advantages, found["advantage"], strict=True):
        assert ("--pos" in colour and colour.endswith("0.750)")) == (advantage > 0)
    assert browser.run("return document.querySelector('#overlay option[value=value]').disabled") is True
    assert browser.console() == []


def test_hostile_text_is_shown_and_inert(browser: Browser, tmp_path: Path) -> None:
    run = write(tmp_path / "<b>run", [record(0, i, random.Random(i), text=HOSTILE) for i in range(2)])
    browser.open(view(run))
    assert browser.run("return window.owned === undefined && document.querySelector('img') === null")
    assert HOSTILE in browser.run("return document.querySelector('article pre.sampled:last-of-type').textContent")
    assert browser.run("return document.querySelector('h1').textContent") == "<b>run"
    pick(browser, "search", "onerror='window")
    assert shown(browser) == [0, 1] and browser.run("return window.owned === undefined")
    assert browser.console() == []


def head_of(page: Path) -> dict[str, Any]:
    return json.loads(page.read_text().split('id="head">')[1].split("</script>")[0])  # type: ignore[no-any-return]


def titles_of(folder: Path, questions: list[str]) -> list[str]:
    run = write(folder, [{**record(i, i, random.Random(i)), "question": each} for i, each in enumerate(questions)])
    return [trajectory["title"] for trajectory in head_of(view(run))["list"]]


def test_group_titles_are_beginnings_of_questions_that_tell_groups_apart(tmp_path: Path) -> None:
    found = titles_of(tmp_path / "a", ["Why?\nTell me", "Is it a cat 🐈?"])
    assert found == ["Why? Tell me", "Is it a cat 🐈?"]
    told = "Solve the task step by step.\n\n"
    assert titles_of(tmp_path / "b", [told + "1 + 1", told + "1 + 2"]) == ["… 1 + 1", "… 1 + 2"]
    long = "Say in one sentence, and without any words that a child of ten would not know, "
    found = titles_of(tmp_path / "c", [long + "what rain is", long + "what snow is"])
    assert found == ["… rain is", "… snow is"]
    assert titles_of(tmp_path / "d", ["What is 0 * 8?"] * 2) == ["What is 0 * 8?"] * 2


def test_special_tokens_stand_out_and_split_characters_are_whole(browser: Browser, tmp_path: Path) -> None:
    one = record(0, 0, random.Random(0), length=8, turns=1)
    tokens = ["<|im_start|>", "<|im_", "end|>", "Hi", "", "", "😀", "<|im_end|>"]
    one["rows"][0] |= {"tokens": tokens, "special": [0, 7]}
    browser.open(view(write(tmp_path, [one])))
    assert browser.run("return [...document.querySelectorAll('pre .special')].map(s => s.textContent)") == [
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert browser.run("return document.querySelector('pre.context').textContent") == "<|im_start|><|im_end|>Hi"
    assert browser.run("return document.querySelector('pre.sampled').textContent") == "😀<|im_end|>"
    assert browser.run("return document.querySelectorAll('pre.sampled .part').length") == 2
    assert browser.console() == []

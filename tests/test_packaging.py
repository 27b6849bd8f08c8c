"""The set-up script, the commands of the README, and the version ranges."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest


def setup(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(["bash", "scripts/setup.sh"], cwd=root, env=env, capture_output=True, text=True, timeout=60)


def test_setup_does_nothing_where_it_was_done(root: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho installing >&2; exit 3\n")
    python.chmod(0o755)
    files = "pyproject.toml scripts/setup.sh scripts/torchvision_shim.py"
    hashed = f"{{ echo $PWD; cat {files}; }} | sha256sum | cut -d' ' -f1"
    fingerprint = subprocess.run(["bash", "-c", hashed], cwd=root, capture_output=True, text=True, check=True).stdout
    (tmp_path / ".lightrl-installed").write_text(fingerprint)
    done = setup(root, VENV=str(tmp_path), PYTHON="false")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (tmp_path / ".lightrl-installed").write_text("of another pyproject.toml")
    assert setup(root, VENV=str(tmp_path), PYTHON="false").returncode != 0


def test_setup_says_which_python_it_needs(root: Path, tmp_path: Path) -> None:
    done = setup(root, VENV=str(tmp_path / "venv"), PYTHON="false")
    assert done.returncode == 1
    assert "needs Python 3.10 to 3.13 (found: false); name one with PYTHON=" in done.stderr


@pytest.mark.parametrize(("target", "commands"), [("test", ["ruff check", "ruff format --check", "mypy", "pytest"])])
def test_make_test_runs_lint_types_and_tests(target: str, commands: list[str], root: Path) -> None:
    plan = subprocess.run(
        ["make", "-n", target], cwd=root, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    places = [plan.find(command) for command in ["scripts/setup.sh", *commands]]
    assert -1 not in places
    assert places == sorted(places)


def test_continuous_integration_runs_the_readmes_command(root: Path) -> None:
    assert "exec make test" in (root / ".ci" / "run").read_text()
    assert os.access(root / ".ci" / "run", os.X_OK)
    readme = (root / "README.md").read_text()
    assert "make quickstart" in readme
    assert "make test" in readme


def test_every_version_range_has_its_reason(root: Path) -> None:
    text = (root / "pyproject.toml").read_text()
    bounded = [line for line in text.splitlines() if re.search(r'"[\w\[\]-]+(>=|==|<)[\d.]+', line)]
    assert len(bounded) > 15
    plain = ("pytest-timeout", "mypy", "pre-commit", "hatchling")  # tools for developers, any recent release
    without = [line for line in bounded if "#" not in line and not any(name in line for name in plain)]
    assert without == []

"""`make audit`: which versions are asked about, and what is said where nothing can be asked."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def audit() -> Any:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "scripts" / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stub(environment: Path, code: str) -> list[str]:
    """A pip-audit of this shell code; the command's arguments."""
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "pip-audit").write_text(f"#!/bin/sh\n{code}\n")
    (environment / "bin" / "pip-audit").chmod(0o755)
    return ["--environment", str(environment)]


def test_the_minimum_versions_are_those_of_pyproject(audit: Any) -> None:
    of = audit.requirements(ROOT / "pyproject.toml")
    assert {"", "vllm", "server", "dev"} <= set(of) and any(each.startswith("torch>=") for each in of[""])
    pinned, unbounded = audit.minimums(of, ["server", "deepspeed", "bench"])
    assert {"jinja2==3.1.6", "h11==0.16", "trl==1.16", "regex==2024.5.15"} <= set(pinned) and unbounded == ["ninja"]
    assert not any(each.startswith("vllm") for each in pinned)
    assert audit.minimum("a[b]>=1.2,<2; python_version > '3'") == "a==1.2" and audit.minimum("a<2") is None


def test_it_says_what_is_known_and_what_could_not_be_asked(
    audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    checked = {"dependencies": [{"name": "torch", "version": "2.11", "vulns": []}]}
    assert audit.main(stub(tmp_path / "clean", f"cat \"$2\" > {asked}; echo '{json.dumps(checked)}'")) == 0
    assert "jinja2==3.1.6" in asked.read_text() and ", 0 weaknesses found" in capsys.readouterr().out
    weakness = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["9"]}
    checked["dependencies"].append({"name": "jinja2", "version": "3.1.6", "vulns": [weakness]})
    assert audit.main(stub(tmp_path / "found", f"echo '{json.dumps(checked)}'; exit 1")) == 1
    assert "jinja2==3.1.6: PYSEC-1 CVE-1, mended in 9" in capsys.readouterr().out
    partly = {"dependencies": [{"name": "h11", "skip_reason": "not found"}, *checked["dependencies"][:1]]}
    assert audit.main(stub(tmp_path / "partly", f"echo '{json.dumps(partly)}'")) == 2, "not taken for nothing known"
    assert "Not checked, because the database does not have them: h11" in capsys.readouterr().out
    cut = stub(tmp_path / "cut", "echo 'ConnectionError: Name or service not known' >&2; exit 1")
    assert audit.main(cut) == 2
    said = capsys.readouterr().out
    assert "Nothing was checked: " in said and "Name or service not known" in said and "h11==0.16" in said
    assert audit.main([*cut, "--extra", "nothing"]) == 2 and "--extra nothing: there is none" in capsys.readouterr().err
    monkeypatch.setattr(audit, "install", lambda environment: "no index")
    assert audit.main(cut) == 2 and "pip-audit cannot be installed: no index" in capsys.readouterr().out

"""The documentation site builds without warnings, loads nothing from another host, and documents the API."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs_links import plain


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


@pytest.mark.long
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, (page, loaded)


def test_the_api_pages_list_every_public_name(root: Path) -> None:
    for page in sorted((root / "docs/reference").glob("*.md")):
        text = page.read_text()
        for module in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
            names = getattr(importlib.import_module(module), "__all__", None)
            if names is not None:
                assert set(re.findall(r"^ {8}- (\w+)$", text, re.MULTILINE)) == set(names), page


def test_links_to_files_outside_the_site_lead_to_the_repository() -> None:
    address = "https://example.org/lightrl/"
    assert plain("[x](../LICENSE)", 0, address) == "[x](https://example.org/lightrl/blob/main/LICENSE)"

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
from scripts.docs_math import mathml


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


@pytest.mark.long
def test_the_api_reference_holds_classes_with_their_arguments(site: Path) -> None:
    page = (site / "reference/algorithms/index.html").read_text()
    assert 'id="lightrl.algorithms.PPOLightningModule"' in page and "off_policy_correction" in page
    assert 'id="lightrl.rollout.RolloutDataModule"' in (site / "reference/rollout/index.html").read_text()


def test_the_api_pages_list_every_public_name(root: Path) -> None:
    for page in sorted((root / "docs/reference").glob("*.md")):
        text = page.read_text()
        for module in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
            names = getattr(importlib.import_module(module), "__all__", None)
            if names is not None:
                assert set(re.findall(r"^ {8}- (\w+)$", text, re.MULTILINE)) == set(names), page


def test_formulas_become_mathml() -> None:
    page = r'<p>The ratio <span class="arithmatex">\(\rho_t &lt; 2\)</span>.</p>'
    html = mathml(page)
    assert "arithmatex" not in html and html.startswith("<p>The ratio <") and html.endswith(">.</p>")
    if importlib.util.find_spec("latex2mathml"):
        assert "<math" in html and "<msub>" in html
    else:
        assert r"<code>\rho_t &lt; 2</code>" in html


def test_links_to_files_that_are_no_pages_become_their_path() -> None:
    assert plain("[grpo.yaml](../configs/algorithms/grpo.yaml)") == "`configs/algorithms/grpo.yaml`"
    assert plain("see [the numbers](../benchmarks/README.md).") == "see the numbers (`benchmarks/README.md`)."
    page = "[metrics](metrics.md) ![curve](images/a.png) [site](https://example.org)"
    assert plain(page) == page

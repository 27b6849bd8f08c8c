"""The documentation site builds without a warning, needs no other host, and holds the API."""

from __future__ import annotations

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


@pytest.mark.long
def test_the_api_reference_holds_classes_with_their_arguments(site: Path) -> None:
    page = (site / "reference/algorithms/index.html").read_text()
    assert 'id="lightrl.algorithms.PPOLightningModule"' in page and "off_policy_correction" in page
    assert 'id="lightrl.rollout.RolloutDataModule"' in (site / "reference/rollout/index.html").read_text()


def test_links_to_files_that_are_no_pages_become_their_path() -> None:
    assert plain("[grpo.yaml](../configs/algorithms/grpo.yaml)") == "`configs/algorithms/grpo.yaml`"
    assert plain("see [the numbers](../benchmarks/README.md).") == "see the numbers (`benchmarks/README.md`)."
    page = "[metrics](metrics.md) ![curve](images/a.png) [site](https://example.org)"
    assert plain(page) == page

"""The documentation site builds without warnings, loads nothing from another host, and documents the API."""

from __future__ import annotations

import html
import importlib.util
import json
import math
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


@pytest.mark.long
def test_the_api_reference_describes_classes_with_their_arguments(site: Path) -> None:
    page = (site / "reference/algorithms/index.html").read_text()
    assert 'id="lightrl.algorithms.PPOLightningModule"' in page and "off_policy_correction" in page
    assert "Proximal policy optimization (PPO) with verifiable rewards" in html.unescape(page)
    assert 'id="lightrl.rollout.RolloutDataModule"' in (site / "reference/rollout/index.html").read_text()


QUERIES = {  # what readers search for, and the pages one of which must be among the first three
    "install": {"installation"},
    "GRPO explained": {"grpo", "algorithms/grpo"},
    "dataset format": {"data"},
    "thinking on off": {"generation"},
    "LoRA learning rate": {"lora"},
    "W&B": {"logging"},
    "out of memory": {"memory", "troubleshooting"},
    "hyperparameters": {"hyperparameters"},
    "7B on one GPU": {"memory", "lora"},
    "custom loss": {"custom_algorithms"},
    "reward hacking": {"rewards", "rlhf", "debugging", "troubleshooting"},
    "multi-node SLURM": {"multi_gpu"},
    "evaluation pass@k": {"metrics", "evaluation"},
    "how base and callbacks+ merge": {"configuration"},
    "GSM8K": {"quickstart", "tutorial", "data", "rewards", "benchmarks"},
    "citation": {"license"},
    "license": {"license"},
}


def ranking(documents: list[dict[str, str]], query: str, separator: str) -> list[str]:
    """Pages, best first, by BM25 over titles and texts, scored and boosted as the site's search does it."""

    def tokens(text: str) -> list[str]:
        words = re.split(separator, html.unescape(re.sub("<[^>]+>", " ", text)).lower())
        return [token for word in words if (token := word.strip(".,;:?!()'\"`"))]

    stop_words = set(re.findall(r"\w+", "a an and are for how in is of off on or the to what with"))
    terms = [token for token in tokens(query) if token not in stop_words]
    fields = [[(tokens(d["title"]), 1000.0), (tokens(d["text"]), 1.0)] for d in documents]
    mean = [sum(len(f[i][0]) for f in fields) / len(fields) for i in range(2)]
    counts = [[[sum(w.startswith(t) for w in words) for words, _ in f] for f in fields] for t in terms]
    scores: dict[str, float] = {}
    for index, document in enumerate(documents):
        score, matched = 0.0, 0
        for per_document in counts:
            frequency = sum(any(c) for c in per_document)
            idf = math.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
            matched += any(per_document[index])
            for i, (words, boost) in enumerate(fields[index]):
                count = per_document[index][i]
                score += boost * idf * 2.2 * count / (1.2 * (0.25 + 0.75 * len(words) / mean[i]) + count)
        location, _, section = document["location"].partition("#")
        score *= 1 + ((not section) + (matched == len(terms))) ** 2
        page = location.strip("/")
        scores[page] = max(scores.get(page, 0.0), score)
    return sorted((page for page in scores if scores[page] > 0), key=lambda page: -scores[page])


@pytest.mark.long
def test_the_search_finds_what_readers_look_for(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    first = {query: ranking(index["docs"], query, index["config"]["separator"])[:3] for query in QUERIES}
    assert {query: pages for query, pages in first.items() if not QUERIES[query] & {*pages}} == {}


@pytest.mark.long
def test_pages_have_separate_descriptions_and_every_image_a_text(site: Path) -> None:
    found = {}
    for page in site.rglob("index.html"):
        text = page.read_text()
        found[page] = re.search(r'<meta name="description" content="([^"]*)"', text)
        assert not re.findall(r'<img(?![^>]*alt="[^"]+")[^>]*>', text.partition("<article")[2]), page
    texts = [match[1] for match in found.values() if match]
    assert len(texts) == len(found) and len({*texts}) == len(texts)

"""The README's figures are those of the committed results; tests/test_real_model.py runs its Python example."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import plot_quickstart

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_figures_of_the_pages_are_those_of_the_committed_results() -> None:
    expected = plot_quickstart.sentence(plot_quickstart.load_runs())
    for name in plot_quickstart.PAGES:
        assert f"<!-- quickstart -->{expected}<!-- /quickstart -->" in (ROOT / name).read_text(), (
            f"{name}: run python scripts/plot_quickstart.py --pages"
        )


def test_the_readme_is_short_and_its_links_exist() -> None:
    assert len(README.split()) <= 1000
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(linked) > 20
    assert [path for path in linked if not (ROOT / path).exists()] == []

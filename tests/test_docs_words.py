"""Pages stay short: a limit on the words of a page and of a table cell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, CELL = 1500, 25

# Reference pages and the changelog may be long. Their table cells may not.
LONG = {"configuration.md", "cli.md", "options.md", "metrics.md", "glossary.md", "renames.md", "changelog.md"}


def lines(path: Path) -> Iterator[str]:
    """The lines of a page outside code blocks."""
    fenced = False
    for line in path.read_text().split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def words(text: str) -> int:
    """Number of words: a link counts by its text, a formula or code span as one word, signs alone do not count."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`|\$[^$]+\$", "x", text)
    return sum(any(sign.isalnum() for sign in word) for word in text.split())


def faults(path: Path) -> list[str]:
    name = str(path.relative_to(ROOT / "docs"))
    found, total = [], 0
    for line in lines(path):
        total += words(line)
        if line.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line):
                if words(cell) > CELL:
                    found.append(f"{name}: a table cell of {words(cell)} words: {cell.strip()[:80]!r}")
    if total > PAGE and name not in LONG and not name.startswith("reference/"):
        found.append(f"{name}: {total} words")
    return found


def test_pages_and_table_cells_are_short() -> None:
    assert [fault for page in sorted((ROOT / "docs").rglob("*.md")) for fault in faults(page)] == []


def test_named_tests_exist() -> None:
    """Tests of other projects are in folders that don't exist here."""
    text = "\n".join(path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    named = {match.groups() for match in re.finditer(r"`(tests/[\w/]+\.py)(?:::(\w+))?", text)}
    ours = {(file, test) for file, test in named if (ROOT / file).parent.is_dir()}
    assert len(ours) > 40
    for file, test in ours:
        assert (ROOT / file).is_file() and (test is None or f"def {test}(" in (ROOT / file).read_text()), (file, test)

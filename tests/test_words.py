"""Banned phrases and malformed argument descriptions, in everything that a person reads."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

BANNED = re.compile(
    r"\b(goes on|go on with|anew|of its own|of yours|beside|stands in|whom|nobody|nothing but|but for|is no|"
    r"cannot be meant|comes of|says no|at the mouse|what of|mend|mends|mended)\b|\btoo\.(?=\s|$)|in the middle",
    re.IGNORECASE,
)
ALLOWED = re.compile(r"is no longer|is no-?op|in the middle of", re.IGNORECASE)
ARGUMENT = re.compile(r"^\s+\w+: (of|most|what|where|with|for) ")


def written() -> list[Path]:
    """Every file whose text a person reads."""
    roots = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md", "docs", "lightrl", "configs", "examples"]
    files: list[Path] = []
    for name in roots:
        path = ROOT / name
        files += [path] if path.is_file() else sorted(path.rglob("*"))
    return [p for p in files if p.suffix in {".md", ".py", ".yaml", ".yml", ".html", ".js"} and p.is_file()]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of prose: strings and comments of Python, comments of YAML, all of the rest except code."""
    text = path.read_text()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for offset, line in enumerate(node.value.split("\n")):
                    yield node.lineno + offset, line
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        return
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        fenced ^= line.lstrip().startswith("```")
        if path.suffix in {".yaml", ".yml"}:
            if "#" in line:
                yield number, line[line.index("#") :]
        elif not fenced or path.suffix != ".md":
            yield number, re.sub(r"`[^`]*`", "`x`", line)


def faults(path: Path) -> list[str]:
    found = []
    for number, line in texts(path):
        for match in BANNED.finditer(line):
            if not ALLOWED.match(line, match.start()):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]!r} in {line.strip()[:100]!r}")
        if path.suffix == ".py" and ARGUMENT.match(line):
            found.append(f"{path.relative_to(ROOT)}:{number}: starts with a preposition: {line.strip()[:100]!r}")
    return found


def test_no_banned_phrase() -> None:
    assert [fault for path in written() for fault in faults(path)] == []

"""An MkDocs hook: links to repository files outside the site become their path as plain code."""

from __future__ import annotations

import re
from typing import Any

LINK = r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>(?:\.\./){%d}(?!\.\./)[^)#\s]+)(?:#[^)]*)?\)"


def plain(markdown: str, depth: int = 0) -> str:
    """Markdown without links out of `docs/`: the path in the repository, in brackets if the link text differs.

    Args:
        markdown: Source of a page.
        depth: Number of folders between `docs/` and the page.
    """

    def replace(link: re.Match[str]) -> str:
        path, text = link["path"].lstrip("./"), link["text"].strip("`")
        same = path.rstrip("/") == text.rstrip("/") or path.rsplit("/", 1)[-1] == text
        return f"`{path}`" if same else f"{link['text']} (`{path}`)"

    return re.sub(LINK % (depth + 1), replace, markdown)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page's source."""
    return plain(markdown, page.file.src_uri.count("/"))

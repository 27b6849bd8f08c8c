"""A hook of MkDocs: links to files of the repository that are no pages become their path as plain code."""

from __future__ import annotations

import re
from typing import Any

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>\.\./[^)#\s]+)(?:#[^)]*)?\)")


def plain(markdown: str) -> str:
    """Markdown without links out of `docs/`: their path in the repository, in brackets where the text differs."""

    def replace(link: re.Match[str]) -> str:
        path, text = link["path"].removeprefix("../"), link["text"].strip("`")
        same = path.rstrip("/") == text.rstrip("/") or path.rsplit("/", 1)[-1] == text
        return f"`{path}`" if same else f"{link['text']} (`{path}`)"

    return LINK.sub(replace, markdown)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page's source; pages of deeper folders have no such links."""
    return markdown if "/" in page.file.src_uri else plain(markdown)

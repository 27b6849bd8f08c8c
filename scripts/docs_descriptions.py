"""An MkDocs hook that describes each page by its first paragraph, for search results and link previews."""

from __future__ import annotations

import html
import re
from typing import Any

LONGEST = 160
"""Characters of a description that search engines show."""
SHORTEST = 60
"""Characters from which whole sentences are enough."""


def description(content: str) -> str:
    """The leading sentences of the first paragraph that fit, or its first words, escaped. Empty without a paragraph.

    Args:
        content: HTML of a page.
    """
    for paragraph in re.findall(r"<p>(.*?)</p>", content, re.DOTALL):
        paragraph = re.sub(r"<math.*?</math>", "...", paragraph, flags=re.DOTALL)
        text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", paragraph)).split())
        if not text or text.startswith("Bases:"):
            continue
        fitting = ""
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z`])", text):
            if len(fitting) + len(sentence) >= LONGEST:
                break
            fitting = f"{fitting} {sentence}".strip()
        if len(fitting) < SHORTEST < len(text):
            fitting = text[: LONGEST - 4].rsplit(" ", 1)[0] + " ..."
        return html.escape(re.sub(r":$", ".", fitting))
    return ""


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page's HTML."""
    found = description(html)
    if found and not page.is_homepage:
        page.meta.setdefault("description", found)
    return html

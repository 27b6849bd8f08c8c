"""An MkDocs hook: renders formulas as MathML at build time, so that pages need no script and no network."""

from __future__ import annotations

import html
import re
from typing import Any

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\(?P<opening>[(\[])(?P<latex>.*?)\\[)\]]\s*</(?P=tag)>', re.DOTALL
)


def mathml(content: str) -> str:
    """HTML of a page whose formulas are MathML. Without the package `latex2mathml` they stay as code."""
    try:
        from latex2mathml.converter import convert
    except ImportError:
        convert = None

    def replace(found: re.Match[str]) -> str:
        display = "block" if found["opening"] == "[" else "inline"
        latex = html.unescape(found["latex"]).strip()
        if convert is None:
            code = f"<code>{html.escape(latex)}</code>"
            return f"<p>{code}</p>" if display == "block" else code
        formula = convert(latex, display=display)
        return f'<div class="formula">{formula}</div>' if display == "block" else formula

    return FORMULA.sub(replace, content)


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs with each page's HTML."""
    return mathml(html)

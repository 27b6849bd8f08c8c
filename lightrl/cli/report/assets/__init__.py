"""Styles and scripts that the pages of `lightrl report` and `lightrl view` contain."""

from __future__ import annotations

from pathlib import Path


def asset(name: str) -> str:
    """The text of a file of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")

"""Styles and scripts of the pages of `lightrl report` and `lightrl view`."""

from __future__ import annotations

from pathlib import Path


def asset(name: str) -> str:
    """The text of a file in this directory."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")

"""Styles and scripts of the pages that `lightrl report` and `lightrl view` write, which hold them whole."""

from __future__ import annotations

from pathlib import Path

__all__ = ["asset"]


def asset(name: str) -> str:
    """The text of a file of this folder: `report.js` shows values under the mouse and zooms; `viewer.js` makes the page
    of trajectories, whose texts only ever become text nodes."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")

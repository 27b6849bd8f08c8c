"""Where in a prompt its images, videos and sounds stand: in content blocks, at marks in the text, or in front."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightrl.data.media import KINDS, MediaError
from lightrl.data.templates import as_messages

__all__ = ["shown"]

_PLACE = object()
_ADDRESSES = ("url", "path", "bytes", "data", "base64")
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")


def shown(prompt: Any, row: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[Any, list[tuple[str, Any]]]:
    """A prompt with a place for each medium, and the media in the order of the places.

    Media stand in content blocks (`{"type": "image", "image": ...}`) or in columns. Those of columns go, in order, to
    content blocks without one (`{"type": "image"}`) and to the marks `<image>`, `<video>` and `<audio>` in texts. Where
    the prompt has neither they go before the first user message's text, images first.

    Args:
        prompt: a string or a conversation.
        row: the row, for its media columns.
        columns: column -> kind.

    Returns:
        the string as it was where nothing is shown, else a conversation whose blocks hold no data; (kind, value) of
        each medium.

    Raises:
        MediaError: media left over, or places.
    """
    waiting: dict[str, list[Any]] = {}
    for name, kind in columns.items():
        if name in row:
            waiting.setdefault(kind, []).extend(_several(kind, row[name]))
    offered = {kind: len(values) for kind, values in waiting.items()}
    found: list[tuple[str, Any]] = []
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        messages = as_messages(prompt)
    for message in messages:
        message["content"] = _blocks(message["content"], waiting, found)
    asked = {kind: sum(k == kind and v is _PLACE for k, v in found) for kind in KINDS}
    if not found and any(offered.values()):
        first = next((m for m in messages if m["role"] == "user"), messages[0])
        front = [(kind, value) for kind in KINDS for value in waiting.get(kind, ())]
        first["content"] = [*({"type": kind} for kind, _ in front), *first["content"]]
        return messages, front
    for kind in KINDS:
        if asked[kind] != offered.get(kind, 0):
            raise MediaError(f"the prompt has {asked[kind]} place(s) for {offered.get(kind, 0)} {kind}(s).")
    queues = {kind: iter(values) for kind, values in waiting.items()}
    found = [(kind, next(queues[kind]) if value is _PLACE else value) for kind, value in found]
    return (messages, found) if found or not isinstance(prompt, str) else (prompt, [])


def _several(kind: str, value: Any) -> list[Any]:
    """The media in a column's value: none, one, or a list of them."""
    if value is None:
        return []
    if isinstance(value, np.ndarray):
        many = value.ndim > {"image": 3, "video": 4, "audio": 1}[kind] or value.dtype == object
        return list(value) if many else [value]
    if not isinstance(value, list | tuple):
        return [value]
    depth, leaf = 0, value
    while isinstance(leaf, list | tuple | np.ndarray) and len(leaf):
        depth, leaf = depth + 1, leaf[0]
    if isinstance(leaf, int | float | np.number):  # arrays as lists, which is how Arrow gives them back
        return list(value) if depth > {"image": 3, "video": 4, "audio": 1}[kind] else [value]
    if kind == "video" and depth == 1 and not _is_video(leaf):
        return [value]  # frames of one video
    return [item for item in value if item is not None]


def _is_video(leaf: Any) -> bool:
    """Whether an element of a list is a video of its own rather than a frame."""
    if isinstance(leaf, Mapping):
        leaf = leaf.get("path") or leaf.get("url") or leaf.get("bytes")
    if isinstance(leaf, str | Path):
        return not (str(leaf).lower().endswith(_PICTURES) or str(leaf).startswith("data:image/"))
    return isinstance(leaf, bytes) and not leaf.startswith((b"\x89PNG", b"\xff\xd8", b"BM"))


def _blocks(content: Any, waiting: Mapping[str, list[Any]], found: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """A message's content as blocks without data; appends its media (`_PLACE` for a column's) to `found`."""
    if isinstance(content, str) or content is None:
        content = [{"type": "text", "text": content or ""}]
    blocks: list[dict[str, Any]] = []
    for given in content:
        block = {key: value for key, value in given.items() if value is not None}  # Arrow fills missing keys with None
        kind = next((kind for kind in KINDS if kind in str(block.get("type", ""))), None)
        if kind is not None:
            names = (kind, str(block.get("type")), f"{kind}_url", f"input_{kind}", *_ADDRESSES)
            found.append((kind, next((block[name] for name in names if name in block), _PLACE)))
            blocks.append({"type": kind})
            continue
        marks = "|".join(f"<{kind}>" for kind in KINDS if kind in waiting)
        for part in re.split(f"({marks})", str(block.get("text", ""))) if marks else [str(block.get("text", ""))]:
            if marks and re.fullmatch(marks, part):
                found.append((part[1:-1], _PLACE))
                blocks.append({"type": part[1:-1]})
            elif part:
                blocks.append({"type": "text", "text": part})
    return blocks

"""Encodes images and videos as base64 PNG (lossless) for HTTP requests."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def open_image(file: Any) -> Any:
    """Opens a path or a binary file as a PIL image, in any format that PIL supports except PostScript (EPS).

    PIL executes PostScript with Ghostscript.

    Raises:
        ValueError: The file is PostScript. PIL raises many other error types for corrupt files.
    """
    from PIL import Image

    image = Image.open(file)
    if image.format == "EPS":
        image.close()
        raise ValueError("PostScript (EPS) images are not supported. Convert the image, for example to PNG.")
    return image


def png(image: Any) -> bytes:
    """Encodes a PIL image, or a uint8 array of shape (H, W) or (H, W, 3), as PNG."""
    if not hasattr(image, "save"):
        from PIL import Image

        image = Image.fromarray(image)
    buffer = io.BytesIO()
    (image if image.mode in _PNG_MODES else image.convert("RGB")).save(buffer, format="PNG")
    return buffer.getvalue()


def encode_media(value: Any) -> Any:
    """Encodes bytes, PIL images, arrays, and lists of them (a video is a list of frames) as base64. Keeps text."""
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 4:
        return [encode_media(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "save") or getattr(value, "ndim", 0) in (2, 3):
        return base64.b64encode(png(value)).decode()
    return value


def encode_rows(rows: Sequence[Any]) -> list[Any]:
    """Applies `encode_media` to each row. Encodes identical objects, as in a group, once."""
    done: dict[int, Any] = {}
    for row in rows:
        if id(row) not in done:
            done[id(row)] = encode_media(row)
    return [done[id(row)] for row in rows]


def decode_image(text: str) -> Any:
    """Decodes base64, or a data URL, to a PIL image.

    Raises:
        ValueError: The value is not a base64 image.
    """
    try:
        image = open_image(io.BytesIO(base64.b64decode(text.rpartition(",")[2], validate=True)))
        image.load()
    except Exception as error:  # PIL raises many types for broken files
        raise ValueError(f"{str(text)[:40]!r} is not a base64 image.") from error
    return image


def decode_video(frames: Sequence[str]) -> Any:
    """Decodes base64 frames to an array (frames, height, width, 3)."""
    import numpy as np

    return np.stack([np.asarray(decode_image(frame).convert("RGB")) for frame in frames])

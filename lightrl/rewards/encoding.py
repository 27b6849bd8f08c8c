"""Encodes images and videos as base64 PNG (lossless) for HTTP requests."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats to read. PostScript would be executed by Ghostscript."""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def png(image: Any) -> bytes:
    """Encodes a PIL image, or a uint8 array of shape (H, W) or (H, W, 3), as PNG."""
    if not hasattr(image, "save"):
        from PIL import Image

        image = Image.fromarray(image)
    buffer = io.BytesIO()
    (image if image.mode in _PNG_MODES else image.convert("RGB")).save(buffer, format="PNG")
    return buffer.getvalue()


def encode_media(value: Any) -> Any:
    """Encodes PIL images, arrays, and lists of them (a video is a list of frames) as base64."""
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 4:
        return [encode_media(item) for item in value]
    return base64.b64encode(png(value)).decode()


def encode_rows(rows: Sequence[Any]) -> list[Any]:
    """Applies `encode_media` to each row. Encodes identical objects, as in a group, once."""
    done: dict[int, Any] = {}
    for row in rows:
        if id(row) not in done:
            done[id(row)] = encode_media(row)
    return [done[id(row)] for row in rows]


def decode_image(text: str) -> Any:
    """Decodes base64, or a data URL, to a PIL image. Raises a ValueError for other values."""
    from PIL import Image

    try:
        data = io.BytesIO(base64.b64decode(text.rpartition(",")[2], validate=True))
        image = Image.open(data, formats=IMAGE_FORMATS)
        image.load()
    except Exception as error:  # PIL raises many types for broken files
        raise ValueError(f"{str(text)[:40]!r} is not a base64 image.") from error
    return image


def decode_video(frames: Sequence[str]) -> Any:
    """Decodes base64 frames to an array (frames, height, width, 3)."""
    import numpy as np

    return np.stack([np.asarray(decode_image(frame).convert("RGB")) for frame in frames])

"""Encodes images and videos as base64 PNG (lossless) for HTTP requests."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def open_image(file: Any) -> Any:
    """Opens a path or a binary file as a PIL image, in any format that PIL supports except PostScript (EPS).

    PIL executes PostScript with Ghostscript.

    Raises:
        ValueError: The file is PostScript. PIL raises many other types for broken files.
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


def decode_images(rows: Sequence[Any], name: str = "images", max_pixels: float = math.inf) -> list[list[Any]]:
    """Decodes the images of n rows. Each row is a list of base64 texts, one such text, or None.

    Raises:
        ValueError: A value is not a base64 image, or the images have more than `max_pixels` pixels in total.
    """
    decode = _Decoder(name, max_pixels)
    return [
        [decode(text, number) for text in ([row] if isinstance(row, str) else decode.listed(row, number))]
        for number, row in enumerate(rows)
    ]


def decode_videos(rows: Sequence[Any], max_pixels: float = math.inf) -> list[list[Any]]:
    """Decodes the videos of n rows, each a list of videos of base64 frames, to arrays (frames, height, width, 3).

    Raises:
        ValueError: A frame is not a base64 image, or the videos have more than `max_pixels` pixels in total.
    """
    import numpy as np

    decode = _Decoder("videos", max_pixels)

    def video(frames: Any, row: int) -> Any:
        listed = decode.listed(frames, row)
        return np.stack([np.asarray(decode(frame, row).convert("RGB")) for frame in listed])

    return [[video(frames, number) for frames in decode.listed(row, number)] for number, row in enumerate(rows)]


@dataclass
class _Decoder:
    """Decodes base64 images up to a total number of pixels, because a small file can contain a huge image."""

    name: str
    left: float

    def listed(self, value: Any, row: int) -> list[Any]:
        if not isinstance(value, list | None):
            raise ValueError(f"{self.name}, row {row}: {str(value)[:40]!r} is not a list. Send a list.")
        return value or []

    def __call__(self, text: Any, row: int) -> Any:
        try:
            encoded = text.split(",", 1)[1] if text.startswith("data:") else text
            image = open_image(io.BytesIO(base64.b64decode(encoded, validate=True)))
            self.left -= image.width * image.height
            if self.left >= 0:
                image.load()
        except Exception as error:  # PIL raises many types for broken files
            raise ValueError(f"{self.name}, row {row}: {str(text)[:40]!r} is not a base64 image. Fix it.") from error
        if self.left < 0:
            raise ValueError(f"{self.name}, row {row}: the request has too many pixels. Send fewer rows per request.")
        return image

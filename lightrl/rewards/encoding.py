"""Images and videos on the wire: lossless base64 PNG."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def open_image(file: Any) -> Any:
    """A PIL image of a path or a binary file, in any format that PIL reads except PostScript (EPS).

    PIL has Ghostscript run PostScript, which is a program.

    Raises:
        ValueError: It is PostScript. PIL raises nearly anything for broken files.
    """
    from PIL import Image

    image = Image.open(file)
    if image.format == "EPS":
        image.close()
        raise ValueError("PostScript (EPS) is a program and is not run: convert it, for example to PNG")
    return image


def png(image: Any) -> bytes:
    """A PIL image, or an array of shape (H, W) or (H, W, 3) of uint8, as the bytes of a PNG file."""
    if not hasattr(image, "save"):
        from PIL import Image

        image = Image.fromarray(image)
    buffer = io.BytesIO()
    (image if image.mode in _PNG_MODES else image.convert("RGB")).save(buffer, format="PNG")
    return buffer.getvalue()


def encode_media(value: Any) -> Any:
    """Base64 text of bytes, a PIL image, or an array, also in lists (a video is a list of frames); text stays."""
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 4:
        return [encode_media(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "save") or getattr(value, "ndim", 0) in (2, 3):
        return base64.b64encode(png(value)).decode()
    return value


def encode_rows(rows: Sequence[Any]) -> list[Any]:
    """`encode_media` of each row; rows that are the same object, as in a group, are encoded once."""
    done: dict[int, Any] = {}
    for row in rows:
        if id(row) not in done:
            done[id(row)] = encode_media(row)
    return [done[id(row)] for row in rows]


def decode_images(rows: Sequence[Any], name: str = "images", max_pixels: float = math.inf) -> list[list[Any]]:
    """PIL images of n rows, each a list of base64 texts, one such text, or None; the inverse of `encode_rows`.

    Raises:
        ValueError: A value is not a base64 image (names the row), or they have more pixels together.
    """
    decode = _Decoder(name, max_pixels)
    return [
        [decode(text, number) for text in ([row] if isinstance(row, str) else decode.listed(row, number))]
        for number, row in enumerate(rows)
    ]


def decode_videos(rows: Sequence[Any], max_pixels: float = math.inf) -> list[list[Any]]:
    """Videos of n rows, each a list of videos of base64 frames, as arrays (frames, height, width, 3).

    Raises:
        ValueError: A frame is not a base64 image (names the row), or they have more pixels together.
    """
    import numpy as np

    decode = _Decoder("videos", max_pixels)

    def video(frames: Any, row: int) -> Any:
        listed = decode.listed(frames, row)
        return np.stack([np.asarray(decode(frame, row).convert("RGB")) for frame in listed])

    return [[video(frames, number) for frames in decode.listed(row, number)] for number, row in enumerate(rows)]


@dataclass
class _Decoder:
    """Reads base64 texts as images while pixels are left for them: a small file may hold a huge image."""

    name: str
    left: float

    def listed(self, value: Any, row: int) -> list[Any]:
        if not isinstance(value, list | None):
            raise ValueError(f"{self.name}, row {row}: {str(value)[:40]!r} is not a list.")
        return value or []

    def __call__(self, text: Any, row: int) -> Any:
        try:
            encoded = text.split(",", 1)[1] if text.startswith("data:") else text
            image = open_image(io.BytesIO(base64.b64decode(encoded, validate=True)))
            self.left -= image.width * image.height
            if self.left >= 0:
                image.load()
        except Exception as error:  # PIL raises nearly anything for broken files
            raise ValueError(f"{self.name}, row {row}: {str(text)[:40]!r} is not a base64 image.") from error
        if self.left < 0:
            raise ValueError(f"{self.name}, row {row}: too many pixels in one request; send fewer rows at a time.")
        return image

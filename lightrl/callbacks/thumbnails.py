"""Small pictures of what a prompt shows, for tables and pages. Originals are copied, never changed."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

from lightrl.records import Media

TILE, GAP, PER_LINE, MAX_TILES, FRAMES = 128, 4, 4, 12, 4


def describe(media: Media) -> str:
    """In words: `2 images (640x480, 56x56), video (16 frames of 224x224)`."""
    sizes = ", ".join(f"{image.width}x{image.height}" for image in media.images)
    parts = [] if not media.images else [f"{_count(len(media.images), 'image')} ({sizes})"]
    parts += [f"video ({len(video)} frames of {video.shape[2]}x{video.shape[1]})" for video in media.videos]
    pairs = zip(media.audios, media.sampling_rates, strict=False)
    parts += [f"sound ({len(samples) / rate:.1f} s)" for samples, rate in pairs]
    return ", ".join(parts)


def contact_sheet(media: Media) -> Any:
    """One PIL picture of all images and of a few frames of each video, tiles of at most 128 pixels; None without any.

    The first 12 tiles are shown, four in a line. An image smaller than a tile keeps its size.
    """
    from PIL import Image

    sources = list(media.images)
    for video in media.videos:
        last = len(video) - 1
        picks = sorted({round(i * last / max(1, FRAMES - 1)) for i in range(FRAMES)})
        sources += [Image.fromarray(video[i]) for i in picks]
    tiles = [_tile(image) for image in sources[:MAX_TILES]]
    if not tiles:
        return None
    lines = [tiles[i : i + PER_LINE] for i in range(0, len(tiles), PER_LINE)]
    heights = [max(tile.height for tile in line) for line in lines]
    width = max(sum(tile.width + GAP for tile in line) for line in lines) - GAP
    sheet = Image.new("RGBA", (width, sum(heights) + GAP * (len(lines) - 1)), (0, 0, 0, 0))
    top = 0
    for line, height in zip(lines, heights, strict=True):
        left = 0
        for tile in line:
            sheet.paste(tile, (left, top))
            left += tile.width + GAP
        top += height + GAP
    return sheet


def save_thumbnail(sheet: Any, folder: Path) -> str:
    """Writes a sheet under a name made from its contents and returns the name; equal sheets are written once."""
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    name = f"{fingerprint(buffer.getvalue())}.png"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(buffer.getvalue())
    return name


def fingerprint(data: bytes) -> str:
    """16 hexadecimal digits that equal contents share."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _tile(image: Any) -> Any:
    copy = image.convert("RGB") if image.mode != "RGB" else image.copy()
    copy.thumbnail((TILE, TILE))
    return copy


def _count(number: int, noun: str) -> str:
    return noun if number == 1 else f"{number} {noun}s"

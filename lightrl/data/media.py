"""Loading, decoding, and resizing of images, videos, and audio."""

from __future__ import annotations

import base64
import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightrl.data.rows import COLUMNS, KINDS, MediaError, MediaSource
from lightrl.data.templates import as_strings, conversation, is_plain
from lightrl.records import Media

ADDRESSES = ("url", "path", "bytes", "data", "base64")
"""Keys of a content block with the media item, in addition to its kind."""
_PLACE = object()
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")


def decode(found: Sequence[tuple[str, Any]], source: MediaSource) -> Media:
    """Decodes (kind, value) of each item in prompt order. Raises a `MediaError` with the item and the reason.

    A value is a PIL image, an array, a path, a `file://` URL, bytes, base64 (also as a data URL), or a value of a
    `datasets` feature. A video can also be a list of frames. `source` has limits and the root of relative paths.
    """
    media, root = Media(), source.media_root()
    for kind, value in found:
        number = 1 + len({"image": media.images, "video": media.videos, "audio": media.audios}[kind])
        try:
            value = _item(kind, value)
            if kind == "image":
                media.images.append(_capped(_image(value, root), source.max_pixels))
            elif kind == "video":
                frames, times = _video(value, root, source)
                media.videos.append(np.stack([np.asarray(_capped(frame, source.max_pixels)) for frame in frames]))
                media.video_times.append(times)
            else:
                samples, rate = _audio(value, root)
                media.audios.append(samples)
                media.sampling_rates.append(rate)
        except Exception as error:  # PIL, OpenCV, and NumPy raise many error types for broken files
            raise MediaError(f"{kind} {number} can't be read: {error}") from error
    return media


def require_present(found: Sequence[tuple[str, Any]], source: MediaSource) -> None:
    """Raises a `MediaError` if a media file doesn't exist. Decodes nothing."""
    root = source.media_root()
    for kind, value in found:
        value = _item(kind, value)
        for item in value if kind == "video" and isinstance(value, list | tuple) else [value]:
            if not (isinstance(item, Mapping) and item.get("array") is not None):
                _content(item, root)


def _item(kind: str, value: Any) -> Any:
    """Returns a media item without its content block."""
    if not isinstance(value, Mapping):
        return value
    _require_keys(kind, value, kind, "array", "sampling_rate", *ADDRESSES)
    return value if value.get(kind) is None else value[kind]


# ---- bytes -------------------------------------------------------------------------------------------------------


def _content(value: Any, root: Path) -> bytes | Path | None:
    """Returns the bytes or the file of a value, or None if it contains pixels."""
    if isinstance(value, Mapping):  # from datasets, undecoded, or a content block's address
        return _content(next((value[key] for key in ADDRESSES if value.get(key) is not None), None), root)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Path):
        return _existing(root / value.expanduser())
    return _of_text(value, root) if isinstance(value, str) else None


def _of_text(text: str, root: Path) -> bytes | Path:
    if text.startswith("data:"):
        return base64.b64decode(text.partition(",")[2])
    if text.startswith("file://"):
        return _existing(Path(unquote(urlparse(text).path)))
    if text.startswith(("http://", "https://")):
        raise MediaError(f"{text[:80]!r}: downloads during training are not supported. Save the file and use its path.")
    path = root / Path(text).expanduser()
    if "." in text or (len(text) < 256 and path.is_file()):  # base64 has no dots
        return _existing(path)
    return base64.b64decode("".join(text.split()), validate=True)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise MediaError(f"no such file: {str(path)!r}.")
    return path


# ---- images ------------------------------------------------------------------------------------------------------


def _image(value: Any, root: Path) -> Any:
    """Converts a value to an RGB PIL image, with transparency on white and the EXIF rotation applied."""
    from PIL import Image, ImageOps

    if isinstance(value, Image.Image):
        image = value
    elif (content := _content(value, root)) is None:
        image = Image.fromarray(_pixels(value))
    else:
        image = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    image.load()
    return image if image.mode == "RGB" and image is not value else image.convert("RGB")


def _pixels(value: Any) -> np.ndarray[Any, Any]:
    """Converts an array or nested lists of integers in [0, 255] or floats in [0, 1] to (H, W[, 3 or 4]) uint8."""
    array = np.asarray(value)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)  # channels first
    array = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.shape[2:] not in ((), (3,), (4,)) or array.ndim < 2 or not array.size or array.dtype.kind not in "uifb":
        raise MediaError(
            f"{type(value).__name__} of shape {array.shape} is not an image. Use a PIL image, a path, bytes, base64, "
            "or an array of shape (height, width), (height, width, 3), or (3, height, width)."
        )
    most = 1 if array.dtype.kind in "fb" else 255
    if not 0 <= array.min() <= array.max() <= most:
        raise MediaError(f"{array.dtype} from {array.min():g} to {array.max():g}: out of range. Use [0, {most}].")
    return np.ascontiguousarray((array * (255.0 / most)).round().astype(np.uint8))


def _capped(image: Any, max_pixels: int | None) -> Any:
    width, height = image.size
    if max_pixels is None or width * height <= max_pixels:
        return image
    scale = (max_pixels / (width * height)) ** 0.5
    width, height = max(1, int(width * scale)), max(1, int(height * scale))
    bound = max(1, int(max_pixels))  # limits the length of a strip one pixel wide
    return image.resize((min(width, max(1, bound // height)), min(height, max(1, bound // width))))


# ---- videos ------------------------------------------------------------------------------------------------------


def _video(value: Any, root: Path, source: MediaSource) -> tuple[list[Any], list[float]]:
    """Returns RGB frames and the time of each frame in seconds."""
    content = _content(value, root)
    if content is None:
        picked = _spread(len(value), len(value), source.max_frames)
        return [_image(value[i], root) for i in picked], [i / source.frame_rate for i in picked]
    from PIL import Image, UnidentifiedImageError

    try:
        moving = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
    except UnidentifiedImageError:
        return _with_opencv(content, source)
    frames, starts, clock = [], [], 0.0
    for number in range(getattr(moving, "n_frames", 1)):  # GIF, WebP, APNG
        moving.seek(number)
        frames.append(moving.convert("RGB"))
        starts.append(clock)
        clock += moving.info.get("duration", 1000 / source.frame_rate) / 1000
    rate = len(frames) / clock if clock else source.frame_rate
    picked = _spread(len(frames), round(len(frames) / rate * source.frame_rate), source.max_frames)
    return [frames[i] for i in picked], [starts[i] for i in picked]


def _spread(total: int, wanted: int, limit: int) -> list[int]:
    """Returns evenly spaced frame indices, including the first and the last."""
    return [int(i) for i in np.linspace(0, total - 1, max(1, min(wanted, limit))).round()]


def _with_opencv(
    content: bytes | Path, source: MediaSource, length: int | None = None
) -> tuple[list[Any], list[float]]:
    """Reads a video file of `length` frames. Defaults to the length that the file reports."""
    import cv2
    from PIL import Image

    with tempfile.NamedTemporaryFile(suffix=".video") as file:
        if isinstance(content, bytes):
            file.write(content)
            file.flush()
        reader = cv2.VideoCapture(file.name if isinstance(content, bytes) else str(content))
        total, rate = length or int(reader.get(cv2.CAP_PROP_FRAME_COUNT)), reader.get(cv2.CAP_PROP_FPS)
        rate = rate or source.frame_rate
        if total < 1:
            raise MediaError(f"{content if isinstance(content, Path) else 'bytes'}: OpenCV can't read the video.")
        picked = _spread(total, round(total / rate * source.frame_rate), source.max_frames)
        frames: dict[int, Any] = {}
        for number in range(picked[-1] + 1):
            good = reader.grab()
            if good and number in picked:
                good, pixels = reader.retrieve()
                frames[number] = Image.fromarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)) if good else None
            if not good and number > 0.9 * total:  # WebM and others only estimate their length
                return _with_opencv(content, source, number)
            if not good:
                raise MediaError(f"the video is truncated at frame {number} of {total}.")
        reader.release()
    return [frames[i] for i in picked], [i / rate for i in picked]


# ---- audio -------------------------------------------------------------------------------------------------------


def _audio(value: Any, root: Path) -> tuple[np.ndarray[Any, Any], int]:
    """Returns (samples,) float32 mono audio and the sampling rate in Hz, or 0 if unknown."""
    rate = 0
    if isinstance(value, Mapping) and value.get("array") is not None:
        value, rate = value["array"], int(value.get("sampling_rate") or 0)
    elif (content := _content(value, root)) is not None:
        value, rate = _wave(content)
    samples = np.asarray(value, dtype=np.float32)
    return samples.mean(int(samples.shape[0] > samples.shape[1])) if samples.ndim == 2 else samples, rate


def _wave(content: bytes | Path) -> tuple[np.ndarray[Any, Any], int]:
    import wave

    with wave.open(io.BytesIO(content) if isinstance(content, bytes) else str(content)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        data = file.readframes(file.getnframes())
    if width not in (2, 4):
        raise MediaError(f"a WAV file with {8 * width} bits per sample is not supported. Use 16 or 32 bits.")
    samples = np.frombuffer(data, dtype="<i2" if width == 2 else "<i4").reshape(-1, channels)
    return samples.astype(np.float32).mean(1) / np.float32(1 << (8 * width - 1)), rate


# ---- positions of media in a prompt ------------------------------------------------------------------------------


def placed(
    prompt: Any, row: Mapping[str, Any], source: Any, tokenizer: PreTrainedTokenizerBase, processor: Any
) -> tuple[Any, str | None, list[tuple[str, Any]]]:
    """Implements `shown` for a `ConversationSource` and a `MediaProcessor`."""
    columns = source.media_columns
    if columns is None:
        columns = {name: kind for name, kind in COLUMNS.items() if kind in processor.placeholders}
    plain = is_plain(tokenizer, prompt, source.chat_template)
    marks = {}
    if plain and any(row.get(name) is not None for name in columns):
        marks = {token: kind for kind in columns.values() if (token := processor.token(kind))}
    prompt, found = shown(prompt, row, columns, marks)
    if plain:
        if found:
            prompt = "".join(str(block.get("text") or processor.token(block["type"])) for block in prompt[0]["content"])
        return prompt, source.system_prompt, found
    if not found and not processor.wants_blocks:
        return as_strings(prompt), source.system_prompt, []
    messages = conversation(prompt, source.system_prompt)
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages, None, found


def shown(
    prompt: Any, row: Mapping[str, Any], columns: Mapping[str, str], marks: Mapping[str, str] | None = None
) -> tuple[Any, list[tuple[str, Any]]]:
    """Inserts placeholders for all media into a prompt and returns the media in their order.

    Media are in content blocks (`{"type": "image", "image": ...}`) or columns. Column media are assigned in order to
    content blocks without data (`{"type": "image"}`), the markers `<image>`, `<video>`, and `<audio>` in texts, and
    `marks`. If there are none, they are inserted before the first user message's text, images first.

    Returns the string if it has no media, otherwise a conversation with blocks without data; and (kind, value) of each
    media item. Raises a `MediaError` if the numbers of media and placeholders differ.
    """
    waiting: dict[str, list[Any]] = {}
    for name, kind in columns.items():
        if name in row:
            waiting.setdefault(kind, []).extend(_several(kind, row[name]))
    places = {**{f"<{kind}>": kind for kind in KINDS if kind in waiting}, **(marks or {})}
    found: list[tuple[str, Any]] = []
    messages = conversation(prompt)
    for message in messages:
        message["content"] = _blocks(message["content"], places, found)
    if not found and any(waiting.values()):
        first = next((m for m in messages if m["role"] == "user"), messages[0])
        front = [(kind, value) for kind in KINDS for value in waiting.get(kind, ())]
        first["content"] = [*({"type": kind} for kind, _ in front), *first["content"]]
        return messages, front
    for kind in KINDS:
        asked, offered = sum(k == kind and v is _PLACE for k, v in found), len(waiting.get(kind, ()))
        if asked != offered:
            raise MediaError(f"the prompt has {asked} placeholder(s) for {offered} {kind}(s). Make them equal.")
    queues = {kind: iter(values) for kind, values in waiting.items()}
    found = [(kind, next(queues[kind]) if value is _PLACE else value) for kind, value in found]
    return (messages, found) if found or not isinstance(prompt, str) else (prompt, [])


def _several(kind: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple | np.ndarray):
        return [] if value is None else [value]
    depth, leaf = 0, value
    while isinstance(leaf, list | tuple | np.ndarray) and len(leaf):
        depth, leaf = depth + 1, leaf[0]
    if isinstance(leaf, int | float | np.number | np.bool_):  # Arrow returns arrays as lists
        return list(value) if depth > {"image": 3, "video": 4, "audio": 1}[kind] else [value]
    if kind == "video" and depth == 1 and not _is_video(leaf):
        return [value]  # frames of one video
    return [item for item in value if item is not None]


def _is_video(leaf: Any) -> bool:
    """Whether an element of a list is a whole video rather than a frame."""
    if isinstance(leaf, Mapping):
        leaf = leaf.get("path") or leaf.get("url") or leaf.get("bytes")
    if isinstance(leaf, str | Path):
        return not (str(leaf).lower().endswith(_PICTURES) or str(leaf).startswith("data:image/"))
    return isinstance(leaf, bytes) and not leaf.startswith((b"\x89PNG", b"\xff\xd8", b"BM"))


def _require_keys(kind: str, block: Mapping[str, Any], *names: str) -> None:
    """Raises a `MediaError` if a media item has other keys, which would be ignored, such as `max_pixels`."""
    other = sorted(block.keys() - {"type", "text", "detail", *names})
    if other:
        raise MediaError(f"{other[0]} of {kind}: not supported for a single item. Remove it.")


def _blocks(content: Any, places: Mapping[str, str], found: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Returns a message's content as blocks without data. Appends its media to `found` (`_PLACE` for column media)."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks: list[dict[str, Any]] = []
    for given in content:
        block = {key: value for key, value in given.items() if value is not None}
        kind = next((kind for kind in KINDS if kind in block["type"]), None)
        if kind is not None:
            names = (kind, f"{kind}_url", f"input_{kind}", *ADDRESSES)
            number = block.get("index")
            if number not in (None, sum(other == kind and v is _PLACE for other, v in found)):
                raise MediaError(f"index={number!r} of {kind}: must follow the column's order. Reorder the blocks.")
            _require_keys(kind, block, "index", *names)
            found.append((kind, next((block[name] for name in names if name in block), _PLACE)))
            blocks.append({"type": kind})
            continue
        text = str(block.get("text", ""))
        for part in re.split(f"({'|'.join(map(re.escape, places))})", text) if places else [text]:
            if part in places:
                found.append((places[part], _PLACE))
                blocks.append({"type": places[part]})
            elif part:
                blocks.append({"type": "text", "text": part})
    return blocks

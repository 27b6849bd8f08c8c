"""Loading, decoding, and resizing of images, videos, and audio."""

from __future__ import annotations

import base64
import binascii
import io
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

import numpy as np

from lightrl.data.files import one_line
from lightrl.data.rows import KINDS, MediaError, MediaSource
from lightrl.records import Media

ADDRESSES = ("url", "path", "bytes", "data", "base64")
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
OPTIONS: dict[str, tuple[str, ...]] = {
    "image": _SIZES,
    "video": (*_SIZES, "total_pixels", "fps", "nframes", "min_frames", "max_frames", "video_start", "video_end"),
    "audio": (),
}
"""Supported options of a media item by kind, with the names and meanings of qwen-vl-utils."""


class Grid(NamedTuple):
    """Patch sizes of a model. Sides of images and frames in pixels, and frame counts, are multiples of them."""

    image: int = 1
    video: int = 1
    frames: int = 1


@dataclass
class Optioned:
    """A media item with its options."""

    value: Any
    options: dict[str, float]


def options_of(kind: str, given: Mapping[str, Any]) -> dict[str, float]:
    """Returns the validated options of a media item.

    Args:
        kind: Kind of the item.
        given: Keys of its block, without the type and the item itself.

    Raises:
        MediaError: If an option is not in `OPTIONS`, or options are incompatible.
    """
    options = {name: value for name, value in given.items() if value is not None}
    options.pop("detail", None) if options.get("detail") == "auto" else None
    for name, value in options.items():
        if name not in OPTIONS[kind]:
            known = f" Supported: {', '.join(OPTIONS[kind])}." if OPTIONS[kind] else ""
            raise MediaError(f"{name}={value!r} of {_a(kind)}: not supported. Remove it.{known}")
        least = name in ("video_start", "video_end")
        if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 or (least and value == 0)):
            raise MediaError(f"{name}={value!r} of {_a(kind)}: must be a number above 0. Fix it.")
    for one, other in (("fps", "nframes"), ("resized_height", "max_pixels"), ("resized_height", "min_pixels")):
        if one in options and other in options:
            raise MediaError(f"{one} and {other} of {_a(kind)}: mutually exclusive. Remove one.")
    if ("resized_height" in options) != ("resized_width" in options):
        raise MediaError(f"resized_height or resized_width of {_a(kind)}: each requires the other. Set both.")
    for low, high in (("min_pixels", "max_pixels"), ("min_frames", "max_frames"), ("video_start", "video_end")):
        if low in options and high in options and options[low] > options[high]:
            raise MediaError(
                f"{low}={options[low]:g} of {_a(kind)}: must be at most {high}={options[high]:g}. Lower it."
            )
    return options


def _a(kind: str) -> str:
    return f"a {kind}" if kind == "video" else f"an {kind}"


def _split(kind: str, value: Any) -> tuple[Any, dict[str, float]]:
    """Separates a media item from its options, which may be in the item's dictionary."""
    value, options = (value.value, value.options) if isinstance(value, Optioned) else (value, {})
    if isinstance(value, Mapping):
        medium = ("type", kind, "array", "sampling_rate", *ADDRESSES)
        options = options_of(kind, {**{k: v for k, v in value.items() if k not in medium}, **options})
        value = value[kind] if value.get(kind) is not None else {k: v for k, v in value.items() if k in medium}
    return value, options


def decode(found: Sequence[tuple[str, Any]], source: MediaSource, grid: Grid = Grid()) -> Media:  # noqa: B008
    """Decodes media.

    Args:
        found: (kind, value) of each item in prompt order. A value is a PIL image, an array, a path, a `file://` URL,
            bytes, base64 (also as a data URL), or a value of a `datasets` feature. A video can also be a list of
            frames. Options of an item override the source's limits.
        source: Limits, and the root of relative paths.
        grid: Grid of the model.

    Raises:
        MediaError: If an item can't be read. The message names the item and the reason.
    """
    media, root = Media(), source.media_root()
    for kind, value in found:
        number = 1 + len({"image": media.images, "video": media.videos, "audio": media.audios}[kind])
        try:
            value, options = _split(kind, value)
            if kind == "image":
                media.images.append(_sized(_image(value, root), options, source.max_pixels, grid.image))
            elif kind == "video":
                frames, times = _video(value, root, source, options, grid)
                media.videos.append(frames)
                media.video_times.append(times)
            else:
                samples, rate = _audio(value, root)
                media.audios.append(samples)
                media.sampling_rates.append(rate)
        except MediaError as error:
            raise MediaError(f"{kind} {number}: {error}") from error
        except Exception as error:  # PIL, OpenCV, and NumPy raise many error types for broken files
            raise MediaError(f"{kind} {number} can't be read: {one_line(error)}.") from error
    return media


def require_present(found: Sequence[tuple[str, Any]], source: MediaSource) -> None:
    """Raises a `MediaError` if a media file doesn't exist. Decodes nothing."""
    root = source.media_root()
    numbers = dict.fromkeys(KINDS, 0)
    for kind, value in found:
        numbers[kind] += 1
        try:
            value, _ = _split(kind, value)
        except MediaError as error:
            raise MediaError(f"{kind} {numbers[kind]}: {error}") from error
        frames = value if kind == "video" and isinstance(value, list | tuple) else [value]
        for item in frames:
            try:
                if not (isinstance(item, Mapping) and item.get("array") is not None):
                    _content(item, root)
            except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: unknown ~user
                raise MediaError(f"{kind} {numbers[kind]}: {error}") from error


# ---- bytes -------------------------------------------------------------------------------------------------------


def _content(value: Any, root: Path) -> bytes | Path | None:
    """Returns the bytes or the file of a value, or None if it contains pixels."""
    if isinstance(value, Mapping):  # from datasets, undecoded, or a content block's address
        inner = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
        if inner is None:
            raise MediaError(f"a dictionary with {sorted(value)} lacks a file. Set bytes, path, or url.")
        return _content(inner, root)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Path):
        return _existing(root / value.expanduser())
    return _of_text(value, root) if isinstance(value, str) else None


def _of_text(text: str, root: Path) -> bytes | Path:
    if text.startswith("data:"):
        return _base64(text.partition(",")[2])
    if text.startswith("file://"):
        return _existing(Path(unquote(urlparse(text).path)))
    if text.startswith(("http://", "https://")):
        raise MediaError(f"{text[:80]!r}: downloads during training are not supported. Save the file and use its path.")
    path = root / Path(text).expanduser() if len(text) < 4096 and "\0" not in text else None
    try:
        if path is not None and path.is_file():
            return path
    except OSError:  # the name is too long, so it is base64
        pass
    try:
        return _base64(text)
    except MediaError:
        return _existing(root / text[:200])


def _base64(text: str) -> bytes:
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{text[:40]!r} is not valid base64.") from error
    if len(data) < 16:
        raise MediaError(f"{text[:40]!r} is too short for a base64 image.")
    return data


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
    else:
        content = _content(value, root)
        if content is None:
            return Image.fromarray(_pixels(value))
        from lightrl.rewards.encoding import open_image

        image = open_image(io.BytesIO(content) if isinstance(content, bytes) else content)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    image.load()
    return image if image.mode == "RGB" and image is not value else image.convert("RGB")


def _pixels(value: Any) -> np.ndarray[Any, Any]:
    """Converts an array or nested lists of integers in [0, 255] or floats in [0, 1] to (H, W, 3) uint8."""
    array = np.asarray(value)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)  # channels first
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape or array.dtype.kind not in "uifb":
        raise MediaError(
            f"{type(value).__name__} of shape {array.shape} is not an image. Use a PIL image, a path, bytes, base64, "
            "or an array of shape (height, width), (height, width, 3), or (3, height, width)."
        )
    if array.dtype.kind == "f":
        if not 0 <= array.min() <= array.max() <= 1:
            raise MediaError(f"floats from {array.min():g} to {array.max():g}: out of range. Use [0, 1], or integers.")
        array = (array * 255).round()
    elif array.dtype.kind == "b":
        array = array * np.uint8(255)
    elif not 0 <= array.min() <= array.max() <= 255:
        raise MediaError(f"integers from {array.min()} to {array.max()}: out of range. Use [0, 255].")
    array = array.astype(np.uint8)
    if array.shape[2] == 4:
        alpha = array[..., 3:] / 255.0
        array = (array[..., :3] * alpha + 255 * (1 - alpha)).round().astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


def _capped(image: Any, max_pixels: int | None) -> Any:
    """Scales an image down to at most `max_pixels`."""
    width, height = image.size
    if max_pixels is None or width * height <= max_pixels:
        return image
    scale = (max_pixels / (width * height)) ** 0.5
    width, height = max(1, int(width * scale)), max(1, int(height * scale))
    bound = max(1, int(max_pixels))  # limits the length of a strip one pixel wide
    return image.resize((min(width, max(1, bound // height)), min(height, max(1, bound // width))))


def _sized(image: Any, options: Mapping[str, float], max_pixels: float | None, factor: int) -> Any:
    """Resizes an image according to its options, or to at most `max_pixels`."""
    if not any(name in options for name in _SIZES):
        return _capped(image, None if max_pixels is None else int(max_pixels))
    width, height = image.size
    height, width = options.get("resized_height", height), options.get("resized_width", width)
    most = options.get("max_pixels", 16384 * factor**2)
    height, width = _smart_size(height, width, factor, options.get("min_pixels", min(4 * factor**2, most)), most)
    return image if (width, height) == image.size else image.resize((width, height))


def _smart_size(height: float, width: float, factor: int, least: float, most: float) -> tuple[int, int]:
    """Returns sides that are multiples of `factor`, with about the same aspect ratio and an area in [least, most].

    Source: https://github.com/QwenLM/Qwen3-VL/tree/main/qwen-vl-utils (`smart_resize`).
    """
    rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
    if rows * columns > most:
        scale = (height * width / most) ** 0.5
        rows, columns = (max(factor, int(side / scale / factor) * factor) for side in (height, width))
    elif rows * columns < least:
        scale = (least / (height * width)) ** 0.5
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return rows, columns


# ---- videos ------------------------------------------------------------------------------------------------------


def _video(
    value: Any, root: Path, source: MediaSource, options: Mapping[str, float], grid: Grid
) -> tuple[np.ndarray[Any, Any], list[float]]:
    """Returns (F, H, W, 3) uint8 frames and the time of each frame in seconds."""
    content = _content(value, root)
    if content is None:
        if len(value) == 0:
            raise MediaError("the video has no frames. Remove it.")
        rate = options.get("fps", source.frame_rate)  # rate of the given frames
        if _picks_frames(options):
            picked = _picked(len(value), rate, source, {"fps": rate, **options}, grid)
        else:
            picked = _spread(len(value), len(value), source.max_frames)
        frames, times = [_image(value[i], root) for i in picked], [i / rate for i in picked]
    else:
        frames, times = _video_file(content, source, options, grid)
    most: float | None = source.max_pixels
    if any(name in options for name in (*_SIZES, "total_pixels")) and "resized_height" not in options:
        least = options.get("min_pixels", 128 * grid.video**2)
        share = options.get("total_pixels", 115200 * grid.video**2) / len(frames) * 2  # two frames per temporal patch
        bound = max(min(768 * grid.video**2, share), int(1.05 * least))
        most = min(options.get("max_pixels", bound), bound)
        options = {**options, "max_pixels": most, "min_pixels": min(least, most)}
    frames = [_sized(frame, options, most, grid.video) for frame in frames]
    if len({frame.size for frame in frames}) > 1:
        raise MediaError(f"frames have different sizes {sorted({frame.size for frame in frames})}. Resize them.")
    return np.stack([np.asarray(frame) for frame in frames]), times


def _spread(total: int, wanted: int, limit: int) -> list[int]:
    """Returns evenly spaced frame indices, including the first and the last."""
    return [int(i) for i in np.linspace(0, total - 1, max(1, min(wanted, limit))).round()]


def _picks_frames(options: Mapping[str, float]) -> bool:
    return any(name in options for name in OPTIONS["video"] if name not in (*_SIZES, "total_pixels"))


def _picked(total: int, rate: float, source: MediaSource, options: Mapping[str, float], grid: Grid) -> list[int]:
    """Returns the indices of the frames to use of a video.

    Args:
        total: Number of frames.
        rate: Frames per second.
        source: Default settings.
        options: Options of the video.
        grid: Grid of the model.

    Source: https://github.com/QwenLM/Qwen3-VL/tree/main/qwen-vl-utils (`smart_nframes`).
    """
    if not _picks_frames(options):
        return _spread(total, round(total / rate * source.frame_rate), source.max_frames)
    first = math.ceil(options.get("video_start", 0) * rate)
    last = min(math.floor(options.get("video_end", total / rate) * rate), total - 1)
    count, step = last - first + 1, grid.frames
    if count < 1:
        raise MediaError(
            f"video_start={options.get('video_start', 0):g}: the video ends at {total / rate:g} s. Lower it."
        )
    if "nframes" in options:
        wanted = round(options["nframes"] / step) * step
        if not step <= wanted <= count:
            raise MediaError(f"nframes={options['nframes']:g}: the video has {count} frames. Use {step} to {count}.")
    else:
        least = math.ceil(options.get("min_frames", 4) / step) * step
        most = max(step, int(options.get("max_frames", source.max_frames) / step) * step)
        wanted = int(min(max(count / rate * options.get("fps", source.frame_rate), least), most, count))
        wanted = max(1, wanted // step * step)
    return [int(i) for i in np.linspace(first, last, wanted).round()]


def _video_file(
    content: bytes | Path, source: MediaSource, options: Mapping[str, float], grid: Grid
) -> tuple[list[Any], list[float]]:
    from PIL import UnidentifiedImageError

    from lightrl.rewards.encoding import open_image

    try:
        moving = open_image(io.BytesIO(content) if isinstance(content, bytes) else content)
    except UnidentifiedImageError:
        return _with_opencv(content, source, options, grid)
    frames, starts, clock = [], [], 0.0
    for number in range(getattr(moving, "n_frames", 1)):  # GIF, WebP, APNG
        moving.seek(number)
        frames.append(moving.convert("RGB"))
        starts.append(clock)
        clock += moving.info.get("duration", 1000 / source.frame_rate) / 1000
    rate = len(frames) / clock if clock else source.frame_rate
    picked = _picked(len(frames), rate, source, options, grid)
    return [frames[i] for i in picked], [starts[i] for i in picked]


def _with_opencv(
    content: bytes | Path, source: MediaSource, options: Mapping[str, float], grid: Grid
) -> tuple[list[Any], list[float]]:
    try:
        import cv2
    except ImportError as error:
        raise MediaError(
            "video files require OpenCV. Run pip install opencv-python-headless, or use frames."
        ) from error
    from PIL import Image

    with tempfile.NamedTemporaryFile(suffix=".video") as file:
        if isinstance(content, bytes):
            file.write(content)
            file.flush()
        reader = cv2.VideoCapture(file.name if isinstance(content, bytes) else str(content))
        total, rate = int(reader.get(cv2.CAP_PROP_FRAME_COUNT)), reader.get(cv2.CAP_PROP_FPS) or source.frame_rate
        if total < 1:
            raise MediaError(f"{content if isinstance(content, Path) else 'bytes'}: OpenCV can't read the video.")
        picked = _picked(total, rate, source, options, grid)
        frames: dict[int, Any] = {}
        for number in range(picked[-1] + 1):
            good = reader.grab()
            if good and number in picked:
                good, pixels = reader.retrieve()
                frames[number] = Image.fromarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)) if good else None
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
    with np.errstate(over="ignore"):  # checked below
        samples = np.asarray(value, dtype=np.float32)
    if samples.ndim == 2:
        samples = samples.mean(int(samples.shape[0] > samples.shape[1]))
    if samples.ndim != 1 or not samples.size:
        raise MediaError(f"an array of shape {samples.shape} is not audio. Use (samples,) floats.")
    if not np.isfinite(samples).all():
        raise MediaError("samples are not finite in float32. Use floats in [-1, 1].")
    if rate < 0:
        raise MediaError(f"sampling_rate={rate}: must not be negative. Set it in Hz, or remove it.")
    return samples, rate


def _wave(content: bytes | Path) -> tuple[np.ndarray[Any, Any], int]:
    import wave

    try:
        with wave.open(io.BytesIO(content) if isinstance(content, bytes) else str(content)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except wave.Error as error:
        raise MediaError(f"{error}: unsupported audio file. Use WAV files or arrays.") from error
    if width not in (2, 4):
        raise MediaError(f"a WAV file with {8 * width} bits per sample is not supported. Use 16 or 32 bits.")
    samples = np.frombuffer(data, dtype="<i2" if width == 2 else "<i4").reshape(-1, channels)
    return samples.astype(np.float32).mean(1) / np.float32(1 << (8 * width - 1)), rate

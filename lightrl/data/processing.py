"""From a row to a model's inputs: placeholders for media located, text rendered, the model's processor run once.

Text rows take the tokenizer's way, bit for bit; the processor is loaded with the first row that shows something.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from lightrl.data.media import (
    ADDRESSES,
    COLUMNS,
    KINDS,
    Grid,
    MediaError,
    MediaSource,
    Optioned,
    decode,
    options_of,
)
from lightrl.data.templates import (
    ChatTemplate,
    as_messages,
    as_tools,
    conversation,
    encode,
    render_prompt,
)
from lightrl.models.turns import TOKEN_INPUT, begins_with_bos, placeholder_ids
from lightrl.records import ImageInputs, Media

VARIABLES = ("template_kwargs", "chat_template_kwargs")
"""Columns of a row's own variables of the chat template; the later one wins."""

_PLACE = object()
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")


@dataclass
class Encoded:
    """A prompt as `Prompts` holds it: text, tokens with all placeholders, model inputs, media.

    `cuttable` tokens may be cut off the front: those before the first placeholder and what introduces it.
    """

    text: str
    token_ids: list[int]
    inputs: dict[str, Any] = field(default_factory=dict)
    media: Media = field(default_factory=Media)
    cuttable: int = 0


def load_processor(path: str, tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> MediaProcessor | None:
    """The processor of a model that takes images, videos or sound; None for others.

    Args:
        path: folder or hub name of the model.
        tokenizer: the run's; the processor's own is not used.
        **kwargs: further arguments of `AutoProcessor.from_pretrained`.
    """
    local = Path(path).expanduser()
    try:
        config = AutoConfig.from_pretrained(str(local) if local.is_dir() else path, **kwargs)
    except (OSError, ValueError):  # a folder that holds a tokenizer alone
        return None
    placeholders = placeholder_ids(config)
    return (
        MediaProcessor(str(local) if local.is_dir() else path, tokenizer, placeholders, kwargs)
        if placeholders
        else None
    )


class MediaProcessor:
    """A Hugging Face processor, run on one prompt at a time, and the checks on what it gives.

    Args:
        path: of the processor.
        tokenizer: the run's.
        placeholders: kind of media that the model takes -> id of the token that stands for a feature.
        kwargs: further arguments of `AutoProcessor.from_pretrained`.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        placeholders: Mapping[str, int],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.placeholders = placeholders
        self._kwargs = dict(kwargs)
        self._loaded: Any = None
        self._blocks: bool | None = None

    @property
    def processor(self) -> Any:
        """The processor itself, loaded when it is first needed."""
        if self._loaded is None:
            from transformers import AutoProcessor

            try:
                self._loaded = AutoProcessor.from_pretrained(self.path, **self._kwargs)
            except ImportError as error:
                raise ValueError(
                    f"The processor of {self.path!r} cannot be loaded, and prompts with media need it: "
                    f"{str(error).strip().splitlines()[0]} Install what it names (pip install torchvision, a build "
                    "that fits torch)."
                ) from error
            if not hasattr(self._loaded, "tokenizer"):
                raise ValueError(f"{self.path!r} holds no processor (preprocessor_config.json), so it takes text only.")
            self._loaded.tokenizer = self.tokenizer
        return self._loaded

    def token(self, kind: str) -> str | None:
        """What stands for one medium in a prompt's text."""
        return getattr(self.processor, f"{kind}_token", None)

    @property
    def grid(self) -> Grid:
        """What the model cuts media into."""
        images, videos = (getattr(self.processor, f"{kind}_processor", None) for kind in ("image", "video"))
        sides = [getattr(p, "patch_size", None) for p in (images, videos)]
        cells = [
            side * (getattr(p, "merge_size", None) or 1) if isinstance(side, int) else 1
            for side, p in zip(sides, (images, videos), strict=True)
        ]
        return Grid(cells[0], cells[1], getattr(videos, "temporal_patch_size", None) or 1)

    @property
    def wants_blocks(self) -> bool:
        """Whether the chat template leaves out contents that are strings instead of lists of blocks."""
        if self._blocks is None:
            text, _ = render_prompt(self.tokenizer, [{"role": "user", "content": "x7q"}], chat_template=True)
            self._blocks = "x7q" not in text
        return self._blocks

    def __call__(self, text: str, media: Media, *, templated: bool) -> Encoded:
        """Runs the processor and checks that placeholders and features agree, by its own numbers.

        Args:
            text: the rendered prompt, one placeholder per medium.
            media: decoded. Its `token_ids` are set.
            templated: see `encode`.

        Raises:
            MediaError: another number of placeholders than media, or of tokens than features.
        """
        media.token_ids = encode(self.tokenizer, text, templated=templated)
        for kind, items in (("image", media.images), ("video", media.videos), ("audio", media.audios)):
            self._check_places(kind, media.token_ids, len(items))
        arguments: dict[str, Any] = {}
        if media.images:
            arguments["images"] = [list(media.images)]
        if media.videos:
            from lightrl.models.multimodal import video_timing

            timings = [video_timing(times) for times in media.video_times]
            arguments["do_sample_frames"] = any(timing.pop("do_sample_frames") for timing in timings)
            arguments["videos"], arguments["video_metadata"] = list(media.videos), timings
        if media.audios:
            arguments["audio"], arguments["sampling_rate"] = list(media.audios), self._sampling_rate(media)
        out = self._run(text, arguments, templated=templated)
        token_ids = out["input_ids"][0].tolist()
        self._check_features(token_ids, out.get("text_replacement_offsets"))
        inputs = self._inputs(out)
        special = self._special_ids()
        first = next((i for i, token in enumerate(token_ids) if token in special), len(token_ids))
        differ = (i for i, (a, b) in enumerate(zip(token_ids, media.token_ids, strict=False)) if a != b)
        return Encoded(text, token_ids, inputs, media, max(0, min(first, next(differ, first)) - 1))

    def images(self, values: Sequence[Any]) -> ImageInputs:
        """Images without a prompt: decoded, their model inputs, and the placeholders that stand for each.

        Args:
            values: n images, as content blocks hold them, or whole blocks with the options next to an image.

        Raises:
            MediaError: the model takes no images, or one cannot be read.
        """
        token = self.token("image")
        if token is None:
            raise MediaError(f"{type(self.processor).__name__} takes no images.")
        media = decode([("image", value) for value in values], MediaSource(rows=[{}]), self.grid)
        out = self._run(token * len(values), {"images": [media.images]}, templated=True)
        offsets = out.get("text_replacement_offsets")
        if not offsets or len(offsets[0]) != len(values):
            raise MediaError(f"{type(self.processor).__name__} does not say what stands for each image.")
        token_ids = out["input_ids"][0].tolist()
        inputs = self._inputs(out)
        names = [name for name in inputs if name.endswith(TOKEN_INPUT)]
        token_inputs = {name: dict(zip(token_ids, inputs.pop(name)[0].tolist(), strict=True)) for name in names}
        return ImageInputs(media.images, token, [part["replacement"] for part in offsets[0]], inputs, token_inputs)

    def _run(self, text: str, arguments: Mapping[str, Any], *, templated: bool) -> Any:
        """Runs the processor on a text and its media."""
        try:
            return self.processor(
                text=[text],
                add_special_tokens=not (templated or begins_with_bos(self.tokenizer, text)),
                return_tensors="pt",
                return_text_replacement_offsets=True,
                **arguments,
            )
        except (ValueError, StopIteration, IndexError, TypeError) as error:
            raise MediaError(f"{type(self.processor).__name__} refused it: {error}") from error

    @staticmethod
    def _inputs(out: Any) -> dict[str, torch.Tensor]:
        """The extra model inputs in it."""
        skipped = ("input_ids", "attention_mask", "labels")
        return {name: x for name, x in out.items() if isinstance(x, torch.Tensor) and name not in skipped}

    def _special_ids(self) -> set[int]:
        """Tokens that stand for a medium or for one of its features."""
        own = {i for kind in KINDS for i in getattr(self.processor, f"{kind}_token_ids", None) or ()}
        return own | set(self.placeholders.values())

    def _check_places(self, kind: str, token_ids: list[int], count: int) -> None:
        token = self.token(kind)
        if token is None:
            if count:
                raise MediaError(f"{count} {kind}s, which {type(self.processor).__name__} does not take.")
            return
        places = token_ids.count(self.tokenizer.convert_tokens_to_ids(token))
        if places != count:
            raise MediaError(f"the prompt has {places} placeholder(s) {token!r} for {count} {kind}(s).")

    def _check_features(self, token_ids: list[int], offsets: Any) -> None:
        """Compares the placeholder runs among the tokens with those that the processor says its features need."""
        if not offsets:
            return
        special = self._special_ids()
        own = [i for i in token_ids if i in special]
        parts = (self.tokenizer(part["replacement"], add_special_tokens=False)["input_ids"] for part in offsets[0])
        wanted = [i for part in parts for i in part if i in special]
        if own != wanted:
            raise MediaError(f"{len(own)} placeholder tokens for {len(wanted)} features.")

    def _sampling_rate(self, media: Media) -> int:
        extractor = getattr(self.processor, "feature_extractor", None) or getattr(
            self.processor, "audio_processor", None
        )
        wanted = int(getattr(extractor, "sampling_rate", 0))
        for number, rate in enumerate(media.sampling_rates, 1):
            if rate not in (0, wanted):
                raise MediaError(
                    f"audio {number} has {rate} samples per second, the model takes {wanted}: resample it."
                )
        return wanted


@dataclass
class ConversationSource(MediaSource):
    """Rows whose prompts are strings or conversations. The arguments of `RowSource` and `MediaSource`, and:

    Args:
        system_prompt: put in front of every conversation as the system's turn; needs a chat template.
        chat_template: Whether a string becomes the user's turn of the tokenizer's chat template: true, false, or
            "auto" for true if the tokenizer has one. False leaves strings as they are, for prompts that are rendered
            already and for base models. With true or "auto", a string that holds what the template writes around turns
            is an error. Conversations always use the template.
        template_kwargs: Further variables of the chat template, such as `enable_thinking`. A row's own are in its
            column `chat_template_kwargs` or `template_kwargs`, as a dictionary or JSON text, and override these.
        tools_column: Column of a row's tools: JSON schemas of functions as a list or JSON text, which the chat template
            shows. Ignored if the rows have no such column. Null shows none.
    """

    system_prompt: str | None = None
    chat_template: ChatTemplate = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools_column: str | None = "tools"

    @property
    def rendering_columns(self) -> list[str]:
        """Columns that may say how a row is rendered; only a `tools_column` with another name must be there."""
        return [*VARIABLES, *([] if self.tools_column is None else [self.tools_column])]

    def rendering(self, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """A row's tools, and its variables of the chat template.

        Raises:
            ValueError: the columns hold something else.
        """
        return as_tools(None if self.tools_column is None else row.get(self.tools_column)), row_variables(
            row, self.template_kwargs
        )

    def render(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Any, system_prompt: str | None, row: Mapping[str, Any]
    ) -> tuple[str, bool]:
        """The text of a row's prompt and system prompt from `arranged`; see `render_prompt`."""
        tools, variables = self.rendering(row)
        return render_prompt(
            tokenizer,
            prompt,
            system_prompt=system_prompt,
            chat_template=self.chat_template,
            template_kwargs=variables,
            tools=tools,
        )


def row_variables(row: Mapping[str, Any], template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template for a row: `template_kwargs`, and over them what the row's own columns hold.

    Raises:
        ValueError: the columns hold something else than a dictionary or JSON text of one.
    """
    variables = dict(template_kwargs)
    for name in VARIABLES:
        own = row.get(name)
        if isinstance(own, str) and own.strip():
            with contextlib.suppress(ValueError):
                own = json.loads(own)
        if own and not isinstance(own, Mapping):
            raise ValueError(f"{name}={str(own)[:80]!r}: must be a dictionary, or JSON text of one.")
        variables.update(own or {})
    return variables


def encode_prompt(
    prompt: Any,
    row: Mapping[str, Any],
    source: ConversationSource,
    tokenizer: PreTrainedTokenizerBase,
    processor: MediaProcessor | None,
) -> tuple[Encoded, bool]:
    """A row's prompt as text, tokens, model inputs and media; and whether a chat template made the text.

    Args:
        prompt: a string or a conversation.
        row: the row, for its media columns, tools, and variables of the chat template.
        source: how it is rendered, limits and media columns.
        tokenizer: renders and tokenises.
        processor: None for models that take text only.

    Raises:
        MediaError: media that cannot be read or do not fit their places.
        ValueError: see `render_prompt`.
    """
    prompt, system_prompt, found = arranged(prompt, row, source, tokenizer, processor)
    text, templated = source.render(tokenizer, prompt, system_prompt, row)
    if found and processor is not None:
        return processor(text, decode(found, source, processor.grid), templated=templated), templated
    token_ids = encode(tokenizer, text, templated=templated)
    for kind, placeholder in processor.placeholders.items() if processor is not None else ():
        if placeholder in token_ids:
            name = tokenizer.convert_ids_to_tokens(placeholder)
            raise MediaError(f"the prompt has a placeholder {name!r} and no {kind} to show there.")
    return Encoded(text, token_ids, cuttable=len(token_ids)), templated


def arranged(
    prompt: Any,
    row: Mapping[str, Any],
    source: ConversationSource,
    tokenizer: PreTrainedTokenizerBase,
    processor: MediaProcessor | None,
) -> tuple[Any, str | None, list[tuple[str, Any]]]:
    """The prompt and the system prompt as `render_prompt` takes them, and (kind, value) of the media they show.

    The arguments and errors are those of `encode_prompt`.
    """
    require_read(row, source, processor)
    columns: Mapping[str, str] = {}
    system_prompt = source.system_prompt
    if source.media_columns is not None:
        columns = source.media_columns
    elif processor is not None:
        columns = {name: kind for name, kind in COLUMNS.items() if kind in processor.placeholders}
    found: list[tuple[str, Any]] = []
    template = bool(getattr(tokenizer, "chat_template", None)) and source.chat_template is not False
    plain = isinstance(prompt, str) and not template and source.chat_template is not True
    if columns or not isinstance(prompt, str):
        marks = {}
        if plain and processor is not None and any(row.get(name) is not None for name in columns):
            marks = {token: kind for kind in columns.values() if (token := processor.token(kind))}
        prompt, found = shown(prompt, row, columns, marks)
    if processor is None:
        if found:
            raise MediaError(f"the prompt shows {len(found)} media, and the model takes text only.")
        prompt = _as_strings(prompt)
    if plain and processor is not None and found:
        prompt = "".join(str(block.get("text") or processor.token(block["type"])) for block in prompt[0]["content"])
    elif processor is not None and not plain:
        if processor.wants_blocks or found:
            prompt, system_prompt = _as_blocks(prompt, system_prompt), None
        else:
            prompt = _as_strings(prompt)
    return prompt, system_prompt, found


def require_read(row: Mapping[str, Any], source: MediaSource, processor: MediaProcessor | None) -> None:
    """Raises a `ValueError` about a column with media of a kind that the model does not take."""
    if source.media_columns is not None:
        return
    taken = {} if processor is None else processor.placeholders
    for name, kind in columns_with_media(row).items():
        if kind not in taken:
            used = {column: own for column, own in COLUMNS.items() if own in taken and column in row}
            raise ValueError(
                f"column {name!r} holds media of the kind {kind!r}, which the model does not take. Train a model that "
                f"takes it, or set media_columns: {used} to leave the column out of the prompt."
            )


def columns_with_media(row: Mapping[str, Any]) -> dict[str, str]:
    """Column -> kind of the columns named after media that hold some in this row."""
    return {name: kind for name, kind in COLUMNS.items() if _several(kind, row.get(name))}


def _as_blocks(prompt: Any, system_prompt: str | None) -> list[dict[str, Any]]:
    """A conversation whose contents are lists of blocks."""
    messages = conversation(prompt, system_prompt)
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages


def _as_strings(prompt: Any) -> Any:
    """A conversation whose contents are strings; its blocks hold text alone."""
    if isinstance(prompt, str):
        return prompt
    messages = as_messages(prompt)
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = "".join(block["text"] for block in message["content"])
    return messages


# ---- where in a prompt its media stand ---------------------------------------------------------------------------


def shown(
    prompt: Any, row: Mapping[str, Any], columns: Mapping[str, str], marks: Mapping[str, str] | None = None
) -> tuple[Any, list[tuple[str, Any]]]:
    """A prompt with a place for each medium, and the media in the order of the places.

    Media stand in content blocks (`{"type": "image", "image": ...}`) or in columns. Those of columns go, in order, to
    content blocks without one (`{"type": "image"}`) and to the marks `<image>`, `<video>` and `<audio>` in texts. Where
    the prompt has neither they go before the first user message's text, images first.

    Args:
        prompt: a string or a conversation.
        row: the row, for its media columns.
        columns: column -> kind.
        marks: Further marks in texts -> kind, such as the model's placeholders in a string that is rendered already.

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
    places = {**{f"<{kind}>": kind for kind in KINDS if kind in waiting}, **(marks or {})}
    found: list[tuple[str, Any]] = []
    options: list[dict[str, float]] = []
    messages = conversation(prompt)
    for message in messages:
        message["content"] = _blocks(message["content"], places, found, options)
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
    found = [(kind, Optioned(v, own) if own else v) for (kind, v), own in zip(found, options, strict=True)]
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


def _blocks(
    content: Any, places: Mapping[str, str], found: list[tuple[str, Any]], options: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """A message's content as blocks without data.

    Appends its media (`_PLACE` for a column's) to `found`, and what stands next to each to `options`.

    Args:
        content: a string or blocks.
        places: mark in texts -> kind of the medium that a column has for it.
        found: (kind, value) of the media so far.
        options: of the media so far.
    """
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks: list[dict[str, Any]] = []
    for given in content:
        block = {key: value for key, value in given.items() if value is not None}
        kind = next((kind for kind in KINDS if kind in str(block.get("type", ""))), None)
        if kind is not None:
            names = (kind, str(block.get("type")), f"{kind}_url", f"input_{kind}", *ADDRESSES)
            value = next((block[name] for name in names if name in block), _PLACE)
            number = block.pop("index", None)  # of the column's medium
            if number not in (None, sum(other == kind and v is _PLACE for other, v in found)):
                raise MediaError(f"index={number!r} next to a place for {kind}s: places must be in the column's order.")
            options.append(options_of(kind, {k: v for k, v in block.items() if k not in ("type", *names)}))
            found.append((kind, value))
            blocks.append({"type": kind})
            continue
        text = str(block.get("text", ""))
        for part in re.split(f"({'|'.join(map(re.escape, places))})", text) if places else [text]:
            if part in places:
                found.append((places[part], _PLACE))
                options.append({})
                blocks.append({"type": places[part]})
            elif part:
                blocks.append({"type": "text", "text": part})
    return blocks

"""From a row to a prompt: media located, text rendered and tokenized, the processor run once if there are media."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import AutoConfig, PreTrainedTokenizerBase

from lightrl.data.rows import COLUMNS, KINDS, Encoded, MediaError, MediaSource
from lightrl.data.templates import (
    ChatTemplate,
    as_messages,
    as_tools,
    conversation,
    encode,
    render_prompt,
)
from lightrl.models.turns import placeholder_ids

if TYPE_CHECKING:
    from lightrl.data.processor import MediaProcessor

VARIABLES = ("template_kwargs", "chat_template_kwargs")
"""Columns of a row's own variables of the chat template; the later one wins."""

_PLACE = object()
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")


def load_processor(path: str, tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> MediaProcessor | None:
    """The processor of a model that takes images, videos, or sound; None for others.

    Args:
        path: Model directory or hub name.
        tokenizer: The run's tokenizer, used instead of the processor's.
        **kwargs: Further arguments of `AutoProcessor.from_pretrained`.
    """
    local = Path(path).expanduser()
    try:
        config = AutoConfig.from_pretrained(str(local) if local.is_dir() else path, **kwargs)
    except (OSError, ValueError):  # a folder that holds a tokenizer alone
        return None
    placeholders = placeholder_ids(config)
    if not placeholders:
        return None
    from lightrl.data.processor import MediaProcessor

    return MediaProcessor(str(local) if local.is_dir() else path, tokenizer, placeholders, kwargs)


@dataclass
class ConversationSource(MediaSource):
    """Rows whose prompts are strings or conversations. The arguments of `RowSource` and `MediaSource`, and:

    Args:
        system_prompt: System turn in front of every conversation; needs a chat template.
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
    """A row's prompt as text, tokens, model inputs, and media; and whether a chat template made the text.

    Args:
        prompt: A string or a conversation.
        row: The row, for its media columns, tools, and variables of the chat template.
        source: Rendering settings and media columns.
        tokenizer: Renders and tokenizes.
        processor: None for text models.

    Raises:
        MediaError: Media that cannot be read or don't match their places.
        ValueError: See `render_prompt`.
    """
    prompt, system_prompt, found = arranged(prompt, row, source, tokenizer, processor)
    text, templated = source.render(tokenizer, prompt, system_prompt, row)
    if found and processor is not None:
        from lightrl.data.media import decode

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

    Media are in content blocks (`{"type": "image", "image": ...}`) or in columns. Those of columns go, in order, to
    content blocks without data (`{"type": "image"}`) and to the marks `<image>`, `<video>`, and `<audio>` in texts. If
    the prompt has neither, they go before the first user message's text, images first.

    Args:
        prompt: A string or a conversation.
        row: The row, for its media columns.
        columns: Column -> kind.
        marks: Further marks in texts -> kind, such as the model's placeholders in a rendered string.

    Returns:
        The string if it shows no media, else a conversation whose blocks hold no data; (kind, value) of each medium.

    Raises:
        MediaError: More media than places, or the reverse.
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
    if any(options):
        from lightrl.data.media import Optioned

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
            from lightrl.data.media import ADDRESSES, options_of

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

"""Encoding of prompts: locates media, renders and tokenizes text, and runs the media processor."""

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
"""Columns with per-example variables of the chat template. Later ones take precedence."""

_PLACE = object()
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")


def load_processor(path: str, tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> MediaProcessor | None:
    """Loads the processor of a model with images, videos, or audio. Returns None for text models.

    Args:
        path: Model directory or ID.
        tokenizer: Tokenizer to use instead of the processor's.
        **kwargs: Additional arguments of `AutoProcessor.from_pretrained`.
    """
    local = Path(path).expanduser()
    try:
        config = AutoConfig.from_pretrained(str(local) if local.is_dir() else path, **kwargs)
    except (OSError, ValueError):  # a directory with only a tokenizer
        return None
    placeholders = placeholder_ids(config)
    if not placeholders:
        return None
    from lightrl.data.processor import MediaProcessor

    return MediaProcessor(str(local) if local.is_dir() else path, tokenizer, placeholders, kwargs)


@dataclass
class ConversationSource(MediaSource):
    """Dataset whose prompts are strings or conversations. Accepts the arguments of `RowSource` and `MediaSource` and
    the following.

    Args:
        system_prompt: Content of a system turn before every conversation. Requires a chat template.
        chat_template: Whether to wrap strings as a user turn of the tokenizer's chat template. "auto" does so if the
            tokenizer has one. False uses strings unchanged, for base models and prompts that are already rendered.
            Otherwise, a string that contains text of the template is an error. Conversations always use the template.
        template_kwargs: Additional variables of the chat template, such as `enable_thinking`. The columns
            `chat_template_kwargs` and `template_kwargs` override them per example, as a dictionary or JSON text.
        tools_column: Column with tools for the chat template, as a list or JSON text of JSON schemas. A missing column
            named "tools" is ignored. None disables tools.
    """

    system_prompt: str | None = None
    chat_template: ChatTemplate = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools_column: str | None = "tools"

    @property
    def rendering_columns(self) -> list[str]:
        """Optional columns that affect rendering. Only a `tools_column` with a custom name must exist."""
        return [*VARIABLES, *([] if self.tools_column is None else [self.tools_column])]

    def rendering(self, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns an example's tools and chat template variables.

        Raises:
            ValueError: If a column is invalid.
        """
        return as_tools(None if self.tools_column is None else row.get(self.tools_column)), row_variables(
            row, self.template_kwargs
        )

    def render(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Any, system_prompt: str | None, row: Mapping[str, Any]
    ) -> tuple[str, bool]:
        """Renders an example's prompt and system prompt from `arranged`. See `render_prompt`."""
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
    """Returns the chat template variables of an example, whose columns override `template_kwargs`.

    Raises:
        ValueError: If a column contains anything but a dictionary or JSON text of one.
    """
    variables = dict(template_kwargs)
    for name in VARIABLES:
        own = row.get(name)
        if isinstance(own, str) and own.strip():
            with contextlib.suppress(ValueError):
                own = json.loads(own)
        if own and not isinstance(own, Mapping):
            raise ValueError(f"{name}={str(own)[:80]!r}: must be a dictionary or JSON text of one. Fix the column.")
        variables.update(own or {})
    return variables


def encode_prompt(
    prompt: Any,
    row: Mapping[str, Any],
    source: ConversationSource,
    tokenizer: PreTrainedTokenizerBase,
    processor: MediaProcessor | None,
) -> tuple[Encoded, bool]:
    """Encodes an example's prompt. Returns the result and whether the chat template was applied.

    Args:
        prompt: A string or a conversation.
        row: The example, for its media columns, tools, and chat template variables.
        source: Rendering settings and media columns.
        tokenizer: Tokenizer that renders and tokenizes.
        processor: Processor, or None for text models.

    Raises:
        MediaError: If media can't be read or don't match their placeholders.
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
            raise MediaError(f"the prompt has a placeholder {name!r}, but no {kind}. Add the {kind} or remove it.")
    return Encoded(text, token_ids, cuttable=len(token_ids)), templated


def arranged(
    prompt: Any,
    row: Mapping[str, Any],
    source: ConversationSource,
    tokenizer: PreTrainedTokenizerBase,
    processor: MediaProcessor | None,
) -> tuple[Any, str | None, list[tuple[str, Any]]]:
    """Returns the prompt and system prompt for `render_prompt`, and the (kind, value) of their media.

    See `encode_prompt` for the arguments and errors.
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
            raise MediaError(f"the prompt has {len(found)} media items, but the model is text-only. Remove them.")
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
    """Raises a `ValueError` if a column contains media of a kind that the model doesn't support."""
    if source.media_columns is not None:
        return
    taken = {} if processor is None else processor.placeholders
    for name, kind in columns_with_media(row).items():
        if kind not in taken:
            used = {column: own for column, own in COLUMNS.items() if own in taken and column in row}
            raise ValueError(
                f"column {name!r} contains media of kind {kind!r}, which the model does not support. Use a model that "
                f"supports it, or set media_columns: {used} to ignore the column."
            )


def columns_with_media(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the media kinds of the default media columns that are not empty in this example."""
    return {name: kind for name, kind in COLUMNS.items() if _several(kind, row.get(name))}


def _as_blocks(prompt: Any, system_prompt: str | None) -> list[dict[str, Any]]:
    """Converts a prompt to a conversation with lists of content blocks."""
    messages = conversation(prompt, system_prompt)
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages


def _as_strings(prompt: Any) -> Any:
    """Converts a text-only conversation to string contents."""
    if isinstance(prompt, str):
        return prompt
    messages = as_messages(prompt)
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = "".join(block["text"] for block in message["content"])
    return messages


# ---- positions of media in a prompt ------------------------------------------------------------------------------


def shown(
    prompt: Any, row: Mapping[str, Any], columns: Mapping[str, str], marks: Mapping[str, str] | None = None
) -> tuple[Any, list[tuple[str, Any]]]:
    """Inserts placeholders for all media into a prompt and returns the media in their order.

    Media are in content blocks (`{"type": "image", "image": ...}`) or columns. Column media are assigned in order to
    content blocks without data (`{"type": "image"}`) and the markers `<image>`, `<video>`, and `<audio>` in texts. If
    there are none, they are inserted before the first user message's text, images first.

    Args:
        prompt: A string or a conversation.
        row: The example, for its media columns.
        columns: Media kinds by column.
        marks: Media kinds by additional marker, such as the model's placeholders in a rendered string.

    Returns:
        The string if it has no media, otherwise a conversation with blocks without data; and (kind, value) of each
        media item.

    Raises:
        MediaError: If the numbers of media and placeholders differ.
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
            raise MediaError(
                f"the prompt has {asked[kind]} placeholder(s) for {offered.get(kind, 0)} {kind}(s). Make them equal."
            )
    queues = {kind: iter(values) for kind, values in waiting.items()}
    found = [(kind, next(queues[kind]) if value is _PLACE else value) for kind, value in found]
    if any(options):
        from lightrl.data.media import Optioned

        found = [(kind, Optioned(v, own) if own else v) for (kind, v), own in zip(found, options, strict=True)]
    return (messages, found) if found or not isinstance(prompt, str) else (prompt, [])


def _several(kind: str, value: Any) -> list[Any]:
    """Returns the media items of a cell as a list."""
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
    if isinstance(leaf, int | float | np.number):  # Arrow returns arrays as lists
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


def _blocks(
    content: Any, places: Mapping[str, str], found: list[tuple[str, Any]], options: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """Returns a message's content as blocks without data.

    Appends its media to `found` (`_PLACE` for column media) and their options to `options`.

    Args:
        content: A string or blocks.
        places: Media kinds by marker in texts, for column media.
        found: (kind, value) of the media so far.
        options: Options of the media so far.
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
            number = block.pop("index", None)  # of the item in the column
            if number not in (None, sum(other == kind and v is _PLACE for other, v in found)):
                raise MediaError(f"index={number!r} of {kind}: must follow the column's order. Reorder the blocks.")
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

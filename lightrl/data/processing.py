"""Rendering and tokenization of prompts, and opened prompt sources, which check and truncate examples."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from datasets import IterableDataset
from transformers import AutoConfig, PreTrainedTokenizerBase

from lightrl.data.rows import (
    COLUMNS,
    Encoded,
    MediaError,
    MediaSource,
    columns_of,
    entered,
    plain_rows,
    shuffled_order,
    with_progress,
)
from lightrl.data.templates import ChatTemplate, as_strings, as_tools, encode, render_prompt, require_unrendered
from lightrl.models.turns import TOKEN_INPUT, placeholder_ids

if TYPE_CHECKING:
    from lightrl.data.processor import MediaProcessor

SHUFFLE_BUFFER = 10_000
VARIABLES = ("template_kwargs", "chat_template_kwargs")
"""Columns with per-example variables of the chat template. Later ones take precedence."""


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
            Otherwise, a string that contains text of the template raises an error. Conversations always use the
            template.
        template_kwargs: Additional variables of the chat template, such as `enable_thinking`. The columns
            `chat_template_kwargs` and `template_kwargs` override them per example, as a dictionary or JSON text.
        tools_column: Column with tools for the chat template, as a list or JSON text of JSON schemas. A missing column
            named "tools" is ignored. None disables tools.
    """

    system_prompt: str | None = None
    chat_template: ChatTemplate = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools_column: str | None = "tools"

    def template_arguments(self, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
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
        tools, variables = self.template_arguments(row)
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
            own = json.loads(own)
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

        return processor(text, decode(found, source), templated=templated), templated
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
    require_supported(row, source, {} if processor is None else processor.placeholders)
    if isinstance(prompt, str) and tokenizer.chat_template and source.chat_template is not False:
        require_unrendered(tokenizer, prompt, source.chat_template)
    if processor is None:
        return as_strings(prompt), source.system_prompt, []
    from lightrl.data.media import placed

    return placed(prompt, row, source, tokenizer, processor)


def require_supported(row: Mapping[str, Any], source: MediaSource, supported: Container[str]) -> None:
    """Raises a `ValueError` if a column contains media of a kind that the model doesn't support."""
    for name, kind in (COLUMNS if source.media_columns is None else source.media_columns).items():
        value = row.get(name)
        empty = value is None or (isinstance(value, list | tuple) and all(item is None for item in value))
        if kind not in supported and not empty:
            raise ValueError(
                f"column {name!r} contains media of kind {kind!r}, which the model does not support. Use a model that "
                "supports it, or set media_columns without the column ({} ignores all)."
            )


# ---- opened sources --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Rendering and order of examples. See `PromptSource.load` for the fields."""

    tokenizer: PreTrainedTokenizerBase
    seed: int = 0
    shuffle: bool = True
    processor: MediaProcessor | None = None
    room: tuple[int, int] | None = None


class Drawn(NamedTuple):
    """A prompt: dataset index, example, raw prompt, and the encoded prompt, truncated if necessary."""

    index: int  # type: ignore[assignment] # hides the method of tuples
    row: dict[str, Any]
    raw: Any
    encoded: Encoded


class OpenSource(ABC):
    """A source with its tokenizer and processor. Renders examples and applies the length limit."""

    def __init__(self, spec: Any, columns: Sequence[str], reading: Reading) -> None:
        tools = [] if spec.tools_column == "tools" else ["tools_column"]  # a missing column "tools" is ignored
        self.spec = spec
        self.columns = list(columns)
        self.reading = reading
        self.processor = reading.processor
        self.counts = {"dropped": 0, "truncated": 0}
        self.longest: int | None = spec.max_prompt_tokens  # None if unknown
        named = spec.require_columns(columns, "prompt_column", "media_columns", *tools)
        media = COLUMNS if spec.media_columns is None else spec.media_columns
        self.read_columns = [*named, *media, *VARIABLES, *filter(None, [spec.tools_column])]

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of prompts per pass. Streams raise a `ValueError`."""

    @abstractmethod
    def draw(self, j: int) -> Callable[[], Drawn]:
        """Returns a function that creates the j-th prompt of this source, j = 0, 1, ..., in any thread."""

    def row(self, number: int) -> Callable[[], Drawn]:
        """Returns a function that creates the prompt at this position in the dataset's order. Not for streams."""
        raise NotImplementedError

    def index(self, number: int) -> int:
        """Returns the dataset index of the prompt at this position. Not for streams."""
        raise NotImplementedError

    def values(self, column: str) -> list[Any] | None:
        """Returns the values of a column in the dataset's order, or None for a stream."""
        return None

    def length(self, index: int, row: Mapping[str, Any]) -> int:
        """Checks an example and returns its length in tokens.

        Doesn't decode media without a length limit, but checks whether their files exist, and returns 0.
        """
        spec, prompt, reading = self.spec, row.get(self.spec.prompt_column), self.reading
        with self.spec.named(index):
            if self.processor is not None and (spec.max_prompt_tokens is None or spec.overlong == "truncate_left"):
                from lightrl.data.media import require_present

                arranged_prompt, system, found = arranged(prompt, row, spec, reading.tokenizer, self.processor)
                spec.render(reading.tokenizer, arranged_prompt, system, row)
                require_present(found, spec)
                return 0
            length = len(self.encode(row).token_ids)
            if not length:
                raise ValueError(f"the prompt {prompt!r} has no tokens. Remove it.")
            longest, new_tokens = reading.room or (length, 0)
            if spec.max_prompt_tokens is None and length + new_tokens > longest:
                raise ValueError(
                    f"the prompt has {length} tokens; with max_new_tokens={new_tokens} this exceeds the model's "
                    f"maximum length of {longest}. Set max_prompt_tokens and overlong, or lower max_new_tokens in "
                    "sampling and evaluation.sampling."
                )
            if spec.overlong == "error" and length > (spec.max_prompt_tokens or length):
                raise ValueError(
                    f"max_prompt_tokens={spec.max_prompt_tokens}: the prompt has {length} tokens. Raise it, or set "
                    'overlong to "drop" or "truncate_left".'
                )
        return length

    def keeps(self, length: int) -> bool:
        """Returns whether `overlong` keeps an example of this length, and counts dropped ones."""
        spec = self.spec
        if spec.overlong != "drop" or length <= (spec.max_prompt_tokens or length):
            return True
        self.counts["dropped"] += 1
        return False

    def encode(self, row: Mapping[str, Any]) -> Encoded:
        """Encodes an example without truncation."""
        spec = self.spec
        return encode_prompt(row.get(spec.prompt_column), row, spec, self.reading.tokenizer, self.processor)[0]

    def make(self, index: int, row: dict[str, Any]) -> Drawn:
        """Creates the prompt of an example, truncated if necessary.

        Raises:
            MediaError: If media are invalid or truncation would remove media.
        """
        with self.spec.named(index):
            encoded = self.encode(row)
            limit = self.spec.max_prompt_tokens
            if limit is not None and len(encoded.token_ids) > limit:
                cut = len(encoded.token_ids) - limit
                if cut > encoded.cuttable:
                    raise MediaError(
                        f"max_prompt_tokens={limit}: the prompt has {len(encoded.token_ids)} tokens and can't be "
                        "truncated without removing media. Raise it, or lower max_pixels or max_frames."
                    )
                self.counts["truncated"] += 1
                encoded.token_ids, encoded.media.token_ids = encoded.token_ids[cut:], encoded.media.token_ids[cut:]
                encoded.text = str(self.reading.tokenizer.decode(encoded.token_ids))
                for name, value in encoded.inputs.items():
                    if name.endswith(TOKEN_INPUT):
                        encoded.inputs[name] = value[:, cut:]
        return Drawn(index, row, row[self.spec.prompt_column], encoded)


class _MapRows(OpenSource):
    """A source with a length and random access."""

    def __init__(self, spec: Any, data: Any, reading: Reading) -> None:
        super().__init__(spec, columns_of(data), reading)
        self.data = data
        self.kept: list[int] = []
        longest = 0
        rows = with_progress(plain_rows(data, self.read_columns), len(data), spec.label)
        for index, row in enumerate(rows):
            length = self.length(index, row)
            if self.keeps(length):
                self.kept.append(index)
                longest = max(longest, length)
        limit = spec.max_prompt_tokens
        spec.report_dropped(self.counts["dropped"], len(data), f"max_prompt_tokens={limit}")
        if self.processor is None:  # media may not have been decoded
            self.longest = min(longest, limit or longest)
        self._order: tuple[int, np.ndarray[Any, Any]] = (-1, np.arange(len(self.kept)))

    def __len__(self) -> int:
        return len(self.kept)

    def draw(self, j: int) -> Callable[[], Drawn]:
        epoch, position = divmod(j, len(self.kept))
        if self.reading.shuffle and self.spec.shuffle and self._order[0] != epoch:
            self._order = (epoch, shuffled_order(len(self.kept), self.reading.seed, epoch))
        return self.row(int(self._order[1][position]))

    def row(self, number: int) -> Callable[[], Drawn]:
        return lambda: self._made(self.kept[number])

    def index(self, number: int) -> int:
        return self.kept[number]

    def values(self, column: str) -> list[Any] | None:
        values = [row.get(column) for row in plain_rows(self.data, [column])]
        return [values[index] for index in self.kept]

    def _made(self, index: int) -> Drawn:
        with self.spec.named(index):  # `datasets` decodes its media here
            row = entered(self.data[index])
        return self.make(index, row)


class _StreamRows(OpenSource):
    """A source that is only read forward."""

    def __init__(self, spec: Any, data: IterableDataset, reading: Reading) -> None:
        super().__init__(spec, list(next(iter(data), {})), reading)
        shuffle = reading.shuffle and spec.shuffle
        self.data = data.shuffle(seed=reading.seed, buffer_size=SHUFFLE_BUFFER) if shuffle else data
        self.next_j = 0
        self.stream = self._endless()

    def __len__(self) -> int:
        raise ValueError(
            f"streaming=True: evaluation needs a length, which {self.spec.label} lacks. Set streaming=False, with "
            "`limit` or a slice of the split."
        )

    def draw(self, j: int) -> Callable[[], Drawn]:
        if j < self.next_j:
            self.next_j, self.stream = 0, self._endless()
        while True:
            index, row = next(self.stream)
            self.next_j += 1
            if self.next_j > j:
                return lambda: self.make(index, row)

    def _endless(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (index within the pass, example) over endless passes, each in a different order."""
        epoch = 0
        while True:
            self.data.set_epoch(epoch)
            kept = 0
            for index, row in enumerate(map(entered, self.data)):
                if self.keeps(self.length(index, row)):
                    kept += 1
                    yield index, row
            if not kept:
                self.spec.report_dropped(0, 0, f"max_prompt_tokens={self.spec.max_prompt_tokens}")
            epoch += 1


def open_source(spec: Any, reading: Reading) -> OpenSource:
    """Opens a source."""
    data = spec.read()
    return _StreamRows(spec, data, reading) if isinstance(data, IterableDataset) else _MapRows(spec, data, reading)

"""Rendering and tokenization of prompts, and opened prompt sources, which check and truncate examples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from lightrl.data.templates import (
    ChatTemplate,
    as_strings,
    as_tools,
    conversation,
    encode,
    is_plain,
    render_prompt,
    require_unrendered,
)
from lightrl.models.turns import TOKEN_INPUT, placeholder_ids

if TYPE_CHECKING:
    from lightrl.data.processor import MediaProcessor

SHUFFLE_BUFFER = 10_000
VARIABLES = ("template_kwargs", "chat_template_kwargs")
"""Columns with per-example variables of the chat template. Later ones take precedence."""


def load_processor(path: str, tokenizer: PreTrainedTokenizerBase) -> MediaProcessor | None:
    """Loads the processor of a model with images, videos, or audio. Returns None for text models."""
    local = Path(path).expanduser()
    try:
        config = AutoConfig.from_pretrained(str(local) if local.is_dir() else path)
    except (OSError, ValueError):  # a directory with only a tokenizer
        return None
    placeholders = placeholder_ids(config)
    if not placeholders:
        return None
    from lightrl.data.processor import MediaProcessor

    return MediaProcessor(str(local) if local.is_dir() else path, tokenizer, placeholders)


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

    def require_columns(self, columns: Iterable[str], *arguments: str) -> list[str]:
        """See `RowSource.require_columns`. Also requires the tools' column, unless it has the default name."""
        tools = [] if self.tools_column == "tools" else ["tools_column"]
        return super().require_columns(columns, *arguments, *tools)

    def template_arguments(self, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns an example's tools and chat template variables. Raises a ValueError if a column is invalid."""
        tools = as_tools(None if self.tools_column is None else row.get(self.tools_column))
        return tools, row_variables(row, self.template_kwargs)

    def render(
        self,
        prompt: Any,
        row: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> Rendered:
        """Renders an example's prompt. Doesn't decode its media.

        Raises a `MediaError` if the numbers of media and placeholders differ, and a ValueError if the model doesn't
        support a column's media or `render_prompt` rejects the prompt.
        """
        supported = {} if processor is None else processor.placeholders
        for name, kind in (COLUMNS if self.media_columns is None else self.media_columns).items():
            value = row.get(name)
            empty = value is None or (isinstance(value, list | tuple) and all(item is None for item in value))
            if kind not in supported and not empty:
                raise ValueError(
                    f"column {name!r} contains media of kind {kind!r}, which the model does not support. Use a model "
                    "that supports it, or set media_columns without the column ({} ignores all)."
                )
        if isinstance(prompt, str) and not is_plain(tokenizer, prompt, self.chat_template):
            require_unrendered(tokenizer, prompt, self.chat_template)
        system, media = self.system_prompt, list[tuple[str, Any]]()
        if processor is None:
            prompt = as_strings(prompt)
        else:
            from lightrl.data.media import placed

            prompt, system, media = placed(prompt, row, self, tokenizer, processor)
        tools, variables = self.template_arguments(row)
        text, templated = render_prompt(
            tokenizer,
            prompt,
            system_prompt=system,
            chat_template=self.chat_template,
            template_kwargs=variables,
            tools=tools,
        )
        return Rendered(text, templated, conversation(prompt, system) if templated else [], media)

    def encode(
        self, rendered: Rendered, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None = None
    ) -> Encoded:
        """Decodes the media of a rendered prompt and tokenizes it. Raises a `MediaError` for invalid media."""
        text, templated = rendered.text, rendered.templated
        if rendered.media and processor is not None:
            from lightrl.data.media import decode

            return processor(text, decode(rendered.media, self), templated=templated)
        token_ids = encode(tokenizer, text, templated=templated)
        for kind, placeholder in processor.placeholders.items() if processor is not None else ():
            if placeholder in token_ids:
                name = tokenizer.convert_ids_to_tokens(placeholder)
                raise MediaError(f"the prompt has a placeholder {name!r}, but no {kind}. Add the {kind} or remove it.")
        return Encoded(text, token_ids, cuttable=len(token_ids))


class Rendered(NamedTuple):
    text: str
    templated: bool
    """Whether the chat template was applied."""
    messages: list[dict[str, Any]]
    """The conversation, including the system turn. Empty without the chat template."""
    media: list[tuple[str, Any]]
    """Kind and undecoded value of each media item."""


def row_variables(row: Mapping[str, Any], template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat template variables of an example, whose columns override `template_kwargs`."""
    variables = dict(template_kwargs)
    for name in VARIABLES:
        own = row.get(name)
        if isinstance(own, str) and own.strip():
            own = json.loads(own)
        variables.update(own or {})
    return variables


# ---- opened sources --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Rendering and order of examples.

    Args:
        tokenizer: Tokenizer that renders and tokenizes the prompts.
        seed: Random seed for the order, 0 or more.
        shuffle: Whether to reshuffle in every pass. Requires `PromptSource.shuffle`.
        processor: Processor from `load_processor`, or None for a text model.
        room: Maximum sequence length of the engine and maximum completion length in tokens, or None if unknown.
            Without `max_prompt_tokens`, a text prompt that leaves too little room raises an error.
    """

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


class OpenSource:
    """A source with its tokenizer and processor. Renders examples and applies the length limit."""

    def __init__(self, spec: Any, data: Any, reading: Reading) -> None:
        self.spec = spec
        self.data = data
        self.reading = reading
        self.processor = reading.processor
        self.counts = {"dropped": 0, "truncated": 0}  # examples and prompts so far
        self.kept: list[int] = []  # dataset indices that `overlong` keeps, in order; empty for a stream
        self.longest: int | None = spec.max_prompt_tokens  # maximum prompt length in tokens; None if unknown
        self._order: tuple[int, np.ndarray[Any, Any]] = (-1, np.arange(0))
        self.columns = self._read_columns()
        self._named = spec.require_columns(self.columns, "prompt_column", "media_columns")
        self._check()

    def __len__(self) -> int:
        """Returns the number of prompts per pass. Streams raise a `ValueError`."""
        return len(self.kept)

    def draw(self, j: int) -> Callable[[], Drawn]:
        """Returns a function that creates the j-th prompt of this source, j = 0, 1, ..., in any thread."""
        epoch, position = divmod(j, len(self.kept))
        if self.reading.shuffle and self.spec.shuffle:
            if self._order[0] != epoch:
                self._order = (epoch, shuffled_order(len(self.kept), self.reading.seed, epoch))
            position = int(self._order[1][position])
        return self.row(position)

    def row(self, number: int) -> Callable[[], Drawn]:
        """Returns a function that creates the prompt at this position in the dataset's order. Not for streams."""
        return lambda: self._made(self.kept[number])

    def values(self, column: str) -> list[Any]:
        """Returns the values of a column in the dataset's order, None if it is missing. Not for streams."""
        values = [row.get(column) for row in plain_rows(self.data, [self.spec.prompt_column, column])]
        return [values[index] for index in self.kept]

    def _read_columns(self) -> list[str]:
        return columns_of(self.data)

    def _check(self) -> None:
        """Checks all examples before training."""
        spec, total, longest = self.spec, len(self.data), 0
        media = COLUMNS if spec.media_columns is None else spec.media_columns
        rows = plain_rows(self.data, [*self._named, *media, *VARIABLES, *filter(None, [spec.tools_column])])
        for index, row in enumerate(with_progress(rows, total, spec.label)):
            length = self._length(index, row)
            if self._keeps(length):
                self.kept.append(index)
                longest = max(longest, length)
        spec.report_dropped(self.counts["dropped"], total, f"max_prompt_tokens={spec.max_prompt_tokens}")
        if self.processor is None:  # media may not have been decoded
            self.longest = min(longest, spec.max_prompt_tokens or longest)

    def _length(self, index: int, row: Mapping[str, Any]) -> int:
        """Checks an example and returns its length in tokens.

        Doesn't decode media without a length limit, but checks whether their files exist, and returns 0.
        """
        spec, prompt, reading = self.spec, row.get(self.spec.prompt_column), self.reading
        with spec.named(index):
            rendered = spec.render(prompt, row, reading.tokenizer, self.processor)
            if self.processor is not None and (spec.max_prompt_tokens is None or spec.overlong == "truncate_left"):
                from lightrl.data.media import require_present

                require_present(rendered.media, spec)
                return 0
            length = len(spec.encode(rendered, reading.tokenizer, self.processor).token_ids)
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

    def _keeps(self, length: int) -> bool:
        """Returns whether `overlong` keeps an example of this length, and counts dropped ones."""
        spec = self.spec
        dropped = spec.overlong == "drop" and length > (spec.max_prompt_tokens or length)
        self.counts["dropped"] += dropped
        return not dropped

    def _made(self, index: int, row: Mapping[str, Any] | None = None) -> Drawn:
        """Creates the prompt of an example. Raises a `MediaError` if truncation would remove media."""
        spec, tokenizer, limit = self.spec, self.reading.tokenizer, self.spec.max_prompt_tokens
        with spec.named(index):
            row = entered(self.data[index] if row is None else row)  # `datasets` decodes media here
            raw = row.get(spec.prompt_column)
            encoded = spec.encode(spec.render(raw, row, tokenizer, self.processor), tokenizer, self.processor)
            cut = 0 if limit is None else len(encoded.token_ids) - limit
            begin = int(encoded.token_ids[:1] == [tokenizer.bos_token_id])  # some models fail without their BOS
            if cut > max(encoded.cuttable - begin, 0):
                raise MediaError(
                    f"max_prompt_tokens={limit}: the prompt has {len(encoded.token_ids)} tokens and can't be "
                    "truncated without removing media. Raise it, or lower max_pixels or max_frames."
                )
            if cut > 0:
                self.counts["truncated"] += 1
                kept = [*range(begin), *range(begin + cut, len(encoded.token_ids))]
                for name, value in encoded.inputs.items():
                    if name.endswith(TOKEN_INPUT):
                        encoded.inputs[name] = value[:, kept]
                encoded.token_ids = [encoded.token_ids[i] for i in kept]
                encoded.media.token_ids = encoded.media.token_ids[:begin] + encoded.media.token_ids[begin + cut :]
                encoded.text = str(tokenizer.decode(encoded.token_ids[begin:]))
        return Drawn(index, row, raw, encoded)


class _Stream(OpenSource):
    """A source that is only read forward."""

    _next: int  # index of the next example
    _examples: Iterator[tuple[int, dict[str, Any]]]

    def __len__(self) -> int:
        raise ValueError(
            f"streaming=True: evaluation needs a length, which {self.spec.label} lacks. Set streaming=False, with "
            "`limit` or a slice of the split."
        )

    def draw(self, j: int) -> Callable[[], Drawn]:
        if j < self._next:
            self._next, self._examples = 0, self._endless()
        while True:
            index, row = next(self._examples)
            self._next += 1
            if self._next > j:
                return lambda: self._made(index, row)

    def _read_columns(self) -> list[str]:
        return list(next(iter(self.data), {}))

    def _check(self) -> None:
        """Starts reading. Examples are checked when they are read."""
        if self.reading.shuffle and self.spec.shuffle:
            self.data = self.data.shuffle(seed=self.reading.seed, buffer_size=SHUFFLE_BUFFER)
        self._next, self._examples = 0, self._endless()

    def _endless(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (index within the pass, example) over endless passes, each in a different order."""
        epoch = 0
        while True:
            self.data.set_epoch(epoch)
            kept = 0
            for index, row in enumerate(map(entered, self.data)):
                if self._keeps(self._length(index, row)):
                    kept += 1
                    yield index, row
            if not kept:
                self.spec.report_dropped(0, 0, f"max_prompt_tokens={self.spec.max_prompt_tokens}")
            epoch += 1


def open_source(spec: Any, reading: Reading) -> OpenSource:
    """Opens a source."""
    data = spec.read()
    return (_Stream if isinstance(data, IterableDataset) else OpenSource)(spec, data, reading)

"""Opened prompt sources, which check, render, and truncate examples."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import IterableDataset
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightrl.data.processing import arranged, encode_prompt, require_read
from lightrl.data.rows import (
    COLUMNS,
    Encoded,
    MediaError,
    RowError,
    columns_of,
    plain_rows,
    require_columns,
    shuffled_order,
)
from lightrl.data.templates import encode, require_text, require_unrendered
from lightrl.models.turns import TOKEN_INPUT
from lightrl.records import Media

if TYPE_CHECKING:
    from lightrl.data.processor import MediaProcessor

SHUFFLE_BUFFER = 10_000
SLACK = 64
"""Number of tokens, such as BOS, that a prompt can have in addition to its number of bytes."""
MEASURED = 512
"""Number of examples with the most text to tokenize for finding the longest prompt."""


@dataclass(frozen=True)
class Reading:
    """Rendering and order of examples. See `PromptSource.load` for the fields."""

    tokenizer: PreTrainedTokenizerBase
    seed: int = 0
    shuffle: bool = True
    processor: MediaProcessor | None = None
    check_column: str | None = None
    check_row: Callable[[Mapping[str, Any]], None] | None = None
    room: tuple[int, int] | None = None


@dataclass
class Drawn:
    """A prompt: dataset index, example, text, token IDs, raw prompt, model inputs, and media."""

    index: int
    row: dict[str, Any]
    text: str
    token_ids: list[int]
    raw: Any
    inputs: dict[str, Any] = field(default_factory=dict)
    media: Media = field(default_factory=Media)


class OpenSource(ABC):
    """A source with its tokenizer and processor. Renders examples and applies the length limit."""

    def __init__(self, spec: Any, columns: Sequence[str], reading: Reading) -> None:
        require_columns(columns, [spec.prompt_column, *(spec.media_columns or ())], spec.label, "prompt_column")
        if spec.tools_column not in (None, "tools"):
            require_columns(columns, [str(spec.tools_column)], spec.label, "tools_column")
        self.spec = spec
        self.columns = list(columns)
        self.tokenizer = reading.tokenizer
        self.processor = reading.processor
        self.check_column = reading.check_column
        self.check_row = reading.check_row
        self.room = reading.room if spec.max_prompt_tokens is None and reading.processor is None else None
        self.counts = {"dropped": 0, "truncated": 0}
        self.broken: set[int] = set()
        self.rendered: dict[tuple[Any, ...], int] = {}
        self.known: set[str] = set()
        self.drops = spec.max_prompt_tokens is not None and spec.overlong != "truncate_left"

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of prompts per pass. Streams raise a `ValueError`."""

    @abstractmethod
    def draw(self, j: int) -> Callable[[], Drawn]:
        """Returns a function that creates the j-th prompt of this source, j = 0, 1, ..., in any thread."""

    @abstractmethod
    def row(self, number: int) -> Callable[[], Drawn]:
        """Returns a function that creates the prompt at this position in the dataset's order."""

    def index(self, number: int) -> int:
        """Returns the dataset index of the prompt at this position."""
        raise AssertionError(f"row {number} of a stream: callers request the length first, which raises")

    def values(self, column: str) -> set[Any] | None:
        """Returns the distinct values of a column, or None for a stream."""
        return None

    def longest(self) -> int | None:
        """Returns the maximum prompt length in tokens, or None if unknown."""
        return self.spec.max_prompt_tokens

    @property
    def read_columns(self) -> list[str]:
        """Columns that are checked before training."""
        media = COLUMNS if self.spec.media_columns is None else self.spec.media_columns
        others = [*self.spec.rendering_columns, *([self.check_column] if self.check_column else [])]
        return [self.spec.prompt_column, *media, *others]

    def check(self, row: Mapping[str, Any]) -> None:
        """Raises a `ValueError` if an example is invalid, mostly without tokenizing it.

        Checks the prompt's type, roles and contents, whether the chat template accepts the order of roles, and whether
        media files exist.
        """
        spec, prompt = self.spec, row.get(self.spec.prompt_column)
        if self.check_row is not None:
            try:
                self.check_row(row)
            except ValueError as error:
                raise RowError(f" {error}") from error
        media_columns = self.processor is not None or spec.media_columns
        try:
            require_read(row, spec, self.processor)
        except ValueError as error:
            raise RowError(f": {error}") from error
        try:
            require_unrendered(self.tokenizer, prompt, spec.chat_template)
            if isinstance(prompt, str) and not media_columns:
                if not prompt:
                    raise ValueError("the prompt is an empty string.")
                require_text(prompt)
                return self._check_length(prompt, (str,), spec.system_prompt, row)
            arranged_prompt, system, found = arranged(prompt, row, spec, self.tokenizer, self.processor)
            if found:
                from lightrl.data.media import require_present

                require_present(found, spec)
            if not isinstance(arranged_prompt, str):
                order = tuple((m["role"], type(m["content"]), "tool_calls" in m) for m in arranged_prompt)
                self._check_length(arranged_prompt, order, system, row)
        except MediaError as error:
            raise MediaError(f": {error}") from error
        except ValueError as error:
            raise RowError(f", column {spec.prompt_column!r}: {error}") from error

    def _check_length(self, prompt: Any, order: tuple[Any, ...], system: str | None, row: Mapping[str, Any]) -> None:
        """Raises a `ValueError` if a text prompt has no tokens or is too long.

        Tokenizes only a few prompts. A text has at most as many tokens as bytes. The first prompt with the same `order`
        (roles and content types) determines how much text the chat template adds.
        """
        size = len(str(prompt).encode())
        order = (*order, hash(repr(self.spec.rendering(row))))
        if order not in self.rendered:
            text, _ = self.spec.render(self.tokenizer, prompt, system, row)
            self.rendered[order] = max(0, len(text.encode()) - size)
        unknown = isinstance(prompt, str) and self.processor is None and not self._knows(prompt)
        fits = self.room is None or size + self.rendered[order] + SLACK <= self.room[0] - self.room[1]
        if fits and not unknown:
            return
        text, templated = self.spec.render(self.tokenizer, prompt, system, row)
        length = len(encode(self.tokenizer, text, templated=templated))
        if not length:
            raise ValueError(f"the prompt {text[:80]!r} has no tokens. Use characters that the tokenizer supports.")
        if self.room is not None and length > self.room[0] - self.room[1]:
            raise ValueError(
                f"the prompt has {length} tokens; with max_new_tokens={self.room[1]} this exceeds the model's maximum "
                f"length of {self.room[0]}. Set max_prompt_tokens and overlong, or lower max_new_tokens."
            )

    def _knows(self, text: str) -> bool:
        """Whether the tokenizer supports a character of the text, usually the first one."""
        for character in text:
            if character in self.known:
                return True
            if encode(self.tokenizer, character, templated=False):
                self.known.add(character)
                return True
        return False

    def encode(self, index: int, row: Mapping[str, Any]) -> Encoded:
        """Encodes an example without truncation."""
        spec = self.spec
        try:
            encoded, _ = encode_prompt(row.get(spec.prompt_column), row, spec, self.tokenizer, self.processor)
        except MediaError as error:
            raise MediaError(f"{spec.where(index)}: {error}") from error
        except ValueError as error:
            raise RowError(f"{spec.where(index)}, column {spec.prompt_column!r}: {error}") from error
        if not encoded.token_ids:
            raise RowError(f"{spec.where(index)}: the prompt {encoded.text!r} has no tokens. Remove it.")
        return encoded

    def keeps(self, index: int, row: dict[str, Any]) -> bool:
        """Returns whether `overlong` keeps the example, and counts dropped ones."""
        spec = self.spec
        if not self.drops:
            return True
        try:
            length = len(self.encode(index, row).token_ids)
        except RowError as error:
            return not self.drop(index, error)
        if length <= (spec.max_prompt_tokens or length):
            return True
        if spec.overlong == "error":
            raise ValueError(
                f"max_prompt_tokens={spec.max_prompt_tokens}: the prompt of {spec.where(index)} has {length} tokens. "
                'Raise it, or set overlong to "drop" or "truncate_left".'
            )
        self.counts["dropped"] += 1
        return False

    def drop(self, index: int, error: RowError) -> bool:
        """Counts an invalid example once and warns, or raises the error if it must not be dropped."""
        if not self.spec.drops(error):
            raise error
        if index not in self.broken:
            self.broken.add(index)
            self.counts["dropped"] += 1
            rank_zero_warn(f"Dropped: {error}")
        return True

    def make(self, index: int, row: dict[str, Any]) -> Drawn:
        """Creates the prompt of an example, truncated if necessary.

        Raises:
            MediaError: If media are invalid or truncation would remove media.
        """
        encoded = self.encode(index, row)
        text, token_ids, media = encoded.text, encoded.token_ids, encoded.media
        limit = self.spec.max_prompt_tokens
        if limit is not None and len(token_ids) > limit:
            cut = len(token_ids) - limit
            if cut > encoded.cuttable:
                raise MediaError(
                    f"max_prompt_tokens={limit}: {self.spec.where(index)} has {len(token_ids)} tokens and can't be "
                    "truncated without removing media. Raise it, or lower max_pixels or max_frames."
                )
            self.counts["truncated"] += 1
            token_ids, media.token_ids = token_ids[cut:], media.token_ids[cut:]
            text = str(self.tokenizer.decode(token_ids))
            for name, value in encoded.inputs.items():
                if name.endswith(TOKEN_INPUT):
                    encoded.inputs[name] = value[:, cut:]
        return Drawn(index, row, text, token_ids, row[self.spec.prompt_column], encoded.inputs, media)


class _MapRows(OpenSource):
    """A source with a length and random access."""

    def __init__(self, spec: Any, data: Any, reading: Reading) -> None:
        super().__init__(spec, columns_of(data), reading)
        self.data = data
        self.seed = reading.seed
        self.shuffle = reading.shuffle and spec.shuffle
        self.sizes: list[tuple[int, int]] = []  # heap of (bytes, index) of the rows with the most text
        self.looked = 0
        self.kept = spec.good_rows(data, self.read_columns, self._measured)
        bad = len(data) - len(self.kept)
        if self.drops:
            self.kept = [i for i in self.kept if self._keeps(i)]
        if self.counts["dropped"]:
            rank_zero_info(
                f"{spec.label}: dropped {self.counts['dropped']} of {len(data)} prompts longer than "
                f"max_prompt_tokens={spec.max_prompt_tokens}."
            )
        self.counts["dropped"] += bad
        if not self.kept:
            raise ValueError(
                f"{spec.label}: every prompt is longer than max_prompt_tokens={spec.max_prompt_tokens}. Raise it."
            )
        self._order: tuple[int, np.ndarray[Any, Any]] = (-1, np.arange(len(self.kept)))

    def _measured(self, row: Mapping[str, Any]) -> None:
        """Calls `check` and records the size of the example's prompt and tools."""
        number, self.looked = self.looked, self.looked + 1
        self.check(row)
        note = heapq.heappush if len(self.sizes) < MEASURED else heapq.heappushpop
        shown = [row[self.spec.prompt_column], row.get(self.spec.tools_column or "")]
        note(self.sizes, (sum(len(str(part).encode(errors="replace")) for part in shown if part), number))

    def longest(self) -> int | None:
        """See `OpenSource.longest`. Exact for up to `MEASURED` examples, and an upper bound in bytes for others.

        Returns `max_prompt_tokens` for models with media, because media are not decoded here.
        """
        limit = self.spec.max_prompt_tokens
        if self.processor is not None:
            return limit
        longest = around = 0
        for size, number in self.sizes:
            with suppress(RowError):  # dropped later, or an error
                encoded = self.encode(number, self.spec.read_row(self.data, number))
                longest = max(longest, len(encoded.token_ids))
                around = max(around, len(encoded.text.encode(errors="replace")) - size)
        if self.looked > len(self.sizes) == MEASURED:
            longest = max(longest, self.sizes[0][0] + around + SLACK)
        if self.room is not None:  # `check` rejects longer prompts
            longest = min(longest, self.room[0] - self.room[1])
        return longest if limit is None else min(longest, limit)

    def _keeps(self, index: int) -> bool:
        try:
            row = self.spec.read_row(self.data, index)
        except RowError as error:
            return not self.drop(index, error)
        return self.keeps(index, row)

    def __len__(self) -> int:
        return len(self.kept)

    def draw(self, j: int) -> Callable[[], Drawn]:
        epoch, position = divmod(j, len(self.kept))
        if self.shuffle and self._order[0] != epoch:
            self._order = (epoch, shuffled_order(len(self.kept), self.seed, epoch))
        return self.row(int(self._order[1][position]))

    def row(self, number: int) -> Callable[[], Drawn]:
        return lambda: self._first_good(number)

    def index(self, number: int) -> int:
        return int(self.kept[number])

    def values(self, column: str) -> set[Any] | None:
        kept = self.kept if isinstance(self.kept, range) else set(self.kept)
        rows = enumerate(plain_rows(self.data, [column]))
        return {row.get(column) for number, row in rows if number in kept}

    def _first_good(self, number: int) -> Drawn:
        """Returns this prompt, or the next valid one in the dataset's order."""
        for step in range(len(self.kept)):
            index = self.kept[(number + step) % len(self.kept)]
            if index not in self.broken:
                try:
                    return self.make(index, self.spec.read_row(self.data, index))
                except RowError as error:
                    self.drop(index, error)
        raise ValueError(f"{self.spec.label}: no example is left, because all are invalid. Fix the data.")


class _StreamRows(OpenSource):
    """A source that is only read forward."""

    def __init__(self, spec: Any, data: IterableDataset, reading: Reading) -> None:
        first = next(spec.stream_rows(data), None)
        if first is None:
            raise ValueError(
                f"split={spec.split!r}: {spec.label} has no rows, so there is nothing to train on. Fix it."
            )
        super().__init__(spec, list(first), reading)
        shuffle = reading.shuffle and spec.shuffle
        self.data = data.shuffle(seed=reading.seed, buffer_size=SHUFFLE_BUFFER) if shuffle else data
        self.next_j = 0
        self.stream = self._endless()
        self.peeked: deque[tuple[int, dict[str, Any]]] = deque()

    def __len__(self) -> int:
        raise ValueError(
            f"streaming=True: evaluation needs a length, which {self.spec.label} lacks. Set streaming=False, with "
            "`limit` or a slice of the split."
        )

    def row(self, number: int) -> Callable[[], Drawn]:
        raise AssertionError(f"row {number} of a stream: callers request the length first, which raises")

    def draw(self, j: int) -> Callable[[], Drawn]:
        if j < self.next_j:
            self.next_j, self.stream = 0, self._endless()
            self.peeked.clear()
        while True:
            index, row = self._next()
            self.next_j += 1
            if self.next_j > j:
                break
        if "drop" not in (self.spec.on_bad_row, self.spec.on_media_error if self.processor is not None else "error"):
            return lambda: self.make(index, row)
        drawn = self._first_good(index, row)  # must run in this thread, because invalid examples advance the stream
        return lambda: drawn

    def _next(self) -> tuple[int, dict[str, Any]]:
        return self.peeked.popleft() if self.peeked else next(self.stream)

    def _first_good(self, index: int, row: dict[str, Any]) -> Drawn:
        """Returns the prompt of this example or of the next valid one, which remains in the stream."""
        looked = 0
        while True:
            try:
                return self.make(index, row)
            except RowError as error:
                self.drop(index, error)
            if looked == len(self.peeked):
                self.peeked.append(next(self.stream))
            index, row = self.peeked[looked]
            looked += 1

    def _endless(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (index within the pass, example) over endless passes, each in a different order."""
        epoch = 0
        while True:
            self.data.set_epoch(epoch)
            kept = 0
            for index, row in enumerate(self.spec.stream_rows(self.data)):
                if self.is_good(index, row) and self.keeps(index, row):
                    kept += 1
                    yield index, row
            if not kept:
                limit = self.spec.max_prompt_tokens
                raise ValueError(f"max_prompt_tokens={limit}: every prompt of {self.spec.label} is invalid or longer.")
            epoch += 1

    def is_good(self, index: int, row: dict[str, Any]) -> bool:
        """Returns whether the example is valid. Drops it or raises an error otherwise, according to `on_bad_row`."""
        try:
            self.check(row)
        except RowError as error:
            return not self.drop(index, type(error)(f"{self.spec.where(index)}{error}"))
        return True


def open_source(spec: Any, reading: Reading) -> OpenSource:
    """Opens a source."""
    data = spec.read()
    return _StreamRows(spec, data, reading) if isinstance(data, IterableDataset) else _MapRows(spec, data, reading)

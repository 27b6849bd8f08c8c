"""Opened prompt sources: how rows are rendered, checked, and cut to the length limit."""

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
"""Tokens by which a prompt may be longer than its bytes tell, such as those that begin a text."""
MEASURED = 512
"""Rows of a source, those with the most text, that are tokenized to find its longest prompt."""


@dataclass(frozen=True)
class Reading:
    """How rows are rendered and ordered; the fields are the arguments of `PromptSource.load`."""

    tokenizer: PreTrainedTokenizerBase
    seed: int = 0
    shuffle: bool = True
    processor: MediaProcessor | None = None
    check_column: str | None = None
    check_row: Callable[[Mapping[str, Any]], None] | None = None
    room: tuple[int, int] | None = None


@dataclass
class Drawn:
    """One prompt: its row number in its source, the row, the text, its tokens, the raw prompt, and media."""

    index: int
    row: dict[str, Any]
    text: str
    token_ids: list[int]
    raw: Any
    inputs: dict[str, Any] = field(default_factory=dict)
    media: Media = field(default_factory=Media)


class OpenSource(ABC):
    """One source with its tokenizer and processor: renders rows and applies the length limit."""

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
        """Number of prompts in one pass; a stream raises `ValueError`."""

    @abstractmethod
    def draw(self, j: int) -> Callable[[], Drawn]:
        """The j-th prompt that is asked of this source, j = 0, 1, ... without end.

        The call is cheap; what it returns does the work and may run in any thread.
        """

    @abstractmethod
    def row(self, number: int) -> Callable[[], Drawn]:
        """The prompt with this number in the order of the data set, as from `draw`."""

    def index(self, number: int) -> int:
        """Row in the data set of the prompt with this number in its order."""
        raise AssertionError(f"row {number} of a stream: callers ask for the length first, which raises")

    def values(self, column: str) -> set[Any] | None:
        """What its rows hold in a column; None for a stream, of which that is not known."""
        return None

    def longest(self) -> int | None:
        """Upper bound on the tokens of its prompts; None if unknown."""
        return self.spec.max_prompt_tokens

    @property
    def read_columns(self) -> list[str]:
        """Columns that are looked at before training."""
        media = COLUMNS if self.spec.media_columns is None else self.spec.media_columns
        others = [*self.spec.rendering_columns, *([self.check_column] if self.check_column else [])]
        return [self.spec.prompt_column, *media, *others]

    def check(self, row: Mapping[str, Any]) -> None:
        """Raises a `ValueError` about a row that cannot become a prompt, as far as possible without tokenizing it.

        Checks the prompt's type, a conversation's roles and contents, whether the chat template accepts roles in this
        order (each order once), and whether media files exist.
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
        """Raises a `ValueError` about a text prompt without tokens, or with more than there is room for.

        Few are tokenized: a text has no more tokens than bytes, and `order` (roles and kinds of content) tells from the
        first prompt of its kind what the chat template adds.
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
            raise ValueError(f"the prompt {text[:80]!r} has no tokens: the tokenizer knows none of its characters.")
        if self.room is not None and length > self.room[0] - self.room[1]:
            raise ValueError(
                f"the prompt has {length} tokens, with max_new_tokens={self.room[1]} that is more than the "
                f"{self.room[0]} that the model holds. Set max_prompt_tokens (overlong says what happens to longer "
                "ones), or lower max_new_tokens."
            )

    def _knows(self, text: str) -> bool:
        """Whether a text has a character that is a token, which is seen at the first one nearly always."""
        for character in text:
            if character in self.known:
                return True
            if encode(self.tokenizer, character, templated=False):
                self.known.add(character)
                return True
        return False

    def encode(self, index: int, row: Mapping[str, Any]) -> Encoded:
        """Text, token ids and media of a row, however long."""
        spec = self.spec
        try:
            encoded, _ = encode_prompt(row.get(spec.prompt_column), row, spec, self.tokenizer, self.processor)
        except MediaError as error:
            raise MediaError(f"{spec.where(index)}: {error}") from error
        except ValueError as error:
            raise RowError(f"{spec.where(index)}, column {spec.prompt_column!r}: {error}") from error
        if not encoded.token_ids:
            raise RowError(f"{spec.where(index)}: the prompt {encoded.text!r} has no tokens.")
        return encoded

    def keeps(self, index: int, row: dict[str, Any]) -> bool:
        """Whether the row stays under `overlong`; counts those that do not."""
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
                f"{spec.where(index)}: the prompt has {length} tokens, max_prompt_tokens is "
                f'{spec.max_prompt_tokens}. Raise it, or set overlong to "drop" or "truncate_left".'
            )
        self.counts["dropped"] += 1
        return False

    def drop(self, index: int, error: RowError) -> bool:
        """Counts a row that cannot be used, once, and warns; raises where it is not to be dropped."""
        if not self.spec.drops(error):
            raise error
        if index not in self.broken:
            self.broken.add(index)
            self.counts["dropped"] += 1
            rank_zero_warn(f"Dropped: {error}")
        return True

    def make(self, index: int, row: dict[str, Any]) -> Drawn:
        """The prompt of a row that `keeps` let through.

        Raises:
            MediaError: media that cannot be used, or a placeholder that truncation would cut through.
        """
        encoded = self.encode(index, row)
        text, token_ids, media = encoded.text, encoded.token_ids, encoded.media
        limit = self.spec.max_prompt_tokens
        if limit is not None and len(token_ids) > limit:
            cut = len(token_ids) - limit
            if cut > encoded.cuttable:
                raise MediaError(
                    f"{self.spec.where(index)}: {len(token_ids)} tokens cannot be cut to max_prompt_tokens="
                    f"{limit} without cutting through media. Raise it, or lower max_pixels or max_frames."
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
        self.sizes: list[tuple[int, int]] = []  # (bytes, number) of the rows with the most text, a heap
        self.looked = 0
        self.kept = spec.good_rows(data, self.read_columns, self._measured)
        bad = len(data) - len(self.kept)
        if self.drops:
            self.kept = [i for i in self.kept if self._keeps(i)]
        if self.counts["dropped"]:
            rank_zero_info(
                f"{spec.label}: {self.counts['dropped']} of {len(data)} prompts are longer than "
                f"max_prompt_tokens={spec.max_prompt_tokens} and left out."
            )
        self.counts["dropped"] += bad
        if not self.kept:
            raise ValueError(f"{spec.label}: every prompt is longer than max_prompt_tokens={spec.max_prompt_tokens}.")
        self._order: tuple[int, np.ndarray[Any, Any]] = (-1, np.arange(len(self.kept)))

    def _measured(self, row: Mapping[str, Any]) -> None:
        """As `check`; notes the size of the row's prompt and tools."""
        number, self.looked = self.looked, self.looked + 1
        self.check(row)
        note = heapq.heappush if len(self.sizes) < MEASURED else heapq.heappushpop
        shown = [row[self.spec.prompt_column], row.get(self.spec.tools_column or "")]
        note(self.sizes, (sum(len(str(part).encode(errors="replace")) for part in shown if part), number))

    def longest(self) -> int | None:
        """See `OpenSource.longest`: exact for up to `MEASURED` rows; of others it takes their bytes for tokens.

        Rows of a model with media are not decoded for it, so that `max_prompt_tokens` is all that is known of them.
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
        if self.room is not None:  # no prompt is longer, which `check` has seen to
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
        """This prompt, or the next one in the data set's order that can be used."""
        for step in range(len(self.kept)):
            index = self.kept[(number + step) % len(self.kept)]
            if index not in self.broken:
                try:
                    return self.make(index, self.spec.read_row(self.data, index))
                except RowError as error:
                    self.drop(index, error)
        raise ValueError(f"{self.spec.label}: no row is left, all of them (or their media) are broken.")


class _StreamRows(OpenSource):
    """A source that is only read forwards."""

    def __init__(self, spec: Any, data: IterableDataset, reading: Reading) -> None:
        first = next(spec.stream_rows(data), None)
        if first is None:
            raise ValueError(f"{spec.label} has no rows (split={spec.split!r}); there is nothing to train on.")
        super().__init__(spec, list(first), reading)
        shuffle = reading.shuffle and spec.shuffle
        self.data = data.shuffle(seed=reading.seed, buffer_size=SHUFFLE_BUFFER) if shuffle else data
        self.next_j = 0
        self.stream = self._endless()
        self.peeked: deque[tuple[int, dict[str, Any]]] = deque()

    def __len__(self) -> int:
        raise ValueError(
            f"{self.spec.label} is a stream and has no length: evaluation needs prompts with streaming=False, "
            "with `limit` or a slice of the split if there are many."
        )

    def row(self, number: int) -> Callable[[], Drawn]:
        raise AssertionError(f"row {number} of a stream: callers ask for the length first, which raises")

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
        drawn = self._first_good(index, row)  # which rows are read depends on which are good: not in another thread
        return lambda: drawn

    def _next(self) -> tuple[int, dict[str, Any]]:
        return self.peeked.popleft() if self.peeked else next(self.stream)

    def _first_good(self, index: int, row: dict[str, Any]) -> Drawn:
        """This row's prompt, or that of the next usable one; rows looked at are read again later."""
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
        """Row numbers in the pass and rows, pass after pass, each in its own order."""
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
                raise ValueError(f"{self.spec.label}: every prompt is bad or longer than max_prompt_tokens={limit}.")
            epoch += 1

    def is_good(self, index: int, row: dict[str, Any]) -> bool:
        """Whether the row can become a prompt; what cannot is an error or dropped, as `on_bad_row` says."""
        try:
            self.check(row)
        except RowError as error:
            return not self.drop(index, type(error)(f"{self.spec.where(index)}{error}"))
        return True


def open_source(spec: Any, reading: Reading) -> OpenSource:
    """Reads the rows of a source."""
    data = spec.read()
    return _StreamRows(spec, data, reading) if isinstance(data, IterableDataset) else _MapRows(spec, data, reading)

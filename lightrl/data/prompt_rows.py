"""One prompt source, opened: rows become prompts, by number, within the length limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import IterableDataset
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightrl.data.media import MediaError
from lightrl.data.processing import Encoded, MediaProcessor, encode_prompt
from lightrl.data.rows import require_columns, shuffled_order
from lightrl.models.placeholders import TOKEN_INPUT
from lightrl.types import Media

if TYPE_CHECKING:
    from lightrl.data.prompts import PromptSource

__all__ = ["Drawn", "OpenSource", "open_source"]

SHUFFLE_BUFFER = 10_000


@dataclass
class Drawn:
    """One prompt: its row number in its source, the row, the text, its tokens, what the row itself says, and media."""

    index: int
    row: dict[str, Any]
    text: str
    token_ids: list[int]
    raw: Any
    inputs: dict[str, Any] = field(default_factory=dict)
    media: Media = field(default_factory=Media)


class OpenSource(ABC):
    """One source with its tokenizer and processor: renders rows and applies the length limit."""

    def __init__(
        self,
        spec: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        columns: Sequence[str],
        processor: MediaProcessor | None,
    ) -> None:
        require_columns(columns, [spec.prompt_column, *(spec.media_columns or ())], spec.label, "prompt_column")
        self.spec, self.tokenizer, self.columns, self.processor = spec, tokenizer, list(columns), processor
        self.counts = {"dropped": 0, "truncated": 0}
        self.broken: set[int] = set()
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

    def encode(self, index: int, row: dict[str, Any]) -> Encoded:
        """Text, token ids and media of a row, however long."""
        spec = self.spec
        try:
            encoded, _ = encode_prompt(
                row.get(spec.prompt_column),
                row,
                spec,
                self.tokenizer,
                self.processor,
                system_prompt=spec.system_prompt,
                chat_template=spec.chat_template,
                template_kwargs=spec.template_kwargs,
            )
        except MediaError as error:
            raise MediaError(f"{spec.label}, row {index}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{spec.label}, row {index}, column {spec.prompt_column!r}: {error}") from error
        if not encoded.token_ids:
            raise ValueError(f"{spec.label}, row {index}: the prompt {encoded.text!r} has no tokens.")
        return encoded

    def keeps(self, index: int, row: dict[str, Any]) -> bool:
        """Whether the row stays under `overlong`; counts those that do not."""
        spec = self.spec
        if not self.drops:
            return True
        try:
            length = len(self.encode(index, row).token_ids)
        except MediaError as error:
            return not self.drop(index, error)
        if length <= (spec.max_prompt_tokens or length):
            return True
        if spec.overlong == "error":
            raise ValueError(
                f"{spec.label}, row {index}: the prompt has {length} tokens, max_prompt_tokens is "
                f'{spec.max_prompt_tokens}. Raise it, or set overlong to "drop" or "truncate_left".'
            )
        self.counts["dropped"] += 1
        return False

    def drop(self, index: int, error: MediaError) -> bool:
        """Counts a row whose media are no good, once, and says so; raises where `on_media_error` wants it."""
        if self.spec.on_media_error == "error":
            raise error
        if index not in self.broken:
            self.broken.add(index)
            self.counts["dropped"] += 1
            rank_zero_warn(f"Dropped: {error}")
        return True

    def make(self, index: int, row: dict[str, Any]) -> Drawn:
        """The prompt of a row that `keeps` let through.

        Raises:
            MediaError: media that are no good, or a placeholder that a cut would go through.
        """
        encoded = self.encode(index, row)
        text, token_ids, media = encoded.text, encoded.token_ids, encoded.media
        limit = self.spec.max_prompt_tokens
        if limit is not None and len(token_ids) > limit:
            cut = len(token_ids) - limit
            if cut > encoded.cuttable:
                raise MediaError(
                    f"{self.spec.label}, row {index}: {len(token_ids)} tokens cannot be cut to max_prompt_tokens="
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

    def __init__(
        self,
        spec: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        data: Any,
        seed: int,
        shuffle: bool,
        processor: MediaProcessor | None,
    ):
        columns = getattr(data, "column_names", None) or dict.fromkeys(name for row in data for name in row)
        super().__init__(spec, tokenizer, list(columns), processor)
        self.data, self.seed, self.shuffle = data, seed, shuffle
        self.kept: Sequence[int] = range(len(data))
        if self.drops:
            self.kept = [i for i in self.kept if self.keeps(i, data[i])]
        if self.counts["dropped"]:
            rank_zero_info(
                f"{spec.label}: {self.counts['dropped']} of {len(data)} prompts are longer than "
                f"max_prompt_tokens={spec.max_prompt_tokens} and left out."
            )
        if not self.kept:
            raise ValueError(f"{spec.label}: every prompt is longer than max_prompt_tokens={spec.max_prompt_tokens}.")
        self._order: tuple[int, np.ndarray[Any, Any]] = (-1, np.arange(len(self.kept)))

    def __len__(self) -> int:
        return len(self.kept)

    def draw(self, j: int) -> Callable[[], Drawn]:
        epoch, position = divmod(j, len(self.kept))
        if self.shuffle and self._order[0] != epoch:
            self._order = (epoch, shuffled_order(len(self.kept), self.seed, epoch))
        return self.row(int(self._order[1][position]))

    def row(self, number: int) -> Callable[[], Drawn]:
        return lambda: self._first_good(number)

    def _first_good(self, number: int) -> Drawn:
        """This prompt, or the next one in the data set's order whose media are good."""
        for step in range(len(self.kept)):
            index = self.kept[(number + step) % len(self.kept)]
            if index not in self.broken:
                try:
                    return self.make(index, self._read(index))
                except MediaError as error:
                    self.drop(index, error)
        raise ValueError(f"{self.spec.label}: no row is left, the media of all of them are missing or broken.")

    def _read(self, index: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = self.data[index]
        except (OSError, SyntaxError) as error:  # `datasets` decodes images when a row is read
            raise MediaError(f"{self.spec.label}, row {index}: {error}") from error
        return row


class _StreamRows(OpenSource):
    """A source that is only read forwards."""

    def __init__(
        self,
        spec: PromptSource,
        tokenizer: PreTrainedTokenizerBase,
        data: IterableDataset,
        seed: int,
        shuffle: bool,
        processor: MediaProcessor | None,
    ):
        first = next(iter(data), None)
        if first is None:
            raise ValueError(f"{spec.label} has no rows (split={spec.split!r}); there is nothing to train on.")
        super().__init__(spec, tokenizer, list(first), processor)
        self.data = data.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER) if shuffle else data
        self.next_j, self.stream = 0, self._endless()
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
        if self.processor is None or self.spec.on_media_error == "error":
            return lambda: self.make(index, row)
        drawn = self._first_good(index, row)  # which rows are read depends on which are good: not in another thread
        return lambda: drawn

    def _next(self) -> tuple[int, dict[str, Any]]:
        return self.peeked.popleft() if self.peeked else next(self.stream)

    def _first_good(self, index: int, row: dict[str, Any]) -> Drawn:
        """This row's prompt, or that of the next one whose media are good; rows looked at come again in their turn."""
        looked = 0
        while True:
            try:
                return self.make(index, row)
            except MediaError as error:
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
            for index, row in enumerate(self.data):
                if self.keeps(index, row):
                    kept += 1
                    yield index, row
            if not kept:
                limit = self.spec.max_prompt_tokens
                raise ValueError(f"{self.spec.label}: every prompt is longer than max_prompt_tokens={limit}.")
            epoch += 1


def open_source(
    spec: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    shuffle: bool,
    processor: MediaProcessor | None = None,
) -> OpenSource:
    """Reads the rows of a source; the arguments are those of `PromptSource.load`."""
    data = spec.read()
    if isinstance(data, IterableDataset):
        return _StreamRows(spec, tokenizer, data, seed, shuffle, processor)
    return _MapRows(spec, tokenizer, data, seed, shuffle, processor)

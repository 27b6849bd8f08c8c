"""One prompt source, opened: rows become prompts, by number, within the length limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import IterableDataset
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from lightrl.data.rows import require_columns, shuffled_order
from lightrl.data.templates import encode, render_prompt

if TYPE_CHECKING:
    from lightrl.data.prompts import PromptSource

__all__ = ["Drawn", "OpenSource", "open_source"]

SHUFFLE_BUFFER = 10_000


@dataclass
class Drawn:
    """One prompt: its row number in its source, the row, the text, its tokens, and what the row itself says."""

    index: int
    row: dict[str, Any]
    text: str
    token_ids: list[int]
    raw: Any


class OpenSource(ABC):
    """One source with its tokenizer: renders rows and applies the length limit."""

    def __init__(self, spec: PromptSource, tokenizer: PreTrainedTokenizerBase, columns: Sequence[str]) -> None:
        require_columns(columns, [spec.prompt_column], spec.label, "prompt_column")
        self.spec, self.tokenizer, self.columns = spec, tokenizer, list(columns)
        self.counts = {"dropped": 0, "truncated": 0}
        self.drops = spec.max_prompt_tokens is not None and spec.overlong != "truncate_left"

    @abstractmethod
    def __len__(self) -> int:
        """Number of prompts in one pass; a stream raises `ValueError`."""

    @abstractmethod
    def draw(self, j: int) -> Drawn:
        """The j-th prompt that is asked of this source, j = 0, 1, ... without end."""

    @abstractmethod
    def row(self, number: int) -> Drawn:
        """The prompt with this number in the order of the data set."""

    def tokens(self, index: int, row: dict[str, Any]) -> tuple[str, list[int]]:
        """Text and token ids of a row, however long."""
        spec = self.spec
        try:
            text, templated = render_prompt(
                self.tokenizer,
                row.get(spec.prompt_column),
                system_prompt=spec.system_prompt,
                chat_template=spec.chat_template,
                template_kwargs=spec.template_kwargs,
            )
        except ValueError as error:
            raise ValueError(f"{spec.label}, row {index}, column {spec.prompt_column!r}: {error}") from error
        token_ids = encode(self.tokenizer, text, templated=templated)
        if not token_ids:
            raise ValueError(f"{spec.label}, row {index}: the prompt {text!r} has no tokens.")
        return text, token_ids

    def keeps(self, index: int, row: dict[str, Any]) -> bool:
        """Whether the row stays under `overlong`; counts those that do not."""
        spec = self.spec
        if not self.drops:
            return True
        length = len(self.tokens(index, row)[1])
        if length <= (spec.max_prompt_tokens or length):
            return True
        if spec.overlong == "error":
            raise ValueError(
                f"{spec.label}, row {index}: the prompt has {length} tokens, max_prompt_tokens is "
                f'{spec.max_prompt_tokens}. Raise it, or set overlong to "drop" or "truncate_left".'
            )
        self.counts["dropped"] += 1
        return False

    def make(self, index: int, row: dict[str, Any]) -> Drawn:
        """The prompt of a row that `keeps` let through."""
        text, token_ids = self.tokens(index, row)
        limit = self.spec.max_prompt_tokens
        if limit is not None and len(token_ids) > limit:
            self.counts["truncated"] += 1
            token_ids = token_ids[-limit:]
            text = str(self.tokenizer.decode(token_ids))
        return Drawn(index, row, text, token_ids, row[self.spec.prompt_column])


class _MapRows(OpenSource):
    """A source with a length and random access."""

    def __init__(self, spec: PromptSource, tokenizer: PreTrainedTokenizerBase, data: Any, seed: int, shuffle: bool):
        columns = getattr(data, "column_names", None) or dict.fromkeys(name for row in data for name in row)
        super().__init__(spec, tokenizer, list(columns))
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

    def draw(self, j: int) -> Drawn:
        epoch, position = divmod(j, len(self.kept))
        if self.shuffle and self._order[0] != epoch:
            self._order = (epoch, shuffled_order(len(self.kept), self.seed, epoch))
        return self.row(int(self._order[1][position]))

    def row(self, number: int) -> Drawn:
        index = self.kept[number]
        return self.make(index, self.data[index])


class _StreamRows(OpenSource):
    """A source that is only read forwards."""

    def __init__(
        self, spec: PromptSource, tokenizer: PreTrainedTokenizerBase, data: IterableDataset, seed: int, shuffle: bool
    ):
        first = next(iter(data), None)
        if first is None:
            raise ValueError(f"{spec.label} has no rows (split={spec.split!r}); there is nothing to train on.")
        super().__init__(spec, tokenizer, list(first))
        self.data = data.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER) if shuffle else data
        self.next_j, self.stream = 0, self._endless()

    def __len__(self) -> int:
        raise ValueError(
            f"{self.spec.label} is a stream and has no length: evaluation needs prompts with streaming=False, "
            "with `limit` or a slice of the split if there are many."
        )

    def row(self, number: int) -> Drawn:
        raise AssertionError(f"row {number} of a stream: callers ask for the length first, which raises")

    def draw(self, j: int) -> Drawn:
        if j < self.next_j:
            self.next_j, self.stream = 0, self._endless()
        while True:
            index, row = next(self.stream)
            self.next_j += 1
            if self.next_j > j:
                return self.make(index, row)

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


def open_source(spec: PromptSource, tokenizer: PreTrainedTokenizerBase, seed: int, shuffle: bool) -> OpenSource:
    """Reads the rows of a source; the arguments are those of `PromptSource.load`."""
    data = spec.read()
    if isinstance(data, IterableDataset):
        return _StreamRows(spec, tokenizer, data, seed, shuffle)
    return _MapRows(spec, tokenizer, data, seed, shuffle)

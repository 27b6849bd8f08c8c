"""Prompts for the engine: rows of a dataset, rendered and tokenized, in an order that an integer resumes.

Prompt number k of a run (k = 0, 1, 2, ... over all ranks) depends only on the sources and the seed. A run that stops
after k prompts resumes with prompt k, on any number of ranks, and k is all that a checkpoint needs.
"""

from __future__ import annotations

import copy
import heapq
import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from datasets import Dataset, IterableDataset
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightrl.compat.arguments import at_least, one_of
from lightrl.data.processing import ConversationSource, arranged, encode_prompt, require_read
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
from lightrl.records import Media, Prompts

if TYPE_CHECKING:
    from lightrl.data.processor import MediaProcessor

MIX_BLOCK = 1000
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
class PromptSource(ConversationSource):
    """Where prompts come from and how a row becomes one. The arguments of `ConversationSource`, and:

    Args:
        prompt_column: Column of the prompt: a string, or a conversation as a list of {"role": ..., "content": ...}.
            Every column, this one included, reaches the reward functions.
        max_prompt_tokens: Maximum prompt length in tokens, template included; defaults to no limit.
        overlong: Handling of longer prompts, counted in `PromptSet.counts`. "drop" leaves the row out and "error"
            stops the run; both tokenize all rows once at the start. "truncate_left" keeps the last
            `max_prompt_tokens` tokens, and never cuts through an image or what follows it (see `on_media_error`).
        shuffle: New order of the training prompts in every pass. False keeps the order of the rows.
    """

    prompt_column: str = "prompt"
    max_prompt_tokens: int | None = None
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("PromptSource.max_prompt_tokens", self.max_prompt_tokens, 1, or_none="for no limit")
        one_of("PromptSource.overlong", self.overlong, "drop", "truncate_left", "error")

    def load(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int = 0,
        shuffle: bool = True,
        processor: MediaProcessor | None = None,
        check_column: str | None = None,
        check_row: Callable[[Mapping[str, Any]], None] | None = None,
        room: tuple[int, int] | None = None,
    ) -> PromptSet:
        """Reads the rows.

        Args:
            tokenizer: Renders and tokenizes the prompts.
            seed: Seed of the order, 0 or more.
            shuffle: New order in every pass, if the source shuffles; otherwise the order of the dataset.
            processor: Processor from `load_processor`; None for a text model.
            check_column: Column that `check_row` needs.
            check_row: Further check of every row; raises a `ValueError` about a row that cannot be used.
            room: Tokens of a sequence in the engine, and those of them kept for the completion; None if unknown.
                Without `max_prompt_tokens`, a text prompt that leaves less is an error.
        """
        reading = Reading(tokenizer, seed, shuffle, processor, check_column, check_row, room)
        return PromptSet([open_source(self, reading)], [1.0], seed=seed)


@dataclass
class PromptMixture:
    """Several sources, mixed.

    Each 1,000 prompts hold every source in proportion to its weight (rounded to 1/1000, at least one prompt), in an
    order shuffled by the seed. A source that is used up starts over in a new order.

    Args:
        sources: The sources. Columns that a source lacks are None in its rows.
        weights: Relative weights above 0, one per source; defaults to equal weights.
    """

    sources: list[PromptSource]
    weights: list[float] | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("PromptMixture.sources is empty: give at least one source.")
        if self.weights is not None and (
            len(self.weights) != len(self.sources) or not all(0 < w < math.inf for w in self.weights)
        ):
            raise ValueError(
                f"PromptMixture.weights={self.weights}: needs one weight above 0 for each of the {len(self.sources)} "
                "sources; leave a source out instead of giving it weight 0."
            )

    def load(self, tokenizer: PreTrainedTokenizerBase, **options: Any) -> PromptSet:
        """Reads the rows of all sources; the arguments are those of `PromptSource.load`."""
        reading = Reading(tokenizer, **options)
        opened = [open_source(s, replace(reading, seed=reading.seed + i)) for i, s in enumerate(self.sources)]
        return PromptSet(opened, self.weights or [1.0] * len(opened), seed=reading.seed)


def prompt_source(prompts: Any, argument: str) -> PromptSource | PromptMixture:
    """A source from what may be given instead: a path or hub name, a list of dictionaries, a `datasets.Dataset`.

    Raises:
        ValueError: It is something else; the message names `argument`.
    """
    if isinstance(prompts, PromptSource | PromptMixture):
        return prompts
    if isinstance(prompts, str | os.PathLike):
        return PromptSource(path=os.fspath(prompts))
    rows = isinstance(prompts, list) and all(isinstance(row, dict) for row in prompts)
    if (rows or isinstance(prompts, Dataset)) and len(prompts) == 0:
        raise ValueError(f"{argument}=[] has no rows: give one or more.")
    if rows or isinstance(prompts, Dataset | IterableDataset):
        return PromptSource(rows=prompts)
    raise ValueError(
        f"{argument}={repr(prompts)[:80]}: give a PromptSource or PromptMixture, a path or hub name, a list of "
        "dictionaries, or a datasets.Dataset."
    )


RENDERING = ("system_prompt", "chat_template", "template_kwargs")
_DEFAULTS = {each.name: each.default for each in fields(ConversationSource) if each.name in RENDERING}


def rendered_like(source: Any, other: Any) -> Any:
    """A copy of `source` that renders its rows like `other`, except for what it sets itself.

    Settings left at their defaults (`system_prompt`, `chat_template`, `template_kwargs`) are the other's, if all parts
    of a mixture agree on them. Single variables in `template_kwargs` override the other's.
    """
    if isinstance(source, PromptMixture):
        changed = copy.copy(source)
        changed.sources = [rendered_like(part, other) for part in source.sources]
        return changed
    other = getattr(other, "source", other)
    parts = other.sources if isinstance(other, PromptMixture) else [other]
    changed = copy.copy(source)
    for name in RENDERING:
        theirs = getattr(parts[0], name)
        if any(getattr(part, name) != theirs for part in parts):
            continue
        if name == "template_kwargs":
            changed.template_kwargs = {**theirs, **source.template_kwargs}
        elif getattr(source, name) == _DEFAULTS[name]:
            setattr(changed, name, theirs)
    return changed


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

    def __init__(self, spec: PromptSource, columns: Sequence[str], reading: Reading) -> None:
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

    def __init__(self, spec: PromptSource, data: Any, reading: Reading) -> None:
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

    def __init__(self, spec: PromptSource, data: IterableDataset, reading: Reading) -> None:
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


def open_source(spec: PromptSource, reading: Reading) -> OpenSource:
    """Reads the rows of a source."""
    data = spec.read()
    return _StreamRows(spec, data, reading) if isinstance(data, IterableDataset) else _MapRows(spec, data, reading)


class PromptSet:
    """Prompts by number, from one source or a mixture. Made by `PromptSource.load` and `PromptMixture.load`.

    A streaming source has no length and is only read forwards. A resumed run reads and skips all rows before its place,
    every rank reads every row, and the order is shuffled within a buffer of 10,000 rows.

    Args:
        sources: Opened sources.
        weights: Share of each in a mixture, above 0.
        seed: Seed of the mixture's order.
    """

    success_reward: float | None = None
    """Reward from which on an attempt has succeeded, for sets whose next prompts depend on it (`observe`)."""

    def __init__(self, sources: Sequence[OpenSource], weights: Sequence[float], *, seed: int) -> None:
        self._sources = list(sources)
        self._seed = seed
        self._shares = _block_shares(weights)
        self._pattern: tuple[int, np.ndarray[Any, Any]] = (-1, np.zeros(0, dtype=np.int64))
        self._pool: ThreadPoolExecutor | None = None
        self.columns = list(dict.fromkeys(name for source in sources for name in source.columns))

    def observe(self, visits: Sequence[tuple[int, float]], cursor: int) -> dict[str, float]:
        """Records how the attempts of a rollout went, and returns metrics; see `CurriculumSet`."""
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        """What was observed, the same on every rank."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what was observed."""

    @property
    def sources(self) -> list[OpenSource]:
        """What the prompts come from."""
        return list(self._sources)

    def __len__(self) -> int:
        """Number of prompts of all sources, without dropped rows.

        Raises:
            ValueError: a source is a stream.
        """
        return sum(len(source) for source in self._sources)

    def require_free(self, names: Iterable[str]) -> None:
        """Raises a `ValueError` about a column that values of LightRL with the same name would hide.

        Args:
            names: those that reward functions and environments get in addition to the columns.
        """
        for source in self._sources:
            hidden = sorted({*names} & {*source.columns} - {source.spec.prompt_column})
            if hidden:
                raise ValueError(
                    f"{source.spec.label}: column {hidden[0]!r}: reward functions and environments get LightRL's own "
                    "values under this name, which would hide the column. Rename it."
                )

    @cached_property
    def max_prompt_tokens(self) -> int | None:
        """Upper bound on the tokens of a prompt; None if a source is a stream or has media, and no limit."""
        limits = [source.longest() for source in self._sources]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    @property
    def counts(self) -> dict[str, int]:
        """`dropped` rows and `truncated` prompts so far, over all sources, on this rank."""
        names = ("dropped", "truncated")
        return {name: sum(source.counts[name] for source in self._sources) for name in names}

    def batch(self, cursor: int, count: int, *, rank: int = 0, world_size: int = 1) -> Prompts:
        """This rank's share of prompts `cursor ... cursor + count - 1`: every `world_size`-th one, from `rank` on.

        Args:
            cursor: Number of earlier prompts, over all ranks; all that a resumed run has to know.
            count: Number of prompts over all ranks, a multiple of `world_size`.
            rank: Rank of this process.
            world_size: Number of processes.
        """
        if count % world_size:
            raise ValueError(f"count={count}: {world_size} ranks cannot share it; take a multiple of {world_size}.")
        picks = [self._place(k) for k in range(cursor + rank, cursor + count, world_size)]
        return self._collect([self._sources[s].draw(j) for s, j in picks])

    def rows(self, numbers: Sequence[int]) -> Prompts:
        """The prompts with these numbers in `range(len(self))`, in the order of the data sets, one after the other."""
        ends = np.cumsum([len(source) for source in self._sources])
        drawn = []
        for number in numbers:
            if not 0 <= number < ends[-1]:
                raise ValueError(f"There is no prompt {number}: there are {ends[-1]}.")
            s = int(np.searchsorted(ends, number, side="right"))
            drawn.append(self._sources[s].row(int(number - (ends[s - 1] if s else 0))))
        return self._collect(drawn)

    def _place(self, k: int) -> tuple[int, int]:
        """Prompt k as (source, number within the source)."""
        if len(self._shares) == 1:
            return 0, k
        block, position = divmod(k, MIX_BLOCK)
        if self._pattern[0] != block:
            sources = np.repeat(np.arange(len(self._shares)), self._shares)
            self._pattern = (block, sources[shuffled_order(MIX_BLOCK, self._seed, block)])
        pattern = self._pattern[1]
        source = int(pattern[position])
        return source, block * self._shares[source] + int(np.count_nonzero(pattern[:position] == source))

    def _collect(self, draws: list[Callable[[], Drawn]]) -> Prompts:
        """Makes the prompts, those with media in worker threads: decoding and resizing release Python's lock."""
        sees = any(source.processor is not None for source in self._sources)
        if sees and len(draws) > 1:
            self._pool = self._pool or ThreadPoolExecutor(min(8, os.cpu_count() or 1), "lightrl-media")
            drawn = list(self._pool.map(lambda draw: draw(), draws))
        else:
            drawn = [draw() for draw in draws]
        return Prompts(
            token_ids=[d.token_ids for d in drawn],
            texts=[d.text for d in drawn],
            columns={name: [d.row.get(name) for d in drawn] for name in self.columns},
            indices=[d.index for d in drawn],
            inputs=[d.inputs for d in drawn],
            raw=[d.raw for d in drawn],
            media=[d.media for d in drawn] if sees else [],
        )


def _block_shares(weights: Sequence[float]) -> list[int]:
    """How many of `MIX_BLOCK` prompts each source gives: proportional, largest remainders first, at least one."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * MIX_BLOCK
    shares = np.maximum(np.floor(exact).astype(int), 1)
    while shares.sum() != MIX_BLOCK:
        step = 1 if shares.sum() < MIX_BLOCK else -1
        gap = np.where(shares + step >= 1, step * (exact - shares), -np.inf)
        shares[int(np.argmax(gap))] += step
    return [int(share) for share in shares]

"""Prompts for the engine: rows of a data set, rendered, tokenised, in an order that an integer resumes.

Prompt number k of a run (k = 0, 1, 2, ... over all ranks) is a function of the sources and the seed alone. A run that
stops after k prompts goes on with prompt k, on any number of ranks, and nothing but k has to be saved.

Letters: P prompts, N rows of one source, S sources.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightrl.data.media import MediaSource
from lightrl.data.processing import MediaProcessor
from lightrl.data.prompt_rows import Drawn, OpenSource, open_source
from lightrl.data.rows import shuffled_order
from lightrl.data.templates import ChatTemplate
from lightrl.types import Prompts

__all__ = ["PromptMixture", "PromptSet", "PromptSource"]

MIX_BLOCK = 1000


@dataclass
class PromptSource(MediaSource):
    """Where prompts come from and how a row becomes one. The arguments of `RowSource` and `MediaSource`, and:

    Args:
        prompt_column: column of the prompt: a string, or a conversation as a list of {"role": ..., "content": ...}.
            Every column, this one included, reaches the reward functions.
        system_prompt: put in front of every conversation as the system's turn; needs a chat template.
        chat_template: whether a string becomes the user's turn of the tokenizer's chat template: true, false, or
            "auto" for true where the tokenizer has one. Conversations always use it.
        template_kwargs: further variables of the chat template, such as `enable_thinking`.
        max_prompt_tokens: longest prompt in tokens, the template's included; None is no limit.
        overlong: what happens to longer ones. "drop" leaves the row out and "error" stops the run; both tokenise all
            rows once at the start. "truncate_left" keeps the last `max_prompt_tokens` tokens, which cuts a template's
            opening, too; never through an image or what follows it, which `on_media_error` treats. Rows are counted in
            `PromptSet.counts`. Rows with media are decoded once more for their length.
    """

    prompt_column: str = "prompt"
    system_prompt: str | None = None
    chat_template: ChatTemplate = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    overlong: Literal["drop", "truncate_left", "error"] = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"PromptSource.max_prompt_tokens={self.max_prompt_tokens}: must be at least 1, or None.")
        if self.overlong not in ("drop", "truncate_left", "error"):
            raise ValueError(f'PromptSource.overlong={self.overlong!r}: must be "drop", "truncate_left" or "error".')

    def load(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int = 0,
        shuffle: bool = True,
        processor: MediaProcessor | None = None,
    ) -> PromptSet:
        """Reads the rows.

        Args:
            tokenizer: renders and tokenises the prompts.
            seed: of the order, 0 or more.
            shuffle: a new order in every pass; otherwise the order of the data set.
            processor: of the model's media, from `load_processor`; None for a model of text.
        """
        return PromptSet([open_source(self, tokenizer, seed, shuffle, processor)], [1.0], seed=seed)


@dataclass
class PromptMixture:
    """Several sources, mixed.

    Each 1,000 prompts hold every source in proportion to its weight (rounded to 1/1000, at least one prompt), in an
    order shuffled by the seed. A source that is used up starts over, in a new order, while others go on.

    Args:
        sources: the sources. Columns that a source lacks are None in its rows.
        weights: relative weights above 0, one per source; equal where None.
    """

    sources: list[PromptSource]
    weights: list[float] | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("PromptMixture.sources is empty: give at least one source.")
        if self.weights is not None and (len(self.weights) != len(self.sources) or min(self.weights) <= 0):
            raise ValueError(
                f"PromptMixture.weights={self.weights}: needs one weight above 0 for each of the {len(self.sources)} "
                "sources; leave a source out instead of giving it weight 0."
            )

    def load(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int = 0,
        shuffle: bool = True,
        processor: MediaProcessor | None = None,
    ) -> PromptSet:
        """Reads the rows of all sources; the arguments are those of `PromptSource.load`."""
        opened = [open_source(source, tokenizer, seed + i, shuffle, processor) for i, source in enumerate(self.sources)]
        return PromptSet(opened, self.weights or [1.0] * len(opened), seed=seed)


class PromptSet:
    """Prompts by number, from one source or a mixture. Made by `PromptSource.load` and `PromptMixture.load`.

    With a streaming source there is no length, and prompts are only read forwards: going back starts the stream over,
    so a resumed run reads (and skips) all rows before its place, every rank reads every row, and the order is shuffled
    within a buffer of 10,000 rows only.

    Args:
        sources: opened sources.
        weights: share of each in a mixture, above 0.
        seed: of the order in which a mixture takes turns.
    """

    def __init__(self, sources: Sequence[OpenSource], weights: Sequence[float], *, seed: int) -> None:
        self._sources, self._seed = list(sources), seed
        self._shares = _block_shares(weights)
        self._pattern: tuple[int, np.ndarray[Any, Any]] = (-1, np.zeros(0, dtype=np.int64))
        self._pool: ThreadPoolExecutor | None = None
        self._columns = list(dict.fromkeys(name for source in sources for name in source.columns))

    def __len__(self) -> int:
        """Number of prompts of all sources, without dropped rows.

        Raises:
            ValueError: a source is a stream.
        """
        return sum(len(source) for source in self._sources)

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt that can come out; None where a source has no limit."""
        limits = [source.spec.max_prompt_tokens for source in self._sources]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    @property
    def counts(self) -> dict[str, int]:
        """`dropped` rows and `truncated` prompts so far, over all sources, on this rank."""
        names = ("dropped", "truncated")
        return {name: sum(source.counts[name] for source in self._sources) for name in names}

    def batch(self, cursor: int, count: int, *, rank: int = 0, world_size: int = 1) -> Prompts:
        """This rank's share of prompts `cursor ... cursor + count - 1`: every `world_size`-th one, from `rank` on.

        Args:
            cursor: number of prompts that went before, over all ranks; what a resumed run has to know.
            count: number of prompts over all ranks, a multiple of `world_size`.
            rank: of this process. world_size: number of processes.
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
            columns={name: [d.row.get(name) for d in drawn] for name in self._columns},
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

"""Prompts in the order in which a run draws them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lightrl.data.opened_sources import Drawn, OpenSource
from lightrl.data.rows import (
    shuffled_order,
)
from lightrl.records import Prompts

if TYPE_CHECKING:
    pass


MIX_BLOCK = 1000


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

"""Indexed access to the prompts of a run."""

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
    """Prompts by index, from one or more sources. Created by `PromptSource.load` and `PromptMixture.load`.

    A streaming source has no length and is read only forward. A resumed run skips all earlier examples, every rank
    reads every example, and shuffling uses a buffer of 10,000 examples.

    Args:
        sources: Opened sources.
        weights: Weights of the sources, above 0.
        seed: Random seed of the mixture's order.
    """

    success_reward: float | None = None
    """Minimum reward of a successful trajectory, for sets whose next prompts depend on it (`observe`)."""

    def __init__(self, sources: Sequence[OpenSource], weights: Sequence[float], *, seed: int) -> None:
        self._sources = list(sources)
        self._seed = seed
        self._shares = _block_shares(weights)
        self._pattern: tuple[int, np.ndarray[Any, Any]] = (-1, np.zeros(0, dtype=np.int64))
        self._pool: ThreadPoolExecutor | None = None
        self.columns = list(dict.fromkeys(name for source in sources for name in source.columns))

    def observe(self, visits: Sequence[tuple[int, float]], cursor: int) -> dict[str, float]:
        """Records success rates of a rollout and returns metrics. See `CurriculumSet`."""
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the observed success rates, equal on all ranks."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of `state_dict`."""

    @property
    def sources(self) -> list[OpenSource]:
        """The opened sources."""
        return list(self._sources)

    def __len__(self) -> int:
        """Returns the number of prompts in all sources, without dropped examples.

        Raises:
            ValueError: If a source is a stream.
        """
        return sum(len(source) for source in self._sources)

    def require_free(self, names: Iterable[str]) -> None:
        """Raises a `ValueError` if a column has a reserved name.

        Args:
            names: Names of the arguments that LightRL passes to reward functions and environments.
        """
        for source in self._sources:
            hidden = sorted({*names} & {*source.columns} - {source.spec.prompt_column})
            if hidden:
                raise ValueError(
                    f"{source.spec.label}: column {hidden[0]!r}: the name is reserved for an argument that LightRL "
                    "passes to reward functions and environments. Rename the column."
                )

    @cached_property
    def max_prompt_tokens(self) -> int | None:
        """Maximum prompt length in tokens; None if unknown (streams and media without a limit)."""
        limits = [source.longest() for source in self._sources]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    @property
    def counts(self) -> dict[str, int]:
        """Number of `dropped` examples and `truncated` prompts so far, on this rank."""
        names = ("dropped", "truncated")
        return {name: sum(source.counts[name] for source in self._sources) for name in names}

    def batch(self, cursor: int, count: int, *, rank: int = 0, world_size: int = 1) -> Prompts:
        """Returns this rank's prompts from `cursor ... cursor + count - 1`, every `world_size`-th one from `rank`.

        Args:
            cursor: Global index of the first prompt.
            count: Number of prompts across all ranks, a multiple of `world_size`.
            rank: Rank of this process.
            world_size: Number of processes.
        """
        if count % world_size:
            raise ValueError(f"count={count}: {world_size} ranks can't share it. Use a multiple of {world_size}.")
        picks = [self._place(k) for k in range(cursor + rank, cursor + count, world_size)]
        return self._collect([self._sources[s].draw(j) for s, j in picks])

    def rows(self, numbers: Sequence[int]) -> Prompts:
        """Returns the prompts with these indices in the concatenated datasets."""
        ends = np.cumsum([len(source) for source in self._sources])
        drawn = []
        for number in numbers:
            if not 0 <= number < ends[-1]:
                raise ValueError(f"numbers={number}: out of range. Use 0 to {ends[-1] - 1}.")
            s = int(np.searchsorted(ends, number, side="right"))
            drawn.append(self._sources[s].row(int(number - (ends[s - 1] if s else 0))))
        return self._collect(drawn)

    def _place(self, k: int) -> tuple[int, int]:
        """Returns prompt k as (source, index within the source)."""
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
        """Creates the prompts. Decodes media in threads, because decoding and resizing release the GIL."""
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
    """Returns each source's number of prompts per `MIX_BLOCK`, by largest remainders, at least one."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * MIX_BLOCK
    shares = np.maximum(np.floor(exact).astype(int), 1)
    while shares.sum() != MIX_BLOCK:
        step = 1 if shares.sum() < MIX_BLOCK else -1
        gap = np.where(shares + step >= 1, step * (exact - shares), -np.inf)
        shares[int(np.argmax(gap))] += step
    return [int(share) for share in shares]

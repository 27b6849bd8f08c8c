"""Prompt sources, which load, render, and tokenize dataset examples in a resumable order.

Prompt k of a run (k = 0, 1, 2, ... across all ranks) depends only on the sources and the seed. A run that stops after
k prompts resumes at prompt k, on any number of ranks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from lightrl.data.processing import ConversationSource, Drawn, OpenSource, Reading, open_source
from lightrl.data.rows import shuffled_order
from lightrl.records import Prompts

MIX_BLOCK = 1000


class PromptSet:
    """Prompts by index, from one or more sources. Created by `PromptSource.load` and `PromptMixture.load`.

    A streaming source has no length and is read only forward. A resumed run skips all earlier examples, every rank
    reads every example, and shuffling uses a buffer of 10,000 examples.

    Args:
        sources: Opened sources.
        weights: Weights of the sources, above 0.
        seed: Random seed for the order of the mixture.
    """

    def __init__(self, sources: Sequence[OpenSource], weights: Sequence[float], *, seed: int) -> None:
        self.sources = list(sources)
        self._seed = seed
        self._shares = _block_shares(weights)
        self._pool: ThreadPoolExecutor | None = None
        self.columns = list(dict.fromkeys(name for source in sources for name in source.columns))

    def observe(self, rewards: Sequence[tuple[int, Sequence[float]]], cursor: int) -> dict[str, float]:
        """Records the rewards of a rollout and returns metrics. See `CurriculumSet`."""
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the observed success rates, equal on all ranks."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of `state_dict`."""

    def __len__(self) -> int:
        """Returns the number of prompts in all sources, without dropped examples.

        Raises:
            ValueError: If a source is a stream.
        """
        return sum(len(source) for source in self.sources)

    @cached_property
    def max_prompt_tokens(self) -> int | None:
        """Maximum prompt length in tokens; None if unknown (streams and media without a limit)."""
        limits = [source.longest for source in self.sources]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    @property
    def counts(self) -> dict[str, int]:
        """Number of `dropped` examples and `truncated` prompts so far, on this rank."""
        names = ("dropped", "truncated")
        return {name: sum(source.counts[name] for source in self.sources) for name in names}

    def batch(self, cursor: int, count: int, *, rank: int = 0, world_size: int = 1) -> Prompts:
        """Returns this rank's prompts from `cursor ... cursor + count - 1`, every `world_size`-th one from `rank`.

        Args:
            cursor: Global index of the first prompt.
            count: Number of prompts across all ranks, a multiple of `world_size`.
            rank: Rank of this process.
            world_size: Number of processes.
        """
        picks = [self._place(k) for k in range(cursor + rank, cursor + count, world_size)]
        return self._collect([self.sources[s].draw(j) for s, j in picks])

    def rows(self, numbers: Sequence[int]) -> Prompts:
        """Returns the prompts with these indices in the concatenated datasets."""
        ends = np.cumsum([len(source) for source in self.sources])
        drawn = []
        for number in numbers:
            s = int(np.searchsorted(ends, number, side="right"))
            drawn.append(self.sources[s].row(int(number - (ends[s - 1] if s else 0))))
        return self._collect(drawn)

    def _place(self, k: int) -> tuple[int, int]:
        """Returns prompt k as (source, index within the source)."""
        if len(self._shares) == 1:
            return 0, k
        block, position = divmod(k, MIX_BLOCK)
        sources = np.repeat(np.arange(len(self._shares)), self._shares)
        pattern = sources[shuffled_order(MIX_BLOCK, self._seed, block)]
        source = int(pattern[position])
        return source, block * self._shares[source] + int(np.count_nonzero(pattern[:position] == source))

    def _collect(self, draws: list[Callable[[], Drawn]]) -> Prompts:
        """Creates the prompts. Decodes media in threads, because decoding and resizing release the GIL."""
        sees = any(source.processor is not None for source in self.sources)
        if sees and len(draws) > 1:
            self._pool = self._pool or ThreadPoolExecutor(min(8, os.cpu_count() or 1), "lightrl-media")
            drawn = list(self._pool.map(lambda draw: draw(), draws))
        else:
            drawn = [draw() for draw in draws]
        encoded = [d.encoded for d in drawn]
        return Prompts(
            token_ids=[e.token_ids for e in encoded],
            texts=[e.text for e in encoded],
            columns={name: [d.row.get(name) for d in drawn] for name in self.columns},
            indices=[d.index for d in drawn],
            inputs=[e.inputs for e in encoded],
            raw=[d.raw for d in drawn],
            media=[e.media for e in encoded] if sees else [],
        )


@dataclass
class PromptSource(ConversationSource):
    """Dataset of prompts. Accepts the arguments of `ConversationSource` and the following.

    Args:
        prompt_column: Column with the prompt, a string or a list of {"role": ..., "content": ...} messages. Reward
            functions receive all columns, including this one.
        max_prompt_tokens: Maximum prompt length in tokens, including the template. Defaults to no limit.
        overlong: How to handle longer prompts, which `PromptSet.counts` counts. "drop" skips the example and "error"
            stops the run; both decode all media at the start. "truncate_left" keeps the BOS and the last tokens, up to
            `max_prompt_tokens`, and never removes media or the text after it.
        shuffle: Whether to reshuffle training prompts in every pass.
    """

    prompt_column: str = "prompt"
    max_prompt_tokens: int | None = None
    overlong: Literal["drop", "truncate_left", "error"] = "drop"
    shuffle: bool = True

    def load(self, tokenizer: PreTrainedTokenizerBase, **options: Any) -> PromptSet:
        """Loads the prompts. See `Reading` for the arguments."""
        return PromptMixture([self]).load(tokenizer, **options)


@dataclass
class PromptMixture:
    """Weighted mixture of prompt sources.

    Each 1,000 prompts contain every source in proportion to its weight (rounded to 1/1000, at least one prompt), in
    random order. An exhausted source restarts in a new order.

    Args:
        sources: The sources. Columns missing in a source are None.
        weights: Relative weights above 0, one per source. Defaults to equal weights.
    """

    sources: list[PromptSource]
    weights: list[float] | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and (len(self.weights) != len(self.sources) or not min(self.weights) > 0):
            raise ValueError(
                f"PromptMixture.weights={self.weights}: needs one weight above 0 for each of the {len(self.sources)} "
                "sources. Remove sources with weight 0."
            )

    def load(self, tokenizer: PreTrainedTokenizerBase, **options: Any) -> PromptSet:
        """Loads the prompts of all sources. See `Reading` for the arguments."""
        reading = Reading(tokenizer, **options)
        opened = [open_source(s, replace(reading, seed=reading.seed + i)) for i, s in enumerate(self.sources)]
        return PromptSet(opened, self.weights or [1.0] * len(opened), seed=reading.seed)


def prompt_source(prompts: Any) -> Any:
    """Converts a path, dataset ID, list, or `datasets.Dataset` to a source. Returns sources unchanged."""
    if isinstance(prompts, str | os.PathLike):
        return PromptSource(path=os.fspath(prompts))
    return PromptSource(rows=prompts) if isinstance(prompts, list | Dataset | IterableDataset) else prompts


def _block_shares(weights: Sequence[float]) -> list[int]:
    """Returns each source's number of prompts per `MIX_BLOCK`, by largest remainders, at least one."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * MIX_BLOCK
    shares = np.maximum(np.floor(exact).astype(int), 1)
    while shares.sum() != MIX_BLOCK:
        step = 1 if shares.sum() < MIX_BLOCK else -1
        gap = np.where(shares + step >= 1, step * (exact - shares), -np.inf)
        shares[int(np.argmax(gap))] += step
    return [int(share) for share in shares]


RENDERING = ("system_prompt", "chat_template", "template_kwargs")


def rendered_like(source: Any, other: Any) -> Any:
    """Returns a copy of `source` whose unset rendering settings come from `other`.

    Copies `system_prompt`, `chat_template`, and `template_kwargs` if they have their default and all parts of a mixture
    agree on them. Variables in the source's `template_kwargs` override the variables of `other`.
    """
    if isinstance(source, PromptMixture):
        return replace(source, sources=[rendered_like(part, other) for part in source.sources])
    other = getattr(other, "source", other)
    parts = other.sources if isinstance(other, PromptMixture) else [other]
    changed = copy.copy(source)
    for name in RENDERING:
        theirs = getattr(parts[0], name)
        if any(getattr(part, name) != theirs for part in parts):
            continue
        if name == "template_kwargs":
            changed.template_kwargs = {**theirs, **source.template_kwargs}
        elif getattr(source, name) == getattr(ConversationSource, name):
            setattr(changed, name, theirs)
    return changed

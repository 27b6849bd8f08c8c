"""Prompts for the engine: rows of a dataset, rendered and tokenized, in an order that an integer resumes.

Prompt number k of a run (k = 0, 1, 2, ... over all ranks) depends only on the sources and the seed. A run that stops
after k prompts resumes with prompt k, on any number of ranks, and k is all that a checkpoint needs.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from lightrl.compat.arguments import at_least, one_of
from lightrl.data.opened_sources import Reading, open_source
from lightrl.data.processing import ConversationSource
from lightrl.data.prompt_sets import PromptSet

if TYPE_CHECKING:
    from lightrl.data.processor import MediaProcessor


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

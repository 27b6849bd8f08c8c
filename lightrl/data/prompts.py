"""Prompt sources, which load, render, and tokenize dataset examples in a resumable order.

Prompt k of a run (k = 0, 1, 2, ... across all ranks) depends only on the sources and the seed. A run that stops after
k prompts resumes at prompt k, on any number of ranks, and checkpoints store only k.
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
    """Dataset of prompts. Accepts the arguments of `ConversationSource` and the following.

    Args:
        prompt_column: Column with the prompt, a string or a list of {"role": ..., "content": ...} messages. Reward
            functions receive all columns, including this one.
        max_prompt_tokens: Maximum prompt length in tokens, including the template. Defaults to no limit.
        overlong: How to handle longer prompts, which `PromptSet.counts` counts. "drop" skips the example and "error"
            stops the run; both tokenize all examples at the start. "truncate_left" keeps the last `max_prompt_tokens`
            tokens, and never removes media or the text after it (see `on_media_error`).
        shuffle: Whether to reshuffle training prompts in every pass.
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
        """Loads the prompts.

        Args:
            tokenizer: Tokenizer that renders and tokenizes the prompts.
            seed: Random seed of the order, 0 or more.
            shuffle: Whether to reshuffle in every pass. Requires `PromptSource.shuffle`.
            processor: Processor from `load_processor`, or None for a text model.
            check_column: Column that `check_row` needs.
            check_row: Function that raises a `ValueError` for an invalid example.
            room: Maximum sequence length of the engine and maximum completion length in tokens, or None if unknown.
                Without `max_prompt_tokens`, a text prompt that leaves too little room is an error.
        """
        reading = Reading(tokenizer, seed, shuffle, processor, check_column, check_row, room)
        return PromptSet([open_source(self, reading)], [1.0], seed=seed)


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
        if not self.sources:
            raise ValueError("PromptMixture.sources=[]: there are no sources. Add at least one.")
        if self.weights is not None and (
            len(self.weights) != len(self.sources) or not all(0 < w < math.inf for w in self.weights)
        ):
            raise ValueError(
                f"PromptMixture.weights={self.weights}: needs one weight above 0 for each of the {len(self.sources)} "
                "sources. Remove sources with weight 0."
            )

    def load(self, tokenizer: PreTrainedTokenizerBase, **options: Any) -> PromptSet:
        """Loads the prompts of all sources. See `PromptSource.load` for the arguments."""
        reading = Reading(tokenizer, **options)
        opened = [open_source(s, replace(reading, seed=reading.seed + i)) for i, s in enumerate(self.sources)]
        return PromptSet(opened, self.weights or [1.0] * len(opened), seed=reading.seed)


def prompt_source(prompts: Any, argument: str) -> PromptSource | PromptMixture:
    """Converts a path, dataset ID, list of dictionaries, or `datasets.Dataset` to a source.

    Raises:
        ValueError: If `prompts` has another type. The message names `argument`.
    """
    if isinstance(prompts, PromptSource | PromptMixture):
        return prompts
    if isinstance(prompts, str | os.PathLike):
        return PromptSource(path=os.fspath(prompts))
    rows = isinstance(prompts, list) and all(isinstance(row, dict) for row in prompts)
    if (rows or isinstance(prompts, Dataset)) and len(prompts) == 0:
        raise ValueError(f"{argument}=[]: there are no examples. Add at least one.")
    if rows or isinstance(prompts, Dataset | IterableDataset):
        return PromptSource(rows=prompts)
    raise ValueError(
        f"{argument}={repr(prompts)[:80]}: unsupported type. Use a PromptSource or PromptMixture, a path or dataset "
        "ID, a list of dictionaries, or a datasets.Dataset."
    )


RENDERING = ("system_prompt", "chat_template", "template_kwargs")
_DEFAULTS = {each.name: each.default for each in fields(ConversationSource) if each.name in RENDERING}


def rendered_like(source: Any, other: Any) -> Any:
    """Returns a copy of `source` whose unset rendering settings are those of `other`.

    Copies `system_prompt`, `chat_template`, and `template_kwargs` if they have their default and all parts of a mixture
    agree on them. Variables in the source's `template_kwargs` override those of `other`.
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

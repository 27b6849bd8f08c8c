"""Preference pairs: a prompt with a completion that was chosen and one that was rejected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrl.compat.arguments import at_least, one_of
from lightrl.data.processing import columns_with_media
from lightrl.data.rows import COLUMNS, RowSource, selected
from lightrl.data.sft import SFTDataModule, SFTSource, check_positions
from lightrl.data.sft_loader import SFTLoader
from lightrl.data.templates import ChatTemplate, as_messages, load_tokenizer
from lightrl.models.loading import positions_of, require_vocabulary
from lightrl.models.turns import text_ids
from lightrl.ops.masking import pad_rows

MAX_MARGIN = 1e6
"""Scores are a few units apart."""


class PreferencePair(NamedTuple):
    """Token ids of both sequences, prompt included, and by how much the chosen one is better."""

    chosen: list[int]
    rejected: list[int]
    margin: float


@dataclass
class PreferenceSource(RowSource):
    """Where preference pairs come from. The arguments of `RowSource`, and:

    Args:
        prompt_column: column of the prompt: a string, or a conversation. None: `chosen` and `rejected` are whole
            conversations that end with an assistant turn and are equal before it.
        chosen_column: Column of the preferred completion: a string, or a list of messages that ends with an assistant
            turn.
        rejected_column: column of the other one.
        margin_column: column with a number, how much better the chosen one is in units of score; None is 0.
        system_prompt: put in front of every conversation; needs a chat template.
        chat_template: as in `PromptSource`. The same rendering as in reinforcement learning, token for token.
        template_kwargs: Further variables of the chat template; a row's own are in columns, as in `SFTSource`.
        tools_column: Column of a row's tools, as in `SFTSource`.
        rendering: what the reward model is to score in PPO. "tokens": prompt, completion and end of turn,
            tokenized as they are sampled, for `RewardModelSpec(tokenizer="policy")`. "text": prompt and completion as
            one text without end, for `RewardModelSpec(tokenizer="own")` without a chat template of its own.
        max_tokens: longest sequence in tokens, prompt and completion together; None is no limit.
        overlong: what happens to pairs with a longer one: "drop" leaves them out (and says how many), "error" stops.
    """

    prompt_column: str | None = "prompt"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    margin_column: str | None = None
    system_prompt: str | None = None
    chat_template: ChatTemplate = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools_column: str | None = "tools"
    rendering: Literal["tokens", "text"] = "tokens"
    max_tokens: int | None = None
    overlong: Literal["drop", "error"] = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("PreferenceSource.rendering", self.rendering, "tokens", "text")
        one_of("PreferenceSource.overlong", self.overlong, "drop", "error")
        at_least("PreferenceSource.max_tokens", self.max_tokens, 2, or_none="for no limit")
        if self.streaming:
            raise ValueError("PreferenceSource.streaming=True: pairs are shuffled in whole passes; use `limit`.")

    def tokenized(
        self, tokenizer: PreTrainedTokenizerBase, positions: tuple[int, bool] | None = None
    ) -> list[PreferencePair]:
        """All pairs, without those that are too long (see `overlong`); warns about pairs with equal sides.

        Args:
            tokenizer: Renders and tokenizes.
            positions: Positions of the model, from `positions_of`; longer pairs are an error or a warning.

        Raises:
            ValueError: A missing column, a margin outside 0 to 1e6, different prompts in a pair, or no usable pair.
        """
        columns: tuple[str, ...] = ("prompt_column", "chosen_column", "rejected_column", "margin_column")
        if self.tools_column != "tools":
            columns = (*columns, "tools_column")
        optional = (*self._rows_of(None, self.chosen_column).rendering_columns, *COLUMNS)
        data, good = self.usable_rows(columns, self._check, optional)
        if len(good) < len(data):
            data = selected(data, good)
        chosen, rejected = (self._side(tokenizer, data, c) for c in (self.chosen_column, self.rejected_column))
        margins = [self._margin(data[i]) for i in range(len(data))]
        pairs = [PreferencePair(*pair) for pair in zip(chosen, rejected, margins, strict=True)]
        fitting = {int(good[i]): pair for i, pair in enumerate(pairs) if self._fits(int(good[i]), pair)}
        kept = list(fitting.values())
        if len(kept) < len(pairs):
            dropped = len(pairs) - len(kept)
            rank_zero_info(f"{self.label}: {dropped} of {len(pairs)} pairs do not fit max_tokens={self.max_tokens}.")
        if not kept:
            raise ValueError(f"{self.label}: no pair fits max_tokens={self.max_tokens}.")
        check_positions(self, {i: max(map(len, pair[:2])) for i, pair in fitting.items()}, positions)
        equal = [i for i, pair in fitting.items() if pair.chosen == pair.rejected]
        if equal:
            message = (
                f"{self.where(equal[0])}: chosen_column={self.chosen_column!r} and rejected_column="
                f"{self.rejected_column!r} are equal there, as in {len(equal)} of {len(kept)} pairs: nothing can be "
                "learnt of them. "
            )
            if len(equal) == len(kept):
                raise ValueError(message + "Name the columns of the two sides.")
            rank_zero_warn(message + "Leave them out of the data.")
        return kept

    def _side(self, tokenizer: PreTrainedTokenizerBase, data: Any, column: str) -> list[list[int]]:
        """Token ids of the chosen or the rejected sequences, rendered as supervised rows are."""

        source = self._rows_of(data, column)
        if self.rendering == "tokens":
            return [row[0] + row[1] for row in source.tokenized(tokenizer)]
        texts = []
        for i in range(len(data)):
            try:
                encoded, _, pieces = source.pieces(tokenizer, source.read_row(data, i))
            except ValueError as error:
                raise ValueError(f"{self.label}, row {i}: {error}") from error
            text = "".join(piece.text + piece.end for piece in pieces).removesuffix(pieces[-1].end)
            texts.append(encoded.text + text)
        return [text_ids(tokenizer, text) for text in texts]

    def _rows_of(self, data: Any, column: str) -> SFTSource:
        """The supervised rows whose completions are those of one column."""

        def rows() -> Any:
            return data

        rows.__name__ = self.label
        options: dict[str, Any] = {"prompt_column": self.prompt_column, "completion_column": column}
        if self.prompt_column is None:
            options = {"messages_column": column}
        return SFTSource(
            rows=rows,
            system_prompt=self.system_prompt,
            chat_template=self.chat_template,
            template_kwargs=self.template_kwargs,
            tools_column=self.tools_column,
            **options,
        )

    def _check(self, row: Mapping[str, Any]) -> None:
        """Raises a `ValueError` about a pair that cannot be used."""
        if media := columns_with_media(row):
            raise ValueError(f": columns {sorted(media)} hold media, and reward models learn from text. Drop them.")
        try:
            sources = [self._rows_of(None, c) for c in (self.chosen_column, self.rejected_column)]
            sides = [source.lesson(row) for source in sources]
            sources[0].rendering(row)
            if not isinstance(sides[0][0], str):
                as_messages(sides[0][0])
            if sides[0][0] != sides[1][0]:
                raise ValueError(
                    f"{self.chosen_column!r} and {self.rejected_column!r} answer different prompts; only their last "
                    "turn may differ."
                )
            self._margin(row)
        except ValueError as error:
            raise ValueError(f": {error}") from error

    def _margin(self, row: Mapping[str, Any]) -> float:
        if self.margin_column is None:
            return 0.0
        try:
            margin = float(str(row.get(self.margin_column)))  # cells of CSV are text
        except ValueError:
            margin = math.nan
        if not abs(margin) <= MAX_MARGIN:
            raise ValueError(f"{self.margin_column}={row.get(self.margin_column)!r}: must be a finite number.")
        if margin < 0:
            raise ValueError(
                f"the margin is {margin}: below 0 the rejected side would be the better one. Swap the two sides."
            )
        return margin

    def _fits(self, i: int, pair: PreferencePair) -> bool:
        length = max(len(pair.chosen), len(pair.rejected))
        if self.max_tokens is None or length <= self.max_tokens:
            return True
        if self.overlong == "error":
            raise ValueError(
                f"{self.where(i)}: {length} tokens, max_tokens is {self.max_tokens}; raise it or drop the pair."
            )
        return False


class PreferenceLoader(SFTLoader):
    """Batches of pairs; order, ranks and resume as in `SFTLoader`.

    Batch: `token_ids` (B, T) int64, right-padded, chosen and rejected alternating; `attention_mask` (B, T) bool;
    `response_mask` (B, T) bool, True after the tokens with which both of a pair begin; `group_ids` (B,) int64, the
    pair; `margin` (P,) float32; `valid` (P,) bool, False for the pair that a rank without pairs repeats in validation.
    """

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Lays pairs out as a batch."""
        pairs: Sequence[PreferencePair] = rows or [self.rows[0]]  # type: ignore[assignment, list-item]
        tokens = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        own = []
        for pair in pairs:
            together = zip(pair.chosen, pair.rejected, strict=False)
            shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], together))
            own += [[0] * shared + [1] * (len(side) - shared) for side in (pair.chosen, pair.rejected)]
        return {
            "token_ids": pad_rows(tokens, self.pad_token_id, torch.long),
            "attention_mask": pad_rows([[1] * len(row) for row in tokens], 0, torch.bool),
            "response_mask": pad_rows(own, 0, torch.bool),
            "group_ids": torch.arange(len(pairs)).repeat_interleave(2),
            "margin": torch.tensor([pair.margin for pair in pairs], dtype=torch.float32),
            "valid": torch.full((len(pairs),), bool(rows)),
        }


class PreferenceDataModule(SFTDataModule):
    """Preference pairs for `RewardLightningModule`.

    Args:
        train: pairs to learn from.
        val: pairs for `eval/*`; without them there is no validation.
        batch_size: pairs per batch and rank.
        tokenizer: folder or hub name; that of the model that is trained where None.
        seed: of the order, 0 or more.

    Raises:
        ValueError: missing file, column or tokenizer; no pairs, or fewer than one batch; sequences that are too long.
    """

    _loader_class = PreferenceLoader

    def __init__(
        self,
        train: PreferenceSource,
        val: PreferenceSource | None = None,
        batch_size: int = 32,
        tokenizer: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(train, val, batch_size, tokenizer, seed)  # type: ignore[arg-type]

    def _reader(self, module: Any) -> Callable[[Any], Any]:
        spec = module.model_spec
        self.tokenizer = load_tokenizer(self.tokenizer_path or spec.path, chat_template=spec.chat_template)
        require_vocabulary(self.tokenizer, spec.path)
        return lambda source: source.tokenized(self.tokenizer, positions_of(spec.path))

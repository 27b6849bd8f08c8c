"""Preference pairs: prompts with a chosen and a rejected completion."""

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
"""Maximum margin in units of score."""


class PreferencePair(NamedTuple):
    """Token IDs of both sequences, including the prompt, and the margin of the chosen one."""

    chosen: list[int]
    rejected: list[int]
    margin: float


@dataclass
class PreferenceSource(RowSource):
    """Dataset of preference pairs. Accepts the arguments of `RowSource` and the following.

    Args:
        prompt_column: Column with the prompt, a string or a conversation. With None, `chosen` and `rejected` are whole
            conversations that differ only in the last assistant turn.
        chosen_column: Column with the preferred completion, a string or a list of messages that ends with an assistant
            turn.
        rejected_column: Column with the rejected completion.
        margin_column: Column with the margin of the chosen completion, in units of score. Defaults to margins of 0.
        system_prompt: Content of a system turn before every conversation. Requires a chat template.
        chat_template: See `PromptSource`. Token IDs are the same as in RL.
        template_kwargs: Additional variables of the chat template. Columns override them per example, as in
            `SFTSource`.
        tools_column: Column with tools, as in `SFTSource`.
        rendering: Input format of the reward model in PPO. "tokens" is prompt, completion, and end of turn, tokenized
            as during sampling, for `RewardModelSpec(tokenizer="policy")`. "text" is prompt and completion as one text
            without end of turn, for `RewardModelSpec(tokenizer="own")` without a separate chat template.
        max_tokens: Maximum sequence length in tokens, including prompt and completion. Defaults to no limit.
        overlong: How to handle pairs with a longer sequence. "drop" skips and counts them, and "error" stops the run.
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
            raise ValueError(
                "PreferenceSource.streaming=True: not supported. Set it to false; `limit` bounds the data."
            )

    def tokenized(
        self, tokenizer: PreTrainedTokenizerBase, positions: tuple[int, bool] | None = None
    ) -> list[PreferencePair]:
        """Returns all tokenized pairs, except for overlong ones. Warns about pairs with equal sides.

        Args:
            tokenizer: Tokenizer that renders and tokenizes.
            positions: Position limit of the model from `positions_of`. Longer pairs raise an error or a warning.

        Raises:
            ValueError: If a column is missing, a margin is not in [0, 1e6], the prompts of a pair differ, or no pair is
                valid.
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
            rank_zero_info(
                f"{self.label}: dropped {dropped} of {len(pairs)} pairs longer than {self.max_tokens} tokens."
            )
        if not kept:
            raise ValueError(f"max_tokens={self.max_tokens}: every pair in {self.label} is longer. Raise it.")
        check_positions(self, {i: max(map(len, pair[:2])) for i, pair in fitting.items()}, positions)
        equal = [i for i, pair in fitting.items() if pair.chosen == pair.rejected]
        if equal:
            message = (
                f"chosen_column={self.chosen_column!r} and rejected_column={self.rejected_column!r}: equal in "
                f"{len(equal)} of {len(kept)} pairs (first: {self.where(equal[0])}), which provide no training signal. "
            )
            if len(equal) == len(kept):
                raise ValueError(message + "Check the column names.")
            rank_zero_warn(message + "Remove them.")
        return kept

    def _side(self, tokenizer: PreTrainedTokenizerBase, data: Any, column: str) -> list[list[int]]:
        """Returns the token IDs of the chosen or rejected sequences, rendered as in SFT."""

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
        """Returns an `SFTSource` whose completions are in `column`."""

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
        """Raises a `ValueError` if a pair is invalid."""
        if media := columns_with_media(row):
            raise ValueError(
                f": columns {sorted(media)} contain media, which reward models don't support. Remove them."
            )
        try:
            sources = [self._rows_of(None, c) for c in (self.chosen_column, self.rejected_column)]
            sides = [source.lesson(row) for source in sources]
            sources[0].rendering(row)
            if not isinstance(sides[0][0], str):
                as_messages(sides[0][0])
            if sides[0][0] != sides[1][0]:
                raise ValueError(
                    f"{self.chosen_column!r} and {self.rejected_column!r} have different prompts. Make them equal "
                    "except for the last turn."
                )
            self._margin(row)
        except ValueError as error:
            raise ValueError(f": {error}") from error

    def _margin(self, row: Mapping[str, Any]) -> float:
        if self.margin_column is None:
            return 0.0
        try:
            margin = float(str(row.get(self.margin_column)))  # CSV cells are strings
        except ValueError:
            margin = math.nan
        if not abs(margin) <= MAX_MARGIN:
            raise ValueError(
                f"{self.margin_column}={row.get(self.margin_column)!r}: must be a number from 0 to {MAX_MARGIN:g}."
            )
        if margin < 0:
            raise ValueError(
                f"{self.margin_column}={margin}: must not be negative. Swap the chosen and rejected completions."
            )
        return margin

    def _fits(self, i: int, pair: PreferencePair) -> bool:
        length = max(len(pair.chosen), len(pair.rejected))
        if self.max_tokens is None or length <= self.max_tokens:
            return True
        if self.overlong == "error":
            raise ValueError(
                f"max_tokens={self.max_tokens}: {self.where(i)} has {length} tokens. Raise it, or remove the pair."
            )
        return False


class PreferenceLoader(SFTLoader):
    """Loader of preference pairs. See `SFTLoader` for order, ranks, and resuming.

    A batch of P pairs and B = 2 P sequences contains `token_ids` (B, T) int64, right-padded, with chosen and rejected
    alternating; `attention_mask` (B, T) bool; `response_mask` (B, T) bool, True after the shared prefix of a pair;
    `group_ids` (B,) int64, the index of the pair; `margin` (P,) float32; and `valid` (P,) bool, False for padding pairs
    in validation.
    """

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Collates pairs into a batch."""
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
        train: Training pairs.
        val: Validation pairs for `eval/*`. Defaults to no validation.
        batch_size: Number of pairs per batch and rank.
        tokenizer: Tokenizer directory or ID. Defaults to the trained model's.
        seed: Random seed of the order, 0 or more.

    Raises:
        ValueError: If a file, column, or tokenizer is missing, there is less than one batch, or a sequence is too long.
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

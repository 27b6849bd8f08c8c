"""Preference pairs: prompts with a chosen and a rejected completion."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrl.data.processing import ConversationSource
from lightrl.data.rows import columns_of
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.data.sft_loader import SFTLoader
from lightrl.data.templates import load_tokenizer
from lightrl.models.turns import text_ids
from lightrl.records import pad_rows


class PreferencePair(NamedTuple):
    """Token IDs of both sequences, including the prompt, and the margin of the chosen one."""

    chosen: list[int]
    rejected: list[int]
    margin: float


@dataclass
class PreferenceSource(ConversationSource):
    """Dataset of preference pairs. Accepts the arguments of `ConversationSource` and the following.

    Media are not supported.

    Args:
        prompt_column: Column with the prompt, a string or a conversation. With None, `chosen` and `rejected` are whole
            conversations that differ only in the last assistant turn.
        chosen_column: Column with the preferred completion, a string or a list of messages that ends with an assistant
            turn.
        rejected_column: Column with the rejected completion.
        margin_column: Column with the margin of the chosen completion, in units of score. Defaults to margins of 0.
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
    rendering: Literal["tokens", "text"] = "tokens"
    max_tokens: int | None = None
    overlong: Literal["drop", "error"] = "drop"

    def tokenized(self, tokenizer: PreTrainedTokenizerBase) -> list[PreferencePair]:
        """Returns all tokenized pairs, except for overlong ones.

        Args:
            tokenizer: Tokenizer that renders and tokenizes.

        Raises:
            ValueError: If a column is missing, a margin is negative, the prompts of a pair differ, or all pairs are
                overlong or have equal sides.
        """
        data, names = self.read(), ("prompt_column", "chosen_column", "rejected_column", "margin_column")
        self.require_columns(columns_of(data), *names)
        sides = [self._side(column) for column in (self.chosen_column, self.rejected_column)]
        made = self.fitting(
            data,
            lambda row: self._pair(tokenizer, sides, row),
            lambda pair: max(len(pair.chosen), len(pair.rejected)),
            self.max_tokens,
            self.overlong,
        )
        kept = list(made.values())
        if all(pair.chosen == pair.rejected for pair in kept):
            raise ValueError(
                f"chosen_column={self.chosen_column!r} and rejected_column={self.rejected_column!r}: equal in every "
                "pair, which provides no training signal. Check the column names."
            )
        return kept

    def _pair(
        self, tokenizer: PreTrainedTokenizerBase, sides: Sequence[SFTSource], row: Mapping[str, Any]
    ) -> PreferencePair:
        prompts = [side.lesson(row)[0] for side in sides]
        if prompts[0] != prompts[1]:
            raise ValueError(
                f"{self.chosen_column!r} and {self.rejected_column!r} have different prompts. Make them equal except "
                "for the last turn."
            )
        given = 0.0 if self.margin_column is None else row.get(self.margin_column)
        margin = math.nan if given is None else float(given)  # CSV cells are strings
        if not 0 <= margin < math.inf:
            raise ValueError(f"{self.margin_column}={given}: must be 0 or more. Swap the completions, or set it.")
        chosen, rejected = (self._tokens(tokenizer, side, row) for side in sides)
        return PreferencePair(chosen, rejected, margin)

    def _tokens(self, tokenizer: PreTrainedTokenizerBase, side: SFTSource, row: Mapping[str, Any]) -> list[int]:
        """Returns the token IDs of the chosen or rejected sequence, rendered as in SFT."""
        if self.rendering == "tokens":
            return side.encode_example(tokenizer, row)[0].token_ids
        encoded, _, pieces = side.pieces(tokenizer, row)
        text = "".join(piece.text + piece.end for piece in pieces).removesuffix(pieces[-1].end)
        return text_ids(tokenizer, encoded.text + text)

    def _side(self, column: str) -> SFTSource:
        """Returns an `SFTSource` whose completions are in `column`."""
        shared = {each.name: getattr(self, each.name) for each in fields(ConversationSource)}
        if self.prompt_column is None:
            return SFTSource(**shared, messages_column=column)
        return SFTSource(**shared, prompt_column=self.prompt_column, completion_column=column)


class PreferenceLoader(SFTLoader):
    """Loader of preference pairs. See `SFTLoader` for order, ranks, and resuming.

    A batch of P pairs and B = 2 P sequences contains `token_ids` (B, T) int64, right-padded, with chosen and rejected
    alternating; `attention_mask` (B, T) bool; `response_mask` (B, T) bool, True after the shared prefix of a pair;
    `group_ids` (B,) int64, the index of the pair; `margin` (P,) float32; and `valid` (P,) bool, False for padding pairs
    in validation.
    """

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
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
        seed: Random seed for the order, 0 or more. Defaults to the seed of `seed_everything`.

    Raises:
        ValueError: If a file, column, or tokenizer is missing, or there is less than one batch.
    """

    _loader_class = PreferenceLoader

    def __init__(
        self,
        train: PreferenceSource,
        val: PreferenceSource | None = None,
        batch_size: int = 32,
        tokenizer: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(train, val, batch_size, tokenizer, seed)  # type: ignore[arg-type]

    def _reader(self, spec: Any) -> Callable[[Any], Any]:
        self.tokenizer = load_tokenizer(self.tokenizer_path or spec.path, chat_template=spec.chat_template)
        return lambda source: source.tokenized(self.tokenizer)

"""Supervised rows: prompts with the completions a model should learn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightrl.arguments import at_least, one_of, whole_number
from lightrl.data.files import PROGRESS_SECONDS
from lightrl.data.media import MediaError
from lightrl.data.processing import ConversationSource, MediaProcessor, arranged, encode_prompt, load_processor
from lightrl.data.rows import RowError, RowSource, shuffled_order
from lightrl.data.templates import apply_template, as_messages, conversation, load_tokenizer, require_text
from lightrl.models.loading import positions_of
from lightrl.models.turns import ended_turn
from lightrl.ops.padding import pad_rows

__all__ = ["SFTDataModule", "SFTLoader", "SFTRows", "SFTSource", "check_positions"]


class SFTRows(list[tuple[list[int], list[int]]]):
    """(prompt tokens, completion tokens) of each row; `inputs[k]()` makes the extra model inputs of row k again.

    Pixels of a whole data set would not fit into memory, so they are made when a batch is.
    """

    def __init__(self, rows: Sequence[tuple[list[int], list[int]]], inputs: Sequence[Callable[[], Any]] = ()) -> None:
        super().__init__(rows)
        self.inputs = list(inputs)


@dataclass
class SFTSource(ConversationSource):
    """Where supervised rows come from, rendered token for token as in reinforcement learning.

    The arguments of `ConversationSource`, and:

    Args:
        prompt_column: column of the prompt: a string, or a conversation.
        completion_column: column of the completion: a string, or a list with one assistant message.
        messages_column: column of whole conversations that end with an assistant turn; it then stands for the two
            above: the last turn is the completion, everything before it the prompt.
        max_tokens: longest row in tokens, prompt and completion together; None is no limit.
        overlong: what happens to longer rows: "drop" leaves them out (and says how many), "truncate" cuts the
            completion's end off, "error" stops the run.
    """

    prompt_column: str = "prompt"
    completion_column: str = "completion"
    messages_column: str | None = None
    max_tokens: int | None = None
    overlong: Literal["drop", "truncate", "error"] = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("SFTSource.max_tokens", self.max_tokens, 2, or_none="for no limit")
        one_of("SFTSource.overlong", self.overlong, "drop", "truncate", "error")
        if self.streaming:
            raise ValueError(
                "SFTSource.streaming=True: supervised training shuffles whole passes; use `limit` instead."
            )

    def tokenized(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
        positions: tuple[int, bool] | None = None,
    ) -> SFTRows:
        """All rows as (prompt tokens, completion tokens), those that are too long treated as `overlong` says.

        Args:
            tokenizer: renders and tokenises.
            processor: of the model's media, from `load_processor`; None for a model of text. Rows with media are
                decoded and processed once here, for their tokens, and once for each batch that they are in.
            positions: of the model, from `positions_of`: longer rows are refused or warned of; None looks at none.
        """
        wanted = ("messages_column",) if self.messages_column else ("prompt_column", "completion_column")
        data, good = self.usable_rows(wanted, self._check)
        first: RowError | None = None
        numbers, kept, bad, said = [], [], len(data) - len(good), time.monotonic()
        for i in good:
            try:
                prompt, completion, _ = self._encode(tokenizer, i, self.read_row(data, i), processor)
            except RowError as error:
                if not self.drops(error):
                    raise
                bad += 1
                first = first or error
                continue
            row = self._fit(i, prompt, completion)
            if row is not None:
                numbers.append(i)
                kept.append(row)
            if i % 1000 == 0 and time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                rank_zero_info(f"{self.label}: tokenised {i:,} of {len(data):,} rows.")
        check_positions(self, {i: len(row[0]) + len(row[1]) for i, row in zip(numbers, kept, strict=True)}, positions)
        if len(kept) < len(data):
            long = len(data) - len(kept) - bad
            rank_zero_info(
                f"{self.label}: of {len(data)} rows {long} do not fit max_tokens={self.max_tokens}, {bad} are bad."
            )
        if first is not None:
            rank_zero_warn(f"Dropped: {bad} of {len(data)} rows cannot be used, such as {first}")
        if not kept:
            why = "" if first is None else f" ({bad} of {len(data)} are bad, such as {first})"
            raise RowError(f"{self.label}: no row is left with max_tokens={self.max_tokens}{why}.")
        if processor is None:
            return SFTRows(kept)

        def inputs(i: int) -> dict[str, Any]:
            return self._encode(tokenizer, i, self.read_row(data, i), processor)[2]

        return SFTRows(kept, [partial(inputs, i) for i in numbers])

    def _check(self, row: Mapping[str, Any]) -> None:
        """Raises a `ValueError` about a row that cannot be used, as far as can be said before it is rendered."""
        try:
            self.prompt_and_answer(row)
        except ValueError as error:
            raise ValueError(f": {error}") from error

    def prompt_and_answer(self, row: Mapping[str, Any]) -> tuple[Any, str]:
        """Prompt and completion text of a row."""
        if self.messages_column:
            messages = as_messages(row.get(self.messages_column))
            prompt: Any = messages[:-1]
            answer: Any = messages[-1:]
        else:
            prompt, answer = row.get(self.prompt_column), row.get(self.completion_column)
        if not isinstance(answer, str):
            if not isinstance(answer, Sequence) or len(answer) != 1 or as_messages(answer)[0]["role"] != "assistant":
                raise ValueError(f"the completion must be a string or one assistant message, got {str(answer)[:80]!r}.")
            answer = answer[0]["content"]
            if not isinstance(answer, str):
                raise ValueError(f"the completion's content must be a string, got {str(answer)[:80]!r}.")
        if not prompt:
            raise ValueError("the prompt is empty: an answer needs something before it.")
        require_text(answer)
        return prompt, answer

    def _encode(
        self,
        tokenizer: PreTrainedTokenizerBase,
        i: int,
        row: Mapping[str, Any],
        processor: MediaProcessor | None = None,
    ) -> tuple[list[int], list[int], dict[str, Any]]:
        """Prompt and completion are tokenised apart, as they are when the completion is sampled; and model inputs."""
        try:
            prompt, answer = self.prompt_and_answer(row)
            encoded, templated = encode_prompt(prompt, row, self, tokenizer, processor)
            if templated:
                prompt, system, _ = arranged(prompt, row, self, tokenizer, processor)
                answer = self._templated_answer(tokenizer, prompt, system, answer, encoded.text)
        except MediaError as error:
            raise MediaError(f"{self.where(i)}: {error}") from error
        except ValueError as error:
            raise RowError(f"{self.where(i)}: {error}") from error
        tokens = list(tokenizer(answer, add_special_tokens=False)["input_ids"])
        eos: Any = tokenizer.eos_token_id
        return encoded.token_ids, ended_turn(tokenizer, tokens) if templated else [*tokens, eos], encoded.inputs

    def _templated_answer(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Any, system_prompt: str | None, answer: str, text: str
    ) -> str:
        """What the template adds to the prompt's text when the answer follows."""
        messages = conversation(prompt, system_prompt)
        blocks = any(not isinstance(message["content"], str) for message in messages)
        content: Any = [{"type": "text", "text": answer}] if blocks else answer
        messages = [*messages, {"role": "assistant", "content": content}]
        whole = apply_template(tokenizer, messages, **self.template_kwargs)
        if not whole.startswith(text):
            raise ValueError(
                "the chat template renders the prompt differently when an answer follows, so the two cannot be told "
                f"apart: {text!r} is not the beginning of {whole!r}. Set template_kwargs so that it is."
            )
        return whole[len(text) :]

    def _fit(self, i: int, prompt: list[int], completion: list[int]) -> tuple[list[int], list[int]] | None:
        length, limit = len(prompt) + len(completion), self.max_tokens
        if limit is None or length <= limit:
            return prompt, completion
        if self.overlong == "error":
            raise ValueError(f"{self.where(i)}: {length} tokens, max_tokens is {limit}; raise it or drop the row.")
        if self.overlong == "drop" or len(prompt) >= limit:
            return None
        return prompt, completion[: limit - len(prompt)]


def check_positions(source: RowSource, lengths: Mapping[int, int], positions: tuple[int, bool] | None) -> None:
    """Warns of rows with more tokens than a model was made for; refuses them where it has no positions for them.

    Args:
        source: of the rows.
        lengths: number of a row -> its tokens.
        positions: from `positions_of`.

    Raises:
        ValueError: see above.
    """
    if positions is None:
        return
    longest, refused = positions
    long = [number for number, length in lengths.items() if length > longest]
    if not long:
        return
    first = f"{source.where(long[0])}: {lengths[long[0]]} tokens"
    way_out = f"Set max_tokens={longest} (overlong says what happens to longer rows)."
    if refused:
        raise ValueError(f"{first}, the model has positions for {longest}. {way_out}")
    rank_zero_warn(
        f"{source.label}: {len(long)} of {len(lengths)} rows have more than the {longest} tokens that the model was "
        f"made for, the first: {first}. Beyond them it gets worse. {way_out}"
    )


@dataclass(eq=False)
class SFTLoader:
    """Batches of tokenised rows, in an order that depends on (seed, pass) alone; resumes within a pass.

    Batch: `token_ids` (B, T) int64, right-padded; `attention_mask` (B, T) bool, True on real tokens; `response_mask`
    (B, T) bool, True on completion tokens, the end of the turn included; with a model that takes images and the
    like also `inputs`, B dictionaries of extra model inputs.

    Args:
        rows: (prompt tokens, completion tokens); those of `SFTSource.tokenized` know their extra model inputs.
        batch_size: B, per rank.
        pad_token_id: fills the rows.
        seed: of the order.
        train: shuffled, and rows that do not fill a batch on every rank are left to another pass. Otherwise every row
            once, in order, at each call; a rank that runs out of rows repeats one with an empty `response_mask`.
        rank: of this process.
        world_size: number of processes.
    """

    rows: Sequence[tuple[list[int], list[int]]]
    batch_size: int
    pad_token_id: int
    _: KW_ONLY
    seed: int = 0
    train: bool = True
    rank: int = 0
    world_size: int = 1
    epoch: int = field(default=0, init=False)
    position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.train and len(self) == 0:
            raise ValueError(
                f"batch_size={self.batch_size} on {self.world_size} rank(s) needs {self.batch_size * self.world_size} "
                f"rows, there are {len(self.rows)}: make it smaller."
            )

    def __len__(self) -> int:
        whole = self.batch_size * self.world_size
        return len(self.rows) // whole if self.train else -(-len(self.rows) // whole)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.train:
            self.position = 0
        elif self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
        order = shuffled_order(len(self.rows), self.seed, self.epoch) if self.train else range(len(self.rows))
        while self.position < len(self):
            whole = self.batch_size * self.world_size
            picks = order[self.position * whole : (self.position + 1) * whole][self.rank :: self.world_size]
            self.position += 1
            batch = self.collate([self.rows[int(i)] for i in picks])
            makers = getattr(self.rows, "inputs", [])
            if makers:
                batch["inputs"] = [makers[int(i)]() for i in picks] or [makers[0]()]
            yield batch

    def collate(self, rows: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
        """Lays rows out as a batch."""
        idle = not rows
        rows = rows or [self.rows[0]]
        mask = [[0] * len(prompt) + [0 if idle else 1] * len(completion) for prompt, completion in rows]
        return {
            "token_ids": pad_rows([prompt + completion for prompt, completion in rows], self.pad_token_id, torch.long),
            "attention_mask": pad_rows([[1] * len(row) for row in mask], 0, torch.bool),
            "response_mask": pad_rows(mask, 0, torch.bool),
        }

    def state_dict(self) -> dict[str, int]:
        """The place in the rows; at the end of a pass that is the start of the next."""
        passes, position = divmod(self.position, len(self))
        return {"epoch": self.epoch + passes, "position": position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues at that place."""
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]


class SFTDataModule(LightningDataModule):
    """Prompts with completions, tokenised as in reinforcement learning; only completion tokens are learnt.

    Args:
        train: rows to learn from.
        val: rows for the validation loss; without them there is no validation.
        batch_size: rows per batch and rank.
        tokenizer: folder or hub name, which exports get too; the actor's own where None.
        seed: of the order, 0 or more.

    Raises:
        ValueError: missing file, column or tokenizer; no rows, or fewer than one batch; rows that are too long.
    """

    _loader_class: type[SFTLoader] = SFTLoader

    def __init__(
        self,
        train: SFTSource,
        val: SFTSource | None = None,
        batch_size: int = 32,
        tokenizer: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.tokenizer_path = tokenizer
        self.train = train
        self.val = val
        self.batch_size = at_least("batch_size", batch_size, 1)
        self.seed = whole_number("seed", seed)
        self._loaders: dict[str, SFTLoader] = {}

    def setup(self, stage: str) -> None:
        """Reads and tokenises the rows of the stage, once."""
        trainer: Any = self.trainer
        read = self._reader(trainer.lightning_module)
        ranks = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        pad: Any = self.tokenizer.pad_token_id
        for name, source in (("train", self.train if stage == "fit" else None), ("val", self.val)):
            if source is not None and name not in self._loaders:
                self._loaders[name] = self._loader_class(
                    read(source), self.batch_size, pad, seed=self.seed, train=name == "train", **ranks
                )

    def _reader(self, module: Any) -> Callable[[Any], Any]:
        """Loads the tokenizer for a module; gives what turns a source into tokenised rows."""
        spec = getattr(module, "actor_spec", None)
        path: Any = self.tokenizer_path if spec is None else spec.path
        template = None if spec is None else spec.chat_template
        self.tokenizer = load_tokenizer(self.tokenizer_path or path, chat_template=template)
        processor = load_processor(path, self.tokenizer)
        return lambda source: source.tokenized(self.tokenizer, processor, positions_of(path))

    def train_dataloader(self) -> SFTLoader:
        """The rows to learn from."""
        return self._loaders["train"]

    def val_dataloader(self) -> SFTLoader | list[Any]:
        """The validation rows; nothing without them."""
        return self._loaders.get("val", [])

    def test_dataloader(self) -> SFTLoader | list[Any]:
        """As `val_dataloader`."""
        return self.val_dataloader()

"""Data for supervised fine-tuning (SFT): prompts with target completions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightrl.compat.arguments import at_least, one_of
from lightrl.data.files import with_progress
from lightrl.data.processing import ConversationSource, arranged, encode_prompt, load_processor
from lightrl.data.prompts import rendered_like
from lightrl.data.rows import Encoded, MediaError, RowError, RowSource
from lightrl.data.sft_loader import Row, SFTLoader
from lightrl.data.templates import (
    apply_template,
    as_messages,
    call_texts,
    conversation,
    load_tokenizer,
    shows_call,
)
from lightrl.models.loading import positions_of, require_vocabulary
from lightrl.models.turns import end_of_turn, ended_turn

if TYPE_CHECKING:
    from lightrl.data.processor import MediaProcessor

FLAGS = ("train", "weight", "loss_mask")
"""Message keys that control whether a turn is trained: true or 1, false or 0."""


_THINK = re.compile(r"</?\w*think\w*>")


class Piece(NamedTuple):
    """Text after a prompt and its end token: a trained turn, or the text between such turns."""

    text: str
    end: str
    trained: bool


class SFTRows(list[Row]):
    """Token IDs of each example. `inputs[k]()` recomputes the extra model inputs of example k.

    The pixels of a whole dataset would not fit into memory, so each batch recomputes them.
    """

    def __init__(self, rows: Sequence[Row], inputs: Sequence[Callable[[], Any]] = ()) -> None:
        super().__init__(rows)
        self.inputs = list(inputs)


@dataclass
class SFTSource(ConversationSource):
    """Dataset for SFT, with the same token IDs as in RL. Accepts the arguments of `ConversationSource` and the
    following.

    A trained turn consists of reasoning (`reasoning_content`), content, tool calls, and the end-of-turn token. Each
    trained turn is tokenized separately, as in sampling. An example is invalid if the chat template omits any part of
    a trained turn or rewrites earlier turns.

    Args:
        prompt_column: Column with the prompt, a string or a conversation.
        completion_column: Column with the completion, a string or a list of messages that ends with an assistant turn.
            All its assistant turns are trained. Other turns, such as tool results, are context.
        messages_column: Column with whole conversations, used instead of `prompt_column` and `completion_column`.
        train_on: Assistant turns of `messages_column` to train: "last", the final turn, or "all". A message's `train`,
            `weight`, or `loss_mask` key (a boolean, 0, or 1) overrides it. If an example marks turns as trained, "last"
            trains only those.
        max_tokens: Maximum sequence length in tokens, including prompt and completion. Defaults to no limit.
        overlong: How to handle longer examples. "drop" skips and counts them, "truncate" cuts the end of the
            completion, and "error" stops the run.
    """

    prompt_column: str = "prompt"
    completion_column: str = "completion"
    messages_column: str | None = None
    train_on: Literal["last", "all"] = "last"
    max_tokens: int | None = None
    overlong: Literal["drop", "truncate", "error"] = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("SFTSource.max_tokens", self.max_tokens, 2, or_none="for no limit")
        one_of("SFTSource.train_on", self.train_on, "last", "all")
        one_of("SFTSource.overlong", self.overlong, "drop", "truncate", "error")
        if self.streaming:
            raise ValueError(
                "SFTSource.streaming=True: not supported in SFT. Set it to false; `limit` bounds the data."
            )

    def tokenized(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
        positions: tuple[int, bool] | None = None,
    ) -> SFTRows:
        """Returns all examples as (prompt tokens, completion tokens), except for overlong ones.

        The completion spans the first to the last trained turn. If it contains other turns, a third item masks the
        trained tokens.

        Args:
            tokenizer: Tokenizer that renders and tokenizes.
            processor: Processor from `load_processor`, or None for a text model. Processes media here for their tokens,
                and again for each batch.
            positions: Position limit of the model from `positions_of`. Longer examples raise an error or a warning.
        """
        wanted = ["messages_column"] if self.messages_column else ["prompt_column", "completion_column"]
        wanted += ["tools_column"] if self.tools_column != "tools" else []
        data, good = self.usable_rows(wanted, self._check, self.rendering_columns)
        first: RowError | None = None
        numbers, kept, bad = [], [], len(data) - len(good)
        for i in with_progress(good, self.label):
            try:
                encoded, _ = self._encode(tokenizer, i, self.read_row(data, i), processor)
            except RowError as error:
                if not self.drops(error):
                    raise
                bad += 1
                first = first or error
                continue
            row = self._fit(i, encoded)
            if row is not None:
                numbers.append(i)
                kept.append(row)
        check_positions(self, {i: len(row[0]) + len(row[1]) for i, row in zip(numbers, kept, strict=True)}, positions)
        if len(kept) < len(data):
            long = len(data) - len(kept) - bad
            rank_zero_info(
                f"{self.label}: dropped {long} of {len(data)} examples longer than max_tokens={self.max_tokens} and "
                f"{bad} invalid ones."
            )
        if first is not None:
            rank_zero_warn(f"Dropped: {bad} of {len(data)} examples are invalid, such as {first}")
        if not kept:
            why = "" if first is None else f" ({bad} of {len(data)} are invalid, such as {first})"
            raise RowError(f"max_tokens={self.max_tokens}: no example of {self.label} is left{why}. Raise it.")
        if processor is None:
            return SFTRows(kept)

        def inputs(i: int) -> dict[str, Any]:
            return self._encode(tokenizer, i, self.read_row(data, i), processor)[1]

        return SFTRows(kept, [partial(inputs, i) for i in numbers])

    def _check(self, row: Mapping[str, Any]) -> None:
        """Raises a `ValueError` if an example is invalid, without rendering it."""
        try:
            self.lesson(row)
            self.rendering(row)
        except ValueError as error:
            raise ValueError(f": {error}") from error

    def lesson(self, row: Mapping[str, Any]) -> tuple[Any, list[dict[str, Any]], list[bool]]:
        """Returns the prompt, the messages from the first to the last trained turn, and their training mask."""
        if self.messages_column:
            messages = as_messages(row.get(self.messages_column))
        else:
            completion = row.get(self.completion_column)
            if isinstance(completion, str):
                completion = [{"role": "assistant", "content": completion}]
            if not isinstance(completion, Sequence) or not completion:
                raise ValueError(
                    "the completion must be a string or messages that end with an assistant turn, got "
                    f"{str(completion)[:80]!r}."
                )
            messages = as_messages(completion)
        trained = self._trained(messages)
        first, last = trained.index(True), len(trained) - trained[::-1].index(True)
        prompt: Any = messages[:first] if self.messages_column else row.get(self.prompt_column)
        if first and not self.messages_column:
            prompt = [*conversation(prompt), *messages[:first]]
        if not prompt:
            raise ValueError("the prompt is empty. Add a message before the first trained turn.")
        return prompt, messages[first:last], trained[first:last]

    def _trained(self, messages: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Returns which messages of a completion or a whole conversation are trained."""
        whole = bool(self.messages_column)
        flags = [_flag(message) for message in messages]
        for message, flag in zip(messages, flags, strict=True):
            if flag and message["role"] != "assistant":
                raise ValueError(f"a {message['role']} turn is marked as trained. Mark only assistant turns.")
        last_alone = whole and self.train_on == "last"
        if last_alone and True in flags:
            return [flag is True for flag in flags]
        if messages[-1]["role"] != "assistant" and (last_alone or not whole):
            raise ValueError(
                "the completion must be a string or messages that end with an assistant turn, got a last turn of "
                f"{messages[-1]['role']}."
            )
        open_to = [message["role"] == "assistant" for message in messages]
        if last_alone:
            open_to = [False] * (len(messages) - 1) + [True]
        if whole and len(messages) > 1:
            open_to[0] = False  # it has no prompt
        trained = [is_open and flag is not False for is_open, flag in zip(open_to, flags, strict=True)]
        if not any(trained):
            raise ValueError("no turn is trained: assistant turns are missing, or all have train: false. Enable one.")
        return trained

    def _encode(
        self,
        tokenizer: PreTrainedTokenizerBase,
        i: int,
        row: Mapping[str, Any],
        processor: MediaProcessor | None = None,
    ) -> tuple[Row, dict[str, Any]]:
        """Returns an example's token IDs, with trained turns tokenized separately, and its model inputs."""
        try:
            encoded, templated, pieces = self.pieces(tokenizer, row, processor)
        except MediaError as error:
            raise MediaError(f"{self.where(i)}: {error}") from error
        except ValueError as error:
            raise RowError(f"{self.where(i)}: {error}") from error
        completion: list[int] = []
        mask: list[bool] = []
        for piece in pieces:
            tokens = list(tokenizer(piece.text + piece.end, add_special_tokens=False)["input_ids"])
            if piece.trained:
                tokens = ended_turn(tokenizer, tokens) if templated else [*tokens, int(tokenizer.eos_token_id)]
            completion += tokens
            mask += [piece.trained] * len(tokens)
        tokens_of_row: Row = (encoded.token_ids, completion) if all(mask) else (encoded.token_ids, completion, mask)
        return tokens_of_row, encoded.inputs

    def pieces(
        self, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], processor: MediaProcessor | None = None
    ) -> tuple[Encoded, bool, list[Piece]]:
        """Returns an example's prompt, whether the chat template was applied, and the pieces of the completion.

        Raises:
            ValueError: If the chat template rewrites the prompt or earlier turns, or omits a part of a trained turn.
        """
        prompt, messages, trained = self.lesson(row)
        encoded, templated = encode_prompt(prompt, row, self, tokenizer, processor)
        if not templated:
            if len(messages) > 1 or {"tool_calls", "reasoning_content"} & set(messages[0]):
                raise ValueError(
                    "the completion has several turns, tool calls, or reasoning, but the prompt is a string without a "
                    "chat template. Use a conversation as the prompt, or a string as the completion."
                )
            content = _in_form(messages[0], False)["content"]
            return encoded, False, [Piece(_without_end(content, str(tokenizer.eos_token)), "", True)]
        prompt, system, _ = arranged(prompt, row, self, tokenizer, processor)
        history = conversation(prompt, system)
        blocks = any(not isinstance(message["content"], str) for message in history)
        messages = [_in_form(message, blocks) for message in messages]
        tools, variables = self.rendering(row)
        whole = apply_template(tokenizer, [*history, *messages], tools, **variables)
        pieces: list[Piece] = []
        done = ""
        for number, message in enumerate(messages):
            if not trained[number]:
                continue
            before = [*history, *messages[:number]]
            begun, alone = encoded.text, whole
            if number:
                begun = apply_template(tokenizer, before, tools, **{"add_generation_prompt": True, **variables})
            if number + 1 < len(messages):
                alone = apply_template(tokenizer, [*before, message], tools, **variables)
            _require_start(begun, alone, first=not number)
            turn = _turn(tokenizer, alone[len(begun) :], message)
            if done:
                _require_start(done, begun, first=False)
                pieces.append(Piece(begun[len(done) :], "", False))
            pieces.append(turn)
            done = begun + turn.text + turn.end
            if number + 1 < len(messages):
                _require_start(done, whole, first=False)
        return encoded, True, pieces

    def _fit(self, i: int, row: Row) -> Row | None:
        prompt, completion, *mask = row
        length, limit = len(prompt) + len(completion), self.max_tokens
        if limit is None or length <= limit:
            return row
        if self.overlong == "error":
            raise ValueError(
                f"max_tokens={limit}: {self.where(i)} has {length} tokens. Raise it, or remove the example."
            )
        if self.overlong == "drop" or len(prompt) >= limit:
            return None
        kept = limit - len(prompt)
        if not mask:
            return prompt, completion[:kept]
        return (prompt, completion[:kept], mask[0][:kept]) if any(mask[0][:kept]) else None


def _flag(message: Mapping[str, Any]) -> bool | None:
    """Returns whether a message is marked as trained, or None if unmarked."""
    given = {name: message[name] for name in FLAGS if message.get(name) is not None}
    for name, value in given.items():
        if value not in (0, 1):
            raise ValueError(f"{name}={value!r} of a message: must be a boolean, 0, or 1. Fix it.")
    return all(given.values()) if given else None


def _in_form(message: Mapping[str, Any], blocks: bool) -> dict[str, Any]:
    """Converts a message's content to a list of blocks or to a string."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    other = next((part["type"] for part in parts if part["type"] != "text"), None)
    if other is not None:
        raise MediaError(f"a block of type {other!r} follows the first trained turn. Train only on turns after it.")
    return {**message, "content": parts if blocks else "".join(part["text"] for part in parts)}


def _require_start(start: str, whole: str, *, first: bool) -> None:
    """Raises a `ValueError` if a rendered conversation does not start with the rendered earlier turns."""
    if whole.startswith(start):
        return
    if first:
        raise ValueError(
            "the chat template renders the prompt differently when a completion follows: "
            f"{start!r} is not the beginning of {whole!r}. Change template_kwargs or the template."
        )
    raise ValueError(
        "train_on: the chat template rewrites earlier turns when others follow, so training would not match sampling: "
        f"{start!r} is not the beginning of {whole!r}. Train only on the last turn, with an example for each turn, or "
        "set actor.chat_template to a template that keeps earlier turns."
    )


def _turn(tokenizer: PreTrainedTokenizerBase, body: str, message: Mapping[str, Any]) -> Piece:
    """Returns the trained turn `message` in `body`, the rendered text from its start. Raises if a part is missing."""
    content = _in_form(message, False)["content"]
    thoughts = str(message.get("reasoning_content", ""))
    parts = [("reasoning_content", thoughts)] + [("content", part) for part in _THINK.split(content)]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    at = 0
    for name, part in parts:
        place = max(body.find(part.strip(), at), body.find(part.strip()))
        if place < 0:
            _raise_lost(name, part, body)
        at = max(at, place + len(part.strip()))
    for call in calls:
        place = body.find(call["name"], at)
        if place < 0 or not shows_call(body[at:], call):
            _raise_lost("tool_calls", call["name"], body)
        at = place + len(call["name"])
        at = max([at, *(body.find(text, at) + len(text) for text in call_texts(call) if body.find(text, at) >= 0)])
    end = str(tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)))
    place = body.rfind(end)
    return Piece(body, "", True) if place < at else Piece(_without_end(body[:place], end), end, True)


def _without_end(text: str, end: str) -> str:
    """Removes end-of-turn tokens at the end of a text."""
    while text.endswith(end):
        text = text.removesuffix(end)
    return text


def _raise_lost(name: str, part: str, body: str) -> NoReturn:
    raise ValueError(
        f"{name}: the chat template omits {part.strip()[:80]!r} from the trained turn ({body[:200]!r}). Set "
        "actor.chat_template to a template that includes it, or change the example."
    )


def check_positions(source: RowSource, lengths: Mapping[int, int], positions: tuple[int, bool] | None) -> None:
    """Warns about examples beyond a model's context length, or raises an error if it has no positions for them.

    Args:
        source: Source of the examples.
        lengths: Number of tokens by example index.
        positions: Position limit from `positions_of`.
    """
    if positions is None:
        return
    longest, refused = positions
    long = [number for number, length in lengths.items() if length > longest]
    if not long:
        return
    first = f"{source.where(long[0])}: {lengths[long[0]]} tokens"
    way_out = f"Set max_tokens={longest} and overlong."
    if refused:
        raise ValueError(f"{first}, but the model has positions for {longest}. {way_out}")
    rank_zero_warn(
        f"{source.label}: {len(long)} of {len(lengths)} examples exceed the model's context length of {longest} tokens "
        f"(first: {first}), beyond which quality degrades. {way_out}"
    )


class SFTDataModule(LightningDataModule):
    """Data module for SFT, with the same token IDs as in RL. Only completion tokens are trained.

    Args:
        train: Training data.
        val: Validation data. Rendering settings default to those of `train`. Defaults to no validation.
        batch_size: Number of examples per batch and rank.
        tokenizer: Tokenizer directory or ID, also used for exports. Defaults to the actor's.
        seed: Random seed of the order, 0 or more.

    Raises:
        ValueError: If a file, column, or tokenizer is missing, there is less than one batch, or an example is too long.
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
        self.val = None if val is None else rendered_like(val, train)
        self.batch_size = at_least("batch_size", batch_size, 1)
        self.seed = at_least("seed", seed, 0)
        self._loaders: dict[str, SFTLoader] = {}

    def setup(self, stage: str) -> None:
        """Loads and tokenizes the examples of the stage, once."""
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
        """Loads the tokenizer for a module and returns a function that tokenizes a source."""
        spec = getattr(module, "actor_spec", None)
        path: Any = self.tokenizer_path if spec is None else spec.path
        template = None if spec is None else spec.chat_template
        self.tokenizer = load_tokenizer(self.tokenizer_path or path, chat_template=template)
        require_vocabulary(self.tokenizer, path)
        processor = load_processor(path, self.tokenizer)
        return lambda source: source.tokenized(self.tokenizer, processor, positions_of(path))

    def train_dataloader(self) -> SFTLoader:
        """Returns the loader of the training data."""
        return self._loaders["train"]

    def val_dataloader(self) -> SFTLoader | list[Any]:
        """Returns the loader of the validation data, or an empty list."""
        return self._loaders.get("val", [])

    def test_dataloader(self) -> SFTLoader | list[Any]:
        """Returns the loader of `val_dataloader`."""
        return self.val_dataloader()

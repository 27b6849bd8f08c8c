"""Data for supervised fine-tuning (SFT): prompts with target completions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from lightning.pytorch import LightningDataModule
from transformers import PreTrainedTokenizerBase

from lightrl.compat.lightning import KeepsHooks, require_data, run_seed
from lightrl.data.processing import ConversationSource, load_processor
from lightrl.data.prompts import rendered_like
from lightrl.data.rows import Encoded, MediaError, columns_of, entered
from lightrl.data.sft_loader import Example, SFTLoader
from lightrl.data.templates import apply_template, as_messages, conversation, load_tokenizer, text_of
from lightrl.models.turns import end_of_turn, special_texts

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

    def tokenized(self, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None = None) -> list[Example]:
        """Returns all examples up to their last trained turn, except for overlong ones.

        Args:
            tokenizer: Tokenizer that renders and tokenizes.
            processor: Processor from `load_processor`, or None for a text model. Processes media here for their tokens,
                and again for each batch.
        """
        data = self.read()
        columns = ["messages_column"] if self.messages_column else ["prompt_column", "completion_column"]
        self.require_columns(columns_of(data), *columns)

        def inputs(i: int) -> dict[str, Any]:
            with self.named(i):
                return self.encode_example(tokenizer, entered(data[i]), processor)[1]

        def cut(row: Mapping[str, Any]) -> Example:
            example, limit = self.encode_example(tokenizer, row, processor)[0], self.max_tokens
            whole = self.overlong != "truncate" or not any(example.trained[:limit])
            return example if whole else Example(example.token_ids[:limit], example.trained[:limit])

        kept = self.fitting(data, cut, lambda example: len(example.token_ids), self.max_tokens, self.overlong)
        if processor is None:
            return list(kept.values())
        return [example._replace(inputs=partial(inputs, i)) for i, example in kept.items()]

    def lesson(self, row: Mapping[str, Any]) -> tuple[Any, list[dict[str, Any]], list[bool]]:
        """Returns the prompt, the messages from the first to the last trained turn, and their training mask."""
        column = self.messages_column or self.completion_column
        completion = row.get(column)
        if isinstance(completion, str) and not self.messages_column:
            completion = [{"role": "assistant", "content": completion}]
        messages = as_messages(completion, column)
        trained = self._trained(messages)
        first, last = trained.index(True), len(trained) - trained[::-1].index(True)
        prompt: Any = messages[:first] if self.messages_column else row.get(self.prompt_column)
        if first and not self.messages_column:
            history, start = conversation(prompt), messages[0]["role"]
            if history[-1]["role"] == "user" and start in ("system", "user"):
                raise ValueError(
                    f"{self.completion_column!r} starts with a {start} turn, after the prompt's user turn. For whole "
                    "conversations, set messages_column (preference pairs: prompt_column to null)."
                )
            prompt = [*history, *messages[:first]]
        return prompt, messages[first:last], trained[first:last]

    def _trained(self, messages: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Returns which messages of a completion or a whole conversation are trained."""
        whole, roles = bool(self.messages_column), [message["role"] for message in messages]
        flags = [_flag(message) for message in messages]
        for role, flag in zip(roles, flags, strict=True):
            if flag and role != "assistant":
                raise ValueError(f"a {role} turn is marked as trained. Mark only assistant turns.")
        if not whole and roles[-1] != "assistant":
            raise ValueError(f"the completion ends with a turn of {roles[-1]}. End it with an assistant turn.")
        candidates = [role == "assistant" for role in roles]
        if whole and self.train_on == "last":
            if True in flags:
                return [flag is True for flag in flags]
            candidates[:-1] = [False] * (len(roles) - 1)
        elif whole and len(roles) > 1:
            candidates[0] = False  # it has no prompt
        trained = [candidate and flag is not False for candidate, flag in zip(candidates, flags, strict=True)]
        if not any(trained):
            raise ValueError("no turn is trained: assistant turns are missing, or all have train: false. Enable one.")
        return trained

    def encode_example(
        self, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], processor: MediaProcessor | None = None
    ) -> tuple[Example, dict[str, Any]]:
        """Returns an example, with trained turns tokenized separately, and its model inputs."""
        encoded, templated, pieces = self.pieces(tokenizer, row, processor)
        token_ids = list(encoded.token_ids)
        trained = [False] * len(token_ids)
        for piece in pieces:
            tokens = list(tokenizer(piece.text + piece.end, add_special_tokens=False)["input_ids"])
            if not templated:
                tokens.append(int(tokenizer.eos_token_id))
            elif piece.trained and not piece.end and not (tokens and tokens[-1] in special_texts(tokenizer)):
                tokens.append(end_of_turn(tokenizer))  # the template writes none, not even a special token of a call
            token_ids += tokens
            trained += [piece.trained] * len(tokens)
        return Example(token_ids, trained), encoded.inputs

    def pieces(
        self, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], processor: MediaProcessor | None = None
    ) -> tuple[Encoded, bool, list[Piece]]:
        """Returns an example's prompt, whether the chat template was applied, and the pieces of the completion.

        Raises:
            ValueError: If the chat template rewrites the prompt or earlier turns, or omits a part of a trained turn.
        """
        prompt, messages, trained = self.lesson(row)
        rendered = self.render(prompt, row, tokenizer, processor)
        encoded, history = self.encode(rendered, tokenizer, processor), rendered.messages
        if not rendered.templated:
            if len(messages) > 1 or {"tool_calls", "reasoning_content"} & set(messages[0]):
                raise ValueError(
                    "the completion has several turns, tool calls, or reasoning, but the prompt is a string without a "
                    "chat template. Use a conversation as the prompt, or a string as the completion."
                )
            content = str(_in_form(messages[0], False)["content"])
            return encoded, False, [Piece(_without_end(content, str(tokenizer.eos_token)), "", True)]
        blocks = any(not isinstance(message["content"], str) for message in history)
        messages = [_in_form(message, blocks) for message in messages]
        tools, variables = self.template_arguments(row)
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
            _require_start(begun, alone)
            turn = _turn(tokenizer, alone[len(begun) :], message)
            if done:
                _require_start(done, begun)
                pieces.append(Piece(begun[len(done) :], "", False))
            pieces.append(turn)
            done = begun + turn.text + turn.end
            if number + 1 < len(messages):
                _require_start(done, whole)
        return encoded, True, pieces


def _flag(message: Mapping[str, Any]) -> bool | None:
    """Returns whether a message is marked as trained, or None if unmarked."""
    given = [message[name] for name in FLAGS if message.get(name) is not None]
    if any(value not in (0, 1) for value in given):
        raise ValueError(f"{FLAGS}={given} of a message: must be true, false, 1, or 0. Fix the data.")
    return all(given) if given else None


def _in_form(message: Mapping[str, Any], blocks: bool) -> dict[str, Any]:
    """Converts a message's content to a list of blocks or to a string."""
    text = text_of(message["content"])
    if text is None:
        raise MediaError("media follow the first trained turn. Train only on turns after them.")
    return {**message, "content": [{"type": "text", "text": text}] if blocks else text}


def _require_start(start: str, whole: str) -> None:
    """Raises a `ValueError` if a rendered conversation does not start with the rendered earlier turns."""
    if not whole.startswith(start):
        raise ValueError(
            "train_on: the chat template renders the prompt differently when turns follow, so training would not match "
            f"sampling: {start!r} is not the beginning of {whole!r}. Train only on the last turn, with an example for "
            "each turn, change template_kwargs, or set actor.chat_template to a template that keeps earlier turns."
        )


def _turn(tokenizer: PreTrainedTokenizerBase, body: str, message: Mapping[str, Any]) -> Piece:
    """Returns the trained turn `message` in `body`, the rendered text from its start. Raises if a part is missing."""
    content = str(text_of(message["content"]))
    thoughts = str(message.get("reasoning_content", ""))
    parts = [("reasoning_content", thoughts)] + [("content", part) for part in _THINK.split(content)]
    at = 0
    for name, part in parts:
        place = max(body.find(part.strip(), at), body.find(part.strip()))
        if place < 0:
            raise ValueError(
                f"{name}: the chat template omits {part.strip()[:80]!r} from the trained turn ({body[:200]!r}). Set "
                "actor.chat_template to a template that includes it, or change the example."
            )
        at = max(at, place + len(part.strip()))
    at = max([at, *(body.rfind(call["function"]["name"]) for call in message.get("tool_calls", ()))])
    end = str(tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)))
    place = body.rfind(end)
    return Piece(body, "", True) if place < at else Piece(_without_end(body[:place], end), end, True)


def _without_end(text: str, end: str) -> str:
    while text.endswith(end):
        text = text.removesuffix(end)
    return text


@dataclass
class PTXSource(SFTSource):
    """Supervised examples for an auxiliary SFT loss during RL (`ptx_coef` of the module). Accepts the arguments of
    `SFTSource` and the following.

    Args:
        batch_size: Number of examples per rollout and rank, shared by the rollout's mini-batches.
    """

    batch_size: int = 32

    def loader(self, tokenizer: Any, processor: Any, **order: Any) -> SFTLoader:
        """Returns a loader of the examples. `order` contains `seed`, `rank`, and `world_size` (see `SFTLoader`)."""
        rows = self.tokenized(tokenizer, processor)
        return SFTLoader(rows, self.batch_size, tokenizer.pad_token_id, **order)


class SFTDataModule(KeepsHooks, LightningDataModule):
    """Data module for SFT, with the same token IDs as in RL. Only completion tokens are trained.

    Args:
        train: Training data.
        val: Validation data. Rendering settings default to the settings of `train`. Defaults to no validation.
        batch_size: Number of examples per batch and rank.
        tokenizer: Tokenizer directory or ID, also used for exports. Defaults to the actor's.
        seed: Random seed for the order, 0 or more. Defaults to the seed of `seed_everything`.

    Raises:
        ValueError: If a file, column, or tokenizer is missing, or there is less than one batch.
    """

    kept_hooks = ("setup",)
    _loader_class: type[SFTLoader] = SFTLoader
    restored = False  # whether `load_state_dict` was called

    def __init__(
        self,
        train: SFTSource,
        val: SFTSource | None = None,
        batch_size: int = 32,
        tokenizer: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer_path = tokenizer
        self.train = train
        self.val = None if val is None else rendered_like(val, train)
        self.batch_size = batch_size
        self.seed = run_seed() if seed is None else seed
        self._loaders: dict[str, SFTLoader] = {}
        self._read_for: Any = None  # the model and rank of the loaders

    def setup(self, stage: str) -> None:
        """Loads and tokenizes the examples of the stage, once per model and rank."""
        trainer: Any = self.trainer
        module = trainer.lightning_module
        spec = getattr(module, "actor_spec", getattr(module, "model_spec", None))
        read = self._reader(spec)
        ranks = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        own = (ranks, self.tokenizer_path, spec and (spec.path, spec.chat_template))
        if own != self._read_for:
            self._loaders, self._read_for = {}, own
        pad: Any = self.tokenizer.pad_token_id
        for name, source in (("train", self.train if stage == "fit" else None), ("val", self.val)):
            if source is not None and name not in self._loaders:
                self._loaders[name] = self._loader_class(
                    read(source), self.batch_size, pad, seed=self.seed, train=name == "train", **ranks
                )

    def _reader(self, spec: Any) -> Callable[[Any], Any]:
        """Loads the tokenizer for a model and returns a function that tokenizes a source."""
        path: Any = self.tokenizer_path if spec is None else spec.path
        template = None if spec is None else spec.chat_template
        self.tokenizer = load_tokenizer(self.tokenizer_path or path, chat_template=template)
        processor = load_processor(path, self.tokenizer)
        return lambda source: source.tokenized(self.tokenizer, processor)

    def train_dataloader(self) -> SFTLoader:
        """Returns the loader of the training data, which repeats its first batches with `overfit_batches`."""
        loader, trainer = self._loaders["train"], cast(Any, self.trainer)
        loader.batch_size = self.batch_size  # `BatchSizeFinder` sets it
        loader.repeats = trainer is not None and trainer.overfit_batches > 0
        return loader

    def val_dataloader(self) -> SFTLoader | list[Any]:
        """Returns the loader of the validation data, or an empty list."""
        require_data(self.trainer, "val", self.val)
        return self._loaders.get("val", [])

    def test_dataloader(self) -> SFTLoader | list[Any]:
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Returns the training loader's state, which Lightning does not restore from a checkpoint between epochs."""
        return self._loaders["train"].state_dict() if "train" in self._loaders else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes the training loader, if set up."""
        self.restored = True
        if "train" in self._loaders:
            self._loaders["train"].load_state_dict(state_dict)

"""Extends the tokens of the last request to the next one if the chat template provably only appends."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightrl.data.templates import calls_in_form
from lightrl.environments.base import Message, Tools, call_message
from lightrl.models.turns import first_of, special_texts

if TYPE_CHECKING:
    from lightrl.data.processor import MediaProcessor

MARK = "\U000f0e4c"
"""Private-use character inserted into literal text of special tokens, so that it is not tokenized as the token."""
SHORT, LONG = "Qa1", "Zb2 Zb3 " * 7 + "Zb4"
"""Placeholders of different lengths for sampled text."""

FORMS: Sequence[Mapping[str, bool]] = ({}, {"none": True}, {"text": True}, {"none": True, "text": True})
"""Formats of tool calls, as arguments of `calls_in_form`."""

_USER: Message = {"role": "user", "content": "Qu9"}


def _called(*calls: tuple[str, str]) -> Message:
    """An assistant message with tool calls, given as (name, value of the argument `x`)."""
    written = [call_message(f"call{i:05d}", name, {"x": value}) for i, (name, value) in enumerate(calls)]
    return {"role": "assistant", "content": "", "tool_calls": written}


def _result(name: str, number: int) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": "Qr8"}


class Tokens(list[int]):
    """Token IDs with expanded image placeholders; `short` has one per image, for engines that expand them."""

    def __init__(self, ids: Sequence[int], short: Sequence[int] | None = None, images: Sequence[Any] = ()) -> None:
        super().__init__(ids)
        self.short = list(ids if short is None else short)
        self.images = list(images)


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the policy: the request's tokens, the sampled tokens, and the parsed message."""

    prompt_ids: list[int]
    completion_ids: list[int]
    reply: Message


class Bridge(ABC):
    """Converts conversations to tokens for one chat template. Rejects images without a `processor`."""

    renderer: Any = None
    """Renderer of `renderers` that the bridge uses. None uses the chat template."""

    def __init__(self, tokenizer: Any, processor: MediaProcessor | None = None) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self._special = special_texts(tokenizer)
        tokens = sorted((token for token in self._special.values() if len(token) > 1), key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._parallel: dict[bool, bool] = {}  # by whether there are tools
        self._shown: set[str] = set()  # roles

    def opened(self, messages: Sequence[Message]) -> list[Message]:
        """Copies messages and decodes their images. Raises a ValueError for unsupported content."""
        opened = []
        for message in messages:
            message = dict(message)
            if isinstance(message.get("content"), list):
                message["content"] = [self._opened(message["role"], dict(part)) for part in message["content"]]
            opened.append(message)
        return opened

    def _opened(self, role: str, part: dict[str, Any]) -> dict[str, Any]:
        kind = part.get("type")
        if kind == "text":
            return part
        if kind != "image" or "image" not in part:
            raise ValueError(
                f"environment: a {role} message has a content block of type {kind!r} with {', '.join(sorted(part))}, "
                "which is not supported. Use text or {'type': 'image', 'image': ...}."
            )
        if self.processor is None:
            raise ValueError(
                f"environment: a {role} message has a content block of type 'image', but the model or its renderer "
                "takes text only. Send text, or for a VLM set `renderer: template`."
            )
        return {"type": kind, "image": self.processor.images([part]).images[0]}

    def plain_ids(self, text: str) -> list[int]:
        """Token IDs of a text. Literal text of special tokens becomes ordinary tokens."""
        return encode_marked(self.tokenizer, self._marked(text))

    def guarded(self, messages: Sequence[Message]) -> list[Message]:
        """Messages or tools with a mark inserted into the literal text of special tokens."""
        return [
            {key: value if key == "role" else self._marked(value) for key, value in message.items()}
            for message in messages
        ]

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._literal.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item) for item in value]
        return value

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        return bool(token_ids) and token_ids[-1] in self._special

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Tools) -> Tokens:
        """Renders a conversation up to the next assistant turn. Raises a ValueError if the template rejects it."""

    def hidden(self, tools: Tools) -> str | None:
        """What the template hides from the model: its tools, or its tool calls in later turns. None if nothing.

        Checks that conversations that differ in a tool or a call render differently.
        """
        begins: list[list[Message]] = [[_USER], [{"role": "system", "content": "Qs9"}, _USER]]
        for number in range(len(tools)):
            without = [*tools[:number], *tools[number + 1 :]]
            if all(self._rendered(begin, tools) == self._rendered(begin, without) for begin in begins):
                return "its tools"
        calls = [_called(("Qt7", SHORT)), _called(("Qt8", SHORT)), _called(("Qt7", LONG))]
        for answer in (_result("Qt7", 0), {"role": "user", "content": "Qr8"}):
            first, *others = (self._rendered([_USER, said, answer], tools) for said in calls)
            if None not in (first, *others):
                return "its calls of tools in later turns" if first in others else None
        return "its calls of tools in later turns"

    def check_roles(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises a ValueError if the template drops messages with these roles after an assistant turn."""
        for role in {message["role"] for message in messages} - {"assistant", *self._shown}:
            said = _called(("Qt7", SHORT)) if role == "tool" else {"role": "assistant", "content": SHORT}
            answers = ({**_result("Qt7", 0), "role": role, "content": content} for content in ("Qr8", "Qr9"))
            one, other = (self._rendered([_USER, said, answer], tools) for answer in answers)
            if one is not None and one == other:
                raise ValueError(
                    f"actor.chat_template: drops messages with the role {role!r}. Use another role (`result_role`), or "
                    "a template that renders them."
                )
            self._shown.add(role)

    def takes_parallel_calls(self, tools: Tools) -> bool:
        """Whether a message may have two tool calls. Some templates reject or drop the second."""
        if bool(tools) not in self._parallel:
            one, other = (
                self._rendered(
                    [_USER, _called(("Qt7", SHORT), (name, SHORT)), _result("Qt7", 0), _result(name, 1)], tools
                )
                for name in ("Qt8", "Qt9")
            )
            self._parallel[bool(tools)] = None not in (one, other) and one != other
        return self._parallel[bool(tools)]

    def _rendered(self, messages: Sequence[Message], tools: Tools) -> Tokens | None:
        """`render`, or None if the template rejects the conversation."""
        try:
            return self.render(messages, tools)
        except ValueError:
            return None

    @abstractmethod
    def extend(
        self, turn: SampledTurn, history: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> Tokens | None:
        """Tokens to append to prompt and completion up to the beginning of the next assistant turn.

        Returns None if the template doesn't provably extend them. `history` is the conversation before the turn, and
        `new` are the messages after it.
        """


class TemplateBridge(Bridge):
    """Extends tokens for any chat template, after verifying with placeholder texts that it only appends.

    To determine the text that a template writes after an assistant turn, the bridge renders conversations with
    placeholders for the sampled text: two texts of different lengths, after two histories of different lengths.
    Appending is safe if all renderings satisfy these conditions:

    - The conversation starts with the text of the request (no earlier turn is rewritten, no reasoning dropped).
    - It contains the content, the reasoning, and every tool call of the reply.
    - The turn ends with the token that the policy ended it with, after no special token that it didn't sample.
    - The text after that token is the same, so it doesn't depend on anything before it.

    This text follows a special token, so it can be tokenized separately. If a reply was truncated or ended by a stop
    string, the template's end token is added as context. The cost doesn't grow with the conversation, unless the text
    depends on the history (DeepSeek's tool results). In that case, the real history is rendered.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        processor: MediaProcessor | None = None,
    ) -> None:
        super().__init__(tokenizer, processor)
        self.template_kwargs = dict(template_kwargs or {})
        self._form: Mapping[str, bool] | None = None
        self._ender: str | None = None

    def _text(self, messages: Sequence[Message], tools: Tools, form: Mapping[str, bool] | None = None) -> str:
        form = form or self._form or {}
        return str(
            self.tokenizer.apply_chat_template(
                [self._content(calls_in_form(message, **form)) for message in messages],
                tools=self.guarded(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **self.template_kwargs,
            )
        )

    def _try(self, messages: Sequence[Message], tools: Tools, form: Mapping[str, bool] | None = None) -> str | None:
        """`_text`, or None if the template rejects the conversation with any exception."""
        try:
            return self._text(messages, tools, form)
        except Exception:
            return None

    def _content(self, message: Message) -> Message:
        """The message with content in the template's format."""
        if self.processor is None or not isinstance(message.get("content"), str) or not self.processor.wants_blocks:
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    def _tokens(self, text: str, messages: Sequence[Message]) -> Tokens:
        """Token IDs of a rendered text, with expanded image placeholders."""
        images = images_of(messages)
        if not images:
            return Tokens(encode_marked(self.tokenizer, text))
        assert self.processor is not None, "images were decoded"
        shown = self.processor.images(images)
        first, *rest = text.split(shown.token)
        whole = first + "".join(placeholders + part for placeholders, part in zip(shown.texts, rest, strict=True))
        return Tokens(encode_marked(self.tokenizer, whole), encode_marked(self.tokenizer, text), images)

    def render(self, messages: Sequence[Message], tools: Tools) -> Tokens:
        self._learn_form(tools)
        try:
            text = self._text(self.guarded(messages), tools)
        except Exception as error:
            raise ValueError(
                f"actor.chat_template: rejects the conversation: {error}. If it doesn't support tool messages, set "
                "`result_role: user`. If it supports only one tool call per turn, set `on_parse_error`."
            ) from error
        return self._tokens(text, messages)

    def _learn_form(self, tools: Tools) -> None:
        """Detects the template's format of tool calls: some require JSON text, some no content."""
        if self._form is not None:
            return
        for answer in (_result("Qt7", 0), {"role": "user", "content": "Qr8"}):
            said = [_USER, _called(("Qt7", SHORT)), answer]
            for form in FORMS:
                text = self._try(said, tools, form)
                if text is not None and "Qt7" in text and SHORT in text:
                    self._form = form
                    return
        self._form = {}

    def extend(
        self, turn: SampledTurn, history: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> Tokens | None:
        self._learn_form(tools)
        if self.processor is not None and not self._placeholders.isdisjoint(turn.completion_ids):
            return None  # a sampled placeholder has no image; a new sequence renders it as text
        new = self.guarded(new)
        ended = self._end_of_turn(turn.completion_ids, history, tools)
        if ended is None:
            return None
        end, sampled = ended
        suffix = self._common_suffix(self._histories(history), turn, new, tools, end)
        if suffix is None:  # renders the real history, whose cost grows with its length
            suffix = self._common_suffix([self.guarded(history)], turn, new, tools, end)
        if suffix is None:
            return None
        ids = self._tokens(end + suffix, new)
        if not ids or ids[0] != self.tokenizer.convert_tokens_to_ids(end):
            return None
        return Tokens(ids[1:], ids.short[1:], ids.images) if sampled else ids

    @functools.cached_property
    def _placeholders(self) -> set[int]:
        assert self.processor is not None
        tokens = [self.processor.token(kind) for kind in ("image", "video", "audio")]
        return {self.tokenizer.convert_tokens_to_ids(token) for token in tokens if token is not None}

    def _end_of_turn(
        self, completion_ids: Sequence[int], history: Sequence[Message], tools: Tools
    ) -> tuple[str, bool] | None:
        """The token that ends this turn, and whether it was sampled."""
        if completion_ids and (token := self._special.get(completion_ids[-1])) is not None:
            return token, True
        if self._ender is None:
            said = [("user", "Qu8"), ("assistant", SHORT), ("user", "Qu9")]
            text = self._try([{"role": role, "content": content} for role, content in said], tools)
            tail = text[text.rfind(SHORT) :] if text else ""
            self._ender = first_of(tail, self._special.values())
        return (self._ender, False) if self._ender else None

    def _histories(self, history: Sequence[Message]) -> list[list[Message]]:
        """Returns the prompt, and the prompt followed by two turns of the same kinds as in the conversation."""
        turns = next((i for i, message in enumerate(history) if message["role"] == "assistant"), len(history))
        prompt = self.guarded(history[:turns])
        said = [message for message in history if message["role"] == "assistant"]
        longer = list(prompt)
        for number in range(2):
            assistant: Message = {"role": "assistant", "content": f"Qh{number}"}
            if any(message.get("reasoning_content") for message in said):
                assistant["reasoning_content"] = f"Qi{number}"
            calls = next((message["tool_calls"] for message in said if message.get("tool_calls")), None)
            if calls and any(message["role"] == "tool" for message in history):
                call = {**calls[0], "function": {"name": calls[0]["function"]["name"], "arguments": {"x": "Qj"}}}
                assistant["tool_calls"] = [call]
                answer = {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": "Qk"}
            else:
                answer = {"role": "user", "content": "Ql" * (number + 2)}
            longer += [assistant, answer]
        return [prompt, longer]

    def _common_suffix(
        self, histories: Sequence[Sequence[Message]], turn: SampledTurn, new: Sequence[Message], tools: Tools, end: str
    ) -> str | None:
        """The text after `end`, if it is the same for all histories and replies."""
        (real,) = self.guarded([turn.reply])
        texts = [str(real.get(name) or "").strip() for name in ("content", "reasoning_content")]
        replies = [_stand_in(turn.reply, SHORT), _stand_in(turn.reply, LONG), (real, texts)]
        sampled = {*turn.completion_ids}
        others = [token for number, token in self._special.items() if number not in sampled]
        found: set[str] = set()
        for history in histories:
            start = self._try(history, tools)
            if start is None:
                return None
            for said, marks in replies:
                full = self._try([*history, said, *new], tools)
                if full is None or not full.startswith(start):
                    return None
                body = full[len(start) :]
                places = [body.find(mark) for mark in marks]
                if -1 in places:
                    return None
                last = max(place + len(mark) for place, mark in zip(places, marks, strict=True))
                before, ended, after = body[last:].partition(end)
                if not ended or (said is not real and any(token in before for token in others)):
                    return None  # the turn ends with another token
                found.add(after)
            if len(found) != 1:
                return None
            replies = replies[:2]  # the real reply is as long as the policy likes, and needs one history
        (suffix,) = found
        return suffix


def _stand_in(reply: Message, content: str) -> tuple[Message, list[str]]:
    """The reply with placeholders for sampled text, and the placeholders."""
    message: Message = {**reply, "content": ""}
    marks = []
    if reply.get("content") or not reply.get("tool_calls"):
        message["content"] = content
        marks.append(content)
    if reply.get("reasoning_content"):
        message["reasoning_content"] = f"Qr {content} rQ"
        marks.append(message["reasoning_content"])
    if reply.get("tool_calls"):
        message["tool_calls"] = []
        for number, call in enumerate(reply["tool_calls"]):
            value = f"Qc{number} {content} cQ{number}"
            marks.append(value)
            function = {"name": call["function"]["name"], "arguments": {"x": value}}
            message["tool_calls"].append({**call, "function": function})
    return message, marks


def encode_marked(tokenizer: Any, text: str) -> list[int]:
    """Token IDs of a rendered text. Marked text of special tokens becomes ordinary tokens."""
    return [number for part in text.split(MARK) if part for number in tokenizer.encode(part, add_special_tokens=False)]


def images_of(messages: Sequence[Message]) -> list[Any]:
    """The images in messages, in order."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]

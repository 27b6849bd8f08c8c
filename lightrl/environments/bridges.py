"""Extends the tokens of the last request to the next one, if the chat template is proven to do so."""

from __future__ import annotations

import datetime
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightrl.environments.base import Message, Tools
from lightrl.records import ImageInputs

MARK = "\U000f0e4c"
"""Private-use character inside literal special-token text while it is rendered, so that it is not read as the token."""
SHORT, LONG = "Qa1", "Zb2 Zb3 " * 7 + "Zb4"
"""Stand-ins of different lengths for what was sampled."""
_STARTS, _PROMPTS = 512, 64  # cached renderings, and token IDs of first messages

_USER: Message = {"role": "user", "content": "Qu9"}


def _called(*calls: tuple[str, str]) -> Message:
    """The assistant's message that calls tools, each with a name and a value of its argument `x`."""
    written = [
        {"type": "function", "id": f"call{number:05d}", "function": {"name": name, "arguments": {"x": value}}}
        for number, (name, value) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": written}


def _result(name: str, number: int) -> Message:
    """The result of a call."""
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": "Qr8"}


class Tokens(list[int]):
    """Token IDs with placeholders of images.

    Attributes:
        short: The same with one placeholder per image, for engines that expand them.
        images: Decoded images, in order.
    """

    def __init__(self, ids: Sequence[int], short: Sequence[int] | None = None, images: Sequence[Any] = ()) -> None:
        super().__init__(ids)
        self.short = list(ids if short is None else short)
        self.images = list(images)


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the policy: what the engine was asked, what it sampled, and the same as a message."""

    prompt_ids: list[int]
    completion_ids: list[int]
    reply: Message


class ImageProcessor(Protocol):
    """Interface of a model's processor."""

    @property
    def wants_blocks(self) -> bool:
        """Whether the chat template drops content that is a string instead of a list of blocks."""

    def token(self, kind: str) -> str | None:
        """Placeholder of one medium of that kind in a prompt's text."""

    def images(self, values: Sequence[Any]) -> ImageInputs:
        """Decodes images and makes their model inputs."""


class Bridge(ABC):
    """Turns conversations into tokens for one chat template.

    Args:
        processor: Processor of a model that sees images; None rejects images.
    """

    _special: Mapping[int, str]

    def __init__(self, processor: ImageProcessor | None = None) -> None:
        self.processor = processor
        self._parallel: dict[bool, bool] = {}  # by whether there are tools
        self._drops: dict[str, bool] = {}  # by role

    def opened(self, messages: Sequence[Message]) -> list[Message]:
        """Copies of the messages with decoded images.

        Raises:
            ValueError: Content that the model or this bridge does not take, or that can't be read.
        """
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
                f"environment: a {role} message has a content block of type {kind!r} with {', '.join(sorted(part))}. "
                "Use text and {'type': 'image', 'image': ...}, or describe it in words."
            )
        if self.processor is None:
            raise ValueError(
                f"environment: a {role} message has a content block of type 'image', but the model or its renderer "
                "takes text only. Describe it in words; for a model that sees set `renderer: template`."
            )
        return {"type": kind, "image": self.processor.images([part]).images[0]}

    def plain_ids(self, tokenizer: Any, text: str) -> list[int]:
        """Token IDs of a text. Special tokens in it become ordinary ones."""
        (marked,) = guard([{"role": "", "content": text}], self._special)
        return encode_marked(tokenizer, marked["content"])

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        return bool(token_ids) and token_ids[-1] in self._special

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Tools) -> Tokens:
        """The whole conversation, up to the beginning of the assistant's next turn.

        Raises:
            ValueError: The template rejects the conversation.
        """

    def hidden(self, tools: Tools) -> str | None:
        """What the model does not see: its tools, or its calls of them in later turns. None if it sees both.

        Conversations that differ in a tool or in a call must not render alike.
        """
        begins: list[list[Message]] = [[_USER], [{"role": "system", "content": "Qs9"}, _USER]]
        for number in range(len(tools)):
            without = [*tools[:number], *tools[number + 1 :]]
            if all(self._same([(begin, tools), (begin, without)]) for begin in begins):
                return "its tools"
        calls = [_called(("Qt7", SHORT)), _called(("Qt8", SHORT)), _called(("Qt7", LONG))]
        for answer in (_result("Qt7", 0), {"role": "user", "content": "Qr8"}):
            conversations = [([_USER, said, answer], tools) for said in calls]
            if all(self._rendered(*each) is not None for each in conversations):
                alike = any(self._same([conversations[0], other]) for other in conversations[1:])
                return "its calls of tools in later turns" if alike else None
        return "its calls of tools in later turns"

    def drops(self, role: str, tools: Tools) -> bool:
        """Whether the template drops messages of that role after the assistant's turn."""
        if role not in self._drops:
            said = _called(("Qt7", SHORT)) if role == "tool" else {"role": "assistant", "content": SHORT}
            answers = [{**_result("Qt7", 0), "role": role, "content": content} for content in ("Qr8", "Qr9")]
            self._drops[role] = self._same([([_USER, said, answer], tools) for answer in answers])
        return self._drops[role]

    def _same(self, conversations: Sequence[tuple[Sequence[Message], Tools]]) -> bool:
        """Whether two conversations have the same tokens; False if the template takes only one of them."""
        one, other = (self._rendered(messages, tools) for messages, tools in conversations)
        return one == other

    def _rendered(self, messages: Sequence[Message], tools: Tools) -> Tokens | None:
        try:
            return self.render(messages, tools)
        except ValueError:
            return None

    def takes_parallel_calls(self, tools: Tools) -> bool:
        """Whether a message may have two tool calls. Some templates raise on the second, or drop it."""
        if bool(tools) not in self._parallel:
            self._parallel[bool(tools)] = self._renders_parallel_calls(tools)
        return self._parallel[bool(tools)]

    def _renders_parallel_calls(self, tools: Tools) -> bool:
        renderings = []
        for names in (("Qt7", "Qt8"), ("Qt7", "Qt9")):
            results = [_result(name, number) for number, name in enumerate(names)]
            renderings.append(self._rendered([_USER, _called(*((name, SHORT) for name in names)), *results], tools))
        return None not in renderings and renderings[0] != renderings[1]

    @abstractmethod
    def extend(
        self, turn: SampledTurn, history: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> Tokens | None:
        """The tokens to append to prompt and completion so that the assistant's next turn begins.

        None if the template is not proven to extend these.

        Args:
            turn: Last turn.
            history: Conversation before it.
            new: Messages after it.
            tools: JSON schemas.
        """


class TemplateBridge(Bridge):
    """Extends tokens for any chat template for which rendering stand-ins proves that it may.

    To find what a template writes after the assistant's turn, conversations are rendered in which stand-ins replace
    what was sampled: two texts of different lengths, after two histories of different lengths. Appending is proven if
    in all of them

    - the conversation begins with what the engine was asked (no earlier turn is rewritten, no thought dropped),
    - content, thoughts, and every tool call of the reply are still there,
    - the turn ends with the token that the policy ended it with,
    - and what follows is the same text, so that it depends on nothing before it.

    The text follows a special token, so it can be tokenized alone. A reply that was cut off, or ended by a stop string,
    is ended with the template's token, as context. The cost does not grow with the conversation, unless histories
    matter to the template (DeepSeek's tool results): then the real one is rendered.

    Args:
        tokenizer: Tokenizer with a chat template.
        template_kwargs: Variables of the template, such as `enable_thinking`.
        processor: Processor of a model that sees images.

    Raises:
        ValueError: There is no chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "actor.chat_template=None: the tokenizer has no chat template. Set one for the environment."
            )
        super().__init__(processor)
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._special = special_texts(tokenizer)
        self._form: _Form | None = None
        self._ender: str | None = None
        self._starts: dict[str, str] = {}
        self._ids = functools.lru_cache(_PROMPTS)(functools.partial(encode_marked, tokenizer))

    def _text(self, messages: Sequence[Message], tools: Tools, form: _Form | None = None) -> str:
        form = form or self._form or _Form()
        return str(
            self.tokenizer.apply_chat_template(
                [self._content(form.message(message)) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **self.template_kwargs,
            )
        )

    def _try(self, messages: Sequence[Message], tools: Tools, form: _Form | None = None) -> str | None:
        """`_text`, or None if the template rejects the conversation: it may raise anything."""
        try:
            return self._text(messages, tools, form)
        except Exception:
            return None

    def _content(self, message: Message) -> Message:
        """The message with content as the template reads it."""
        if self.processor is None or not isinstance(message.get("content"), str) or not self.processor.wants_blocks:
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    def _tokens(self, text: str, messages: Sequence[Message]) -> Tokens:
        """IDs of a rendered text, with each placeholder that the template wrote expanded to those of its image."""
        images = images_of(messages)
        if not images:
            return Tokens(encode_marked(self.tokenizer, text))
        assert self.processor is not None, "images were opened"
        shown = self.processor.images(images)
        first, *rest = text.split(shown.token)
        if len(rest) != len(images):
            raise ValueError(f"environment: the chat template shows {len(rest)} of {len(images)} images.")
        whole = first + "".join(placeholders + part for placeholders, part in zip(shown.texts, rest, strict=True))
        return Tokens(encode_marked(self.tokenizer, whole), encode_marked(self.tokenizer, text), images)

    def render(self, messages: Sequence[Message], tools: Tools) -> Tokens:
        self._learn_form(messages[:1], tools)
        first = all(message["role"] != "assistant" for message in messages)  # which all attempts of a group render
        try:
            text = (self._begun if first else self._text)(guard(messages, self._special), tools)
        except Exception as error:
            raise ValueError(
                f"The chat template rejects the conversation: {error}. If it has no tool messages, use "
                "`result_role: user`; if it takes one tool call at a time, set `on_parse_error`."
            ) from error
        return Tokens(self._ids(text)) if first and not images_of(messages) else self._tokens(text, messages)

    def _learn_form(self, first: Sequence[Message], tools: Tools) -> None:
        """Finds how this template takes a message with tool calls: some want JSON text, some no content."""
        if self._form is not None:
            return
        for answer in (_result("Qt7", 0), {"role": "user", "content": "Qr8"}):
            said = [_USER, _called(("Qt7", SHORT)), answer]
            for form in (_Form(), _Form(none=True), _Form(text=True), _Form(none=True, text=True)):
                text = self._try(said, tools, form)
                if text is not None and "Qt7" in text and SHORT in text:
                    self._form = form
                    return
        self._form = _Form()

    def extend(
        self, turn: SampledTurn, history: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> Tokens | None:
        self._learn_form(history[:1], tools)
        if self.processor is not None and not self._placeholders.isdisjoint(turn.completion_ids):
            return None  # sampled, it has no image; in a new row it is text
        new = guard(new, self._special)
        ended = self._end_of_turn(turn.completion_ids, history, tools)
        if ended is None:
            return None
        end, sampled = ended
        suffix = self._common_suffix(self._histories(history), turn.reply, new, tools, end)
        if suffix is None:  # the real history then, at a cost that grows with it
            suffix = self._common_suffix([guard(history, self._special)], turn.reply, new, tools, end)
        if suffix is None:
            return None
        ids = self._tokens(end + suffix, new)
        if not ids or ids[0] != self.tokenizer.convert_tokens_to_ids(end):
            return None
        return Tokens(ids[1:], ids.short[1:], ids.images) if sampled else ids

    @functools.cached_property
    def _placeholders(self) -> set[int]:
        """IDs of the placeholders of media."""
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
        """The prompt alone, and with two more turns of the kinds that there were."""
        turns = next((i for i, message in enumerate(history) if message["role"] == "assistant"), len(history))
        prompt = guard(history[:turns], self._special)
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

    def _begun(self, history: Sequence[Message], tools: Tools) -> str:
        """`_text` of a history, cached for later turns and the group's other attempts."""
        try:
            key = json.dumps([history, tools, datetime.date.today().isoformat()])  # templates may write the day
        except (TypeError, ValueError):  # it shows images
            return self._text(history, tools)
        if (text := self._starts.get(key)) is None:
            text = self._starts[key] = self._text(history, tools)
            if len(self._starts) > _STARTS:
                del self._starts[next(iter(self._starts))]
        return text

    def _common_suffix(
        self, histories: Sequence[Sequence[Message]], reply: Message, new: Sequence[Message], tools: Tools, end: str
    ) -> str | None:
        """What follows `end`, if it is the same after all histories and replies."""
        found: set[str] = set()
        starts: list[str] = []
        stand_ins = [_stand_in(reply, content) for content in (SHORT, LONG)]
        for history in histories:
            try:
                start = self._begun(history, tools)
            except Exception:  # of the template
                return None
            starts.append(start)
            for stand_in, marks in stand_ins:
                full = self._try([*history, stand_in, *new], tools)
                if full is None or not full.startswith(start):
                    return None
                body = full[len(start) :]
                places = [body.find(mark) for mark in marks]
                if -1 in places:
                    return None
                last = max(place + len(mark) for place, mark in zip(places, marks, strict=True))
                enders = {end, self.tokenizer.eos_token, self._ender} - {None}
                if first_of(body[last:], enders) != end:
                    return None
                found.add(body[body.index(end, last) + len(end) :])
            if len(found) != 1:
                return None
        (suffix,) = found
        return suffix if self._survives(starts[0], histories[0], reply, new, tools, end + suffix) else None

    def _survives(
        self, start: str, history: Sequence[Message], reply: Message, new: Sequence[Message], tools: Tools, tail: str
    ) -> bool:
        """Whether the real reply, with thoughts written into its content, stays in the conversation."""
        (real,) = guard([reply], self._special)
        full = self._try([*history, real, *new], tools)
        if full is None or not full.startswith(start) or not full.endswith(tail):
            return False
        body = full[len(start) : len(full) - len(tail)]
        thoughts = str(real.get("reasoning_content") or "").strip()
        return str(real.get("content") or "").strip() in body and thoughts in body


@dataclass(frozen=True)
class _Form:
    """How a template takes a message with tool calls: `text`: arguments as JSON text; `none`: empty content as None."""

    none: bool = False
    text: bool = False

    def message(self, message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        message = dict(message)
        if self.none and not message["content"]:
            message["content"] = None
        if self.text:
            message["tool_calls"] = [
                {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
                for call in message["tool_calls"]
                for function in (call["function"],)
            ]
        return message


def _stand_in(reply: Message, content: str) -> tuple[Message, list[str]]:
    """The reply with every sampled text replaced, and the replacements."""
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


def first_of(text: str, tokens: Any) -> str | None:
    """The token that comes first in the text; None without any."""
    found = [(place, -len(token), token) for token in tokens if token and (place := text.find(token)) >= 0]
    return min(found)[2] if found else None


def special_texts(tokenizer: Any) -> dict[int, str]:
    """Token ID -> text of the special tokens."""
    return {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or token.content in tokenizer.all_special_tokens
    }


def guard(messages: Sequence[Message], special: Mapping[int, str]) -> list[Message]:
    """The messages with a mark inside each special token's text."""
    tokens = [token for token in special.values() if len(token) > 1]

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            for token in tokens:
                if token in value:
                    value = value.replace(token, token[0] + MARK + token[1:])
            return value
        if isinstance(value, Mapping):
            return {key: marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [marked(item) for item in value]
        return value

    return [{key: value if key == "role" else marked(value) for key, value in message.items()} for message in messages]


def encode_marked(tokenizer: Any, text: str) -> list[int]:
    """Token IDs of a rendered text. Special-token text with a mark inside becomes ordinary tokens."""
    return [number for part in text.split(MARK) if part for number in tokenizer.encode(part, add_special_tokens=False)]


def images_of(messages: Sequence[Message]) -> list[Any]:
    """The images that messages show, in order."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]

"""Common parts of the APIs of model servers."""

from __future__ import annotations

import binascii
import json
import uuid
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.environments.base import Message
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError


@dataclass(frozen=True)
class Members:
    """Members of a JSON object in a request. Others are rejected; null counts as left out.

    Attributes:
        read: Members with their effect.
        sampling: Sampling parameters. They have no effect, because the loss takes tokens to be drawn by the run's
            settings. They are counted, and named once in the log.
        harmless: Members without an effect on the completion.
        fixed: Members that are accepted only with these values.
    """

    read: Collection[str] = ()
    sampling: Collection[str] = ()
    harmless: Collection[str] = ()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, given: Mapping[str, Any], where: str = "") -> tuple[str, ...]:
        """The sampling parameters in an object at `where`, such as "messages[0].".

        Raises:
            RefusedError: A member is unknown, or has a value that is not supported.
        """
        found = []
        for name, value in given.items():
            if value is None or name in self.read or name in self.harmless:
                continue
            if name in self.sampling:
                found.append(where + name)
            elif name not in self.fixed:
                raise RefusedError(400, f"Unknown parameter: '{where}{name}'.", where + name, UNKNOWN)
            elif not any(_equal(value, fixed) for fixed in self.fixed[name]):
                code = "unsupported_value" if self.fixed[name] else "unsupported_parameter"
                shown = json.dumps(value)[:200]
                raise RefusedError(
                    400, f"{where}{name}={shown}: not supported here. Leave {name} out.", where + name, code
                )
        return tuple(found)


def _equal(value: Any, fixed: Any) -> bool:
    return value == fixed and isinstance(value, bool) == isinstance(fixed, bool)


UNKNOWN = "unknown_parameter"

TEXT_BLOCK = Members(
    read=("type", "text", "refusal"),
    harmless=("cache_control", "citations", "prompt_cache_breakpoint", "annotations", "logprobs"),
)


class Api(ABC):
    """One interface, at `path` without `/v1`: from a body with `members` to what is asked, and back from a turn."""

    path: str
    counting: str | None = None
    """Path that counts a request's tokens."""
    members: Members
    required: tuple[str, ...] = ()
    """Members without which no reply can be asked for."""

    def read(self, body: Mapping[str, Any], recall: Callable[[str], list[Message]], *, count: bool = False) -> Asked:
        """What a parsed body asks. `recall` gives the conversation of an earlier response by its ID.

        Args:
            count: Whether only the number of tokens is asked for.

        Raises:
            RefusedError: The body is malformed, or asks for something that is not supported.
        """
        ignored = self.members.check(body)
        for name in () if count else self.required:
            if body.get(name) is None:
                raise RefusedError(400, f"{name}: this member is required.", name)
        wishes = self.wishes(body)
        messages, instructions = self.conversation(body, recall)
        given_tools = listed(body, "tools")
        tools = [self.tool(tool, f"tools[{i}]") for i, tool in enumerate(given_tools)]
        strict = any(tool.get("function", tool).get("strict") for tool in given_tools)
        ignored += wishes.pop("ignored", ()) + (("tools.strict",) if strict else ())
        forced = wishes.get("forced")
        names = {tool["function"]["name"] for tool in tools}
        if forced is not None and not (set(forced) <= names if forced else names):
            raise RefusedError(400, f"tool_choice={list(forced)}: tools has no such function.", "tool_choice")
        return Asked(
            messages=messages,
            tools=[] if wishes.pop("hidden", False) else tools,
            model=str(body.get("model") or ""),
            stream=bool(body.get("stream")),
            ignored=ignored,
            template_kwargs=given(body, "chat_template_kwargs"),
            instructions=instructions,
            **wishes,
        )

    @abstractmethod
    def conversation(
        self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]
    ) -> tuple[list[Message], int]:
        """The messages, and how many of them are instructions; see `Asked.instructions`."""

    @abstractmethod
    def tool(self, tool: Any, where: str) -> dict[str, Any]:
        """A tool as chat templates take it."""

    @abstractmethod
    def wishes(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Further fields of `Asked`, and `hidden`: whether the tools are left out."""

    @abstractmethod
    def write(self, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
        """Body of the answer, which has `Asked.n` replies."""

    @abstractmethod
    def events(self, asked: Asked, answers: Sequence[Answered], written: Mapping[str, Any]) -> Iterator[bytes]:
        """The answer as server-sent events; `written` is its body."""

    def counted(self, tokens: int) -> dict[str, Any]:
        """Body of the answer to a request for the number of tokens."""
        return {"input_tokens": tokens}

    def error(self, refused: RefusedError) -> dict[str, Any]:
        """Body of a rejection, in OpenAI's shape."""
        kinds = {401: "authentication_error", 403: "permission_error"}
        kind = kinds.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
        error = {"message": refused.message, "type": kind, "param": refused.parameter, "code": refused.code}
        return {"error": error}


def new_id(prefix: str) -> str:
    """A unique ID."""
    return prefix + uuid.uuid4().hex[:24]


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def pieces(text: str, size: int = 64) -> Iterator[str]:
    """The text in the parts of a stream."""
    for start in range(0, len(text), size):
        yield text[start : start + size]


def of_type(value: Any, kind: type | tuple[type, ...], name: str, what: str) -> Any:
    """The value. Raises a `RefusedError` if it is of another type."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise RefusedError(400, f"{name} must be {what}, not {json.dumps(value)[:200]}.", name)
    return value


def given(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A member that is an object; empty if it is missing or null."""
    value = body.get(name)
    found: dict[str, Any] = {} if value is None else of_type(value, dict, name, "an object")
    return found


def listed(body: Mapping[str, Any], name: str) -> list[Any]:
    """A member that is a list; empty if it is missing or null."""
    value = body.get(name)
    found: list[Any] = [] if value is None else of_type(value, list, name, "a list")
    return found


def whole(value: Any, name: str) -> int | None:
    """A count above 0, or None. Raises a `RefusedError` for anything else."""
    if value is not None and of_type(value, int, name, "an integer") < 1:
        raise RefusedError(400, f"{name} must be at least 1, not {value}.", name)
    count: int | None = value
    return count


def text_of(content: Any, name: str, kinds: Sequence[str] = ("text",)) -> str:
    """Text of a message's content: a string, or blocks of text, joined by newlines. Anything else is rejected."""
    found = content_of(content, name, kinds)
    if not isinstance(found, str):
        raise RefusedError(400, f"{name} holds an image; only text is taken there.", name)
    return found


def content_of(content: Any, name: str, kinds: Sequence[str] = ("text",)) -> Any:
    """A message's content as chat templates take it: text, or, with images, blocks in their order."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    blocks = []
    for block in of_type(content, list, name, "a string or a list of blocks"):
        kind = of_type(block, dict, name, "a list of objects").get("type")
        if kind in IMAGES:
            blocks.append({"type": "image", "image": _image(block, f"{name}.{kind}")})
            continue
        if kind not in kinds:
            raise RefusedError(400, f"{name} holds a block of type {kind!r}; text and images are taken here.", name)
        TEXT_BLOCK.check(block, f"{name}.")
        text = of_type(block.get("text", block.get("refusal")), str, f"{name}.text", "a string")
        blocks.append({"type": "text", "text": text})
    if any(block["type"] == "image" for block in blocks):
        return blocks
    return "\n".join(block["text"] for block in blocks)


IMAGES = {  # of chat completions, responses, and messages
    "image_url": Members(read=["type", "image_url"], harmless=["cache_control", "prompt_cache_breakpoint"]),
    "input_image": Members(read=["type", "image_url"], harmless=["detail", "prompt_cache_breakpoint"]),
    "image": Members(read=["type", "source"], harmless=["cache_control"]),
}


def _image(block: Mapping[str, Any], where: str) -> str:
    """The data URL of an image."""
    IMAGES[block["type"]].check(block, f"{where}.")
    url = block.get("image_url")
    if block["type"] == "image":
        source = of_type(block.get("source"), dict, f"{where}.source", "an object")
        data = source.get("type") == "base64"
        url = f"data:{source.get('media_type')};base64,{source.get('data')}" if data else source.get("url")
    elif isinstance(url, dict):
        url = url.get("url")
    url = of_type(url, str, where, "the data URL of an image")
    head, _, data = url.partition(",")
    try:
        if not head.startswith("data:") or not b64decode(data, validate=True):
            raise ValueError
    except (binascii.Error, ValueError):
        raise RefusedError(
            400,
            f"{where}={url[:60]!r}: files and URLs of other servers are not read here. Send the image as "
            "data:image/png;base64,...",
            where,
        ) from None
    return url


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as chat templates take it. Raises a `RefusedError` without a name or with an invalid schema."""
    function: dict[str, Any] = {"name": of_type(name, str, f"{where}.name", "a string")}
    if description is not None:
        function["description"] = of_type(description, str, f"{where}.description", "a string")
    if parameters is not None:
        function["parameters"] = of_type(parameters, dict, f"{where}.parameters", "a JSON schema")
    return {"type": "function", "function": function}


def stops_of(value: Any, name: str) -> tuple[str, ...]:
    """Stop strings: a text, or a list."""
    stops = [value] if isinstance(value, str) else of_type(value or [], list, name, "a string or a list of strings")
    return tuple(dict.fromkeys(stop for stop in stops if of_type(stop, str, name, "a list of strings")))


def arguments_of(value: Any, name: str) -> Any:
    """Arguments of a tool call: parsed if they are a JSON object, else the text."""
    text = of_type(value, str, name, "a string of JSON")
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def call_message(call_id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """A tool call of an assistant's message."""
    function = {"name": of_type(name, str, f"{where}.name", "a string"), "arguments": arguments}
    return {"type": "function", "id": of_type(call_id, str, f"{where}.id", "a string"), "function": function}

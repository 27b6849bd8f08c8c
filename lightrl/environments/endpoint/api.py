"""Shared code of the model server APIs."""

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
    """Supported parameters of a JSON object in a request. Others are rejected. null means unset.

    Attributes:
        read: Parameters that take effect.
        sampling: Sampling parameters. They are ignored, because the loss assumes the run's sampling settings. They are
            counted and reported once in a warning.
        harmless: Parameters without an effect on the completion.
        fixed: Parameters that are accepted only with these values.
    """

    read: Collection[str] = ()
    sampling: Collection[str] = ()
    harmless: Collection[str] = ()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, given: Mapping[str, Any], where: str = "") -> tuple[str, ...]:
        """Validates an object at `where`, such as "messages[0].". Returns its sampling parameters.

        Raises:
            RefusedError: A parameter is unknown, or its value is not supported.
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
                raise RefusedError(400, f"{where}{name}={shown}: is not supported. Remove {name}.", where + name, code)
        return tuple(found)


def _equal(value: Any, fixed: Any) -> bool:
    return value == fixed and isinstance(value, bool) == isinstance(fixed, bool)


UNKNOWN = "unknown_parameter"

TEXT_BLOCK = Members(
    read=("type", "text", "refusal"),
    harmless=("cache_control", "citations", "prompt_cache_breakpoint", "annotations", "logprobs"),
)


class Api(ABC):
    """Base class of an API at `path` (without `/v1`). Converts request bodies to `Asked`, and turns to responses."""

    path: str
    counting: str | None = None
    """Path of token counting requests."""
    members: Members
    required: tuple[str, ...] = ()
    """Required parameters."""

    def read(self, body: Mapping[str, Any], recall: Callable[[str], list[Message]], *, count: bool = False) -> Asked:
        """Converts a parsed body to a request.

        Args:
            body: Parsed JSON body.
            recall: Function from the ID of an earlier response to its conversation.
            count: Whether to only count tokens.

        Raises:
            RefusedError: The body is malformed, or contains unsupported parameters.
        """
        ignored = self.members.check(body)
        for name in () if count else self.required:
            if body.get(name) is None:
                raise RefusedError(400, f"{name}: is required. Add it.", name)
        wishes = self.wishes(body)
        messages, instructions = self.conversation(body, recall)
        given_tools = listed(body, "tools")
        tools = [self.tool(tool, f"tools[{i}]") for i, tool in enumerate(given_tools)]
        strict = any(tool.get("function", tool).get("strict") for tool in given_tools)
        ignored += wishes.pop("ignored", ()) + (("tools.strict",) if strict else ())
        forced = wishes.get("forced")
        names = {tool["function"]["name"] for tool in tools}
        if forced is not None and not (set(forced) <= names if forced else names):
            raise RefusedError(400, f"tool_choice={list(forced)}: is not in tools. Add the function.", "tool_choice")
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
        """The messages, and the number of instructions (`Asked.instructions`)."""

    @abstractmethod
    def tool(self, tool: Any, where: str) -> dict[str, Any]:
        """Converts a tool to the format of chat templates."""

    @abstractmethod
    def wishes(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Other fields of `Asked`, and `hidden`: whether to omit the tools."""

    @abstractmethod
    def write(self, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
        """Body of the response with `Asked.n` replies."""

    @abstractmethod
    def events(self, asked: Asked, answers: Sequence[Answered], written: Mapping[str, Any]) -> Iterator[bytes]:
        """Converts the response with the body `written` to server-sent events."""

    def counted(self, tokens: int) -> dict[str, Any]:
        """Body of the response to a token counting request."""
        return {"input_tokens": tokens}

    def error(self, refused: RefusedError) -> dict[str, Any]:
        """Body of an error in OpenAI's format."""
        kinds = {401: "authentication_error", 403: "permission_error"}
        kind = kinds.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
        error = {"message": refused.message, "type": kind, "param": refused.parameter, "code": refused.code}
        return {"error": error}


def new_id(prefix: str) -> str:
    """Generates a unique ID."""
    return prefix + uuid.uuid4().hex[:24]


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Formats a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def pieces(text: str, size: int = 64) -> Iterator[str]:
    """Splits a text into the chunks of a stream."""
    for start in range(0, len(text), size):
        yield text[start : start + size]


def of_type(value: Any, kind: type | tuple[type, ...], name: str, what: str) -> Any:
    """Returns the value. Raises a `RefusedError` if it has another type."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise RefusedError(400, f"{name} must be {what}, not {json.dumps(value)[:200]}.", name)
    return value


def given(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A parameter that is an object; empty if missing or null."""
    value = body.get(name)
    found: dict[str, Any] = {} if value is None else of_type(value, dict, name, "an object")
    return found


def listed(body: Mapping[str, Any], name: str) -> list[Any]:
    """A parameter that is a list; empty if missing or null."""
    value = body.get(name)
    found: list[Any] = [] if value is None else of_type(value, list, name, "a list")
    return found


def whole(value: Any, name: str) -> int | None:
    """A positive integer or None. Raises a `RefusedError` for other values."""
    if value is not None and of_type(value, int, name, "an integer") < 1:
        raise RefusedError(400, f"{name} must be at least 1, not {value}.", name)
    count: int | None = value
    return count


def text_of(content: Any, name: str, kinds: Sequence[str] = ("text",)) -> str:
    """Text of a message's content: a string, or text blocks joined by newlines. Rejects other content."""
    found = content_of(content, name, kinds)
    if not isinstance(found, str):
        raise RefusedError(400, f"{name}: contains an image, but only text is supported. Remove the image.", name)
    return found


def content_of(content: Any, name: str, kinds: Sequence[str] = ("text",)) -> Any:
    """A message's content in the format of chat templates: text, or a list of blocks if it contains images."""
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
            raise RefusedError(
                400, f"{name}: contains a block of type {kind!r}, which is not supported. Use text or images.", name
            )
        TEXT_BLOCK.check(block, f"{name}.")
        text = of_type(block.get("text", block.get("refusal")), str, f"{name}.text", "a string")
        blocks.append({"type": "text", "text": text})
    if any(block["type"] == "image" for block in blocks):
        return blocks
    return "\n".join(block["text"] for block in blocks)


IMAGES = {  # chat completions, responses, and messages
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
            f"{where}={url[:60]!r}: must be a data URL. Send the image as data:image/png;base64,...",
            where,
        ) from None
    return url


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool in the format of chat templates. Raises a `RefusedError` if the name or the schema is invalid."""
    function: dict[str, Any] = {"name": of_type(name, str, f"{where}.name", "a string")}
    if description is not None:
        function["description"] = of_type(description, str, f"{where}.description", "a string")
    if parameters is not None:
        function["parameters"] = of_type(parameters, dict, f"{where}.parameters", "a JSON schema")
    return {"type": "function", "function": function}


def stops_of(value: Any, name: str) -> tuple[str, ...]:
    """Stop strings, given as a string or a list."""
    stops = [value] if isinstance(value, str) else of_type(value or [], list, name, "a string or a list of strings")
    return tuple(dict.fromkeys(stop for stop in stops if of_type(stop, str, name, "a list of strings")))


def arguments_of(value: Any, name: str) -> Any:
    """Arguments of a tool call: parsed if they are a JSON object, otherwise the text."""
    text = of_type(value, str, name, "a string of JSON")
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def call_message(call_id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """A tool call of an assistant message."""
    function = {"name": of_type(name, str, f"{where}.name", "a string"), "arguments": arguments}
    return {"type": "function", "id": of_type(call_id, str, f"{where}.id", "a string"), "function": function}

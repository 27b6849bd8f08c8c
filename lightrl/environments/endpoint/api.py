"""Shared code of the model server APIs."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from lightrl.environments.base import Message
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError


class Api(ABC):
    """Base class of an API at `path` (without `/v1`). Converts request bodies to `Asked`, and turns to responses."""

    path: str
    counting: str | None = None
    """Path of token counting requests."""
    effective: Collection[str] = ()
    """Parameters that take effect."""
    harmless: Collection[str] = ()
    """Parameters without an effect on the completion."""
    rejected: Collection[str] = ()
    """Parameters that change what the model reads in ways that are not supported. All others, such as sampling
    parameters, are ignored, because the loss assumes the run's settings. They are counted and reported once."""

    def read(self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]) -> Asked:
        """Converts a parsed body to a request.

        Args:
            body: Parsed JSON body.
            recall: Function from the ID of an earlier response to its conversation.

        Raises:
            RefusedError: The body is malformed, or contains unsupported parameters.
        """
        for name in self.rejected:
            if body.get(name):
                shown = json.dumps(body[name])[:200]
                raise RefusedError(
                    400, f"{name}={shown}: is not supported. Remove {name}.", name, "unsupported_parameter"
                )
        known = {*self.effective, *self.harmless, *self.rejected}
        try:
            wishes = self.wishes(body)
            messages, instructions = self.conversation(body, recall)
            variables = dict(body.get("chat_template_kwargs") or {})
            tools = [self.tool(tool) for tool in body.get("tools") or ()]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RefusedError(400, f"The request is malformed: {type(error).__name__}: {error}.") from error
        if not messages:
            raise RefusedError(400, "messages: must not be empty. Add a message.", "messages")
        offered = [tool["function"]["name"] for tool in tools]
        if (forced := wishes.get("forced")) is not None and not (offered and {*forced} <= {*offered}):
            names = ", ".join(forced) or "a tool"
            raise RefusedError(400, f"tool_choice: requires {names}, which is not in tools. Add it.", "tool_choice")
        return Asked(
            messages=messages,
            tools=[] if wishes.pop("hidden", False) else tools,
            model=str(body.get("model") or ""),
            stream=bool(body.get("stream")),
            ignored=tuple(name for name, value in body.items() if value is not None and name not in known),
            template_kwargs=variables,
            instructions=instructions,
            **wishes,
        )

    @abstractmethod
    def conversation(
        self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]
    ) -> tuple[list[Message], int]:
        """The messages, and the number of instructions (`Asked.instructions`)."""

    @abstractmethod
    def tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
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


def whole(value: Any) -> int | None:
    """A positive number, or None. With any other value, an engine error would end the run."""
    if value is not None and int(value) < 1:
        raise ValueError(f"{value}: must be at least 1")
    return None if value is None else int(value)


def text_of(content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Text of a message's content: a string, or text blocks joined by newlines. Rejects other content."""
    found = content_of(content, kinds)
    if not isinstance(found, str):
        raise RefusedError(400, "content: contains an image in a message that supports only text. Remove the image.")
    return found


def content_of(content: Any, kinds: Sequence[str] = ("text",)) -> Any:
    """A message's content in the format of chat templates: text, or a list of blocks if it contains images."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = []
    for block in content:
        kind = block["type"]
        if kind in ("image_url", "input_image", "image"):  # chat completions, responses, and messages
            blocks.append({"type": "image", "image": _image(block)})
        elif kind in kinds:
            blocks.append({"type": "text", "text": block["refusal" if kind == "refusal" else "text"]})
        else:
            raise RefusedError(400, f"content: a block of type {kind!r} is not supported. Use text or images.")
    if any(block["type"] == "image" for block in blocks):
        return blocks
    return "\n".join(block["text"] for block in blocks)


def _image(block: Mapping[str, Any]) -> str:
    """The data URL of an image. Rejects other URLs, which the run would fetch."""
    if block["type"] == "image":
        source = block["source"]
        data = source["type"] == "base64"
        url = f"data:{source['media_type']};base64,{source['data']}" if data else source.get("url")
    else:
        url = block["image_url"]
        url = url["url"] if isinstance(url, dict) else url
    if not str(url).startswith("data:"):
        raise RefusedError(400, f"image={url!r}: must be a data URL. Send it as data:image/png;base64,...", "image")
    return str(url)


def function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in the format of chat templates."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def stops_of(value: Any) -> tuple[str, ...]:
    """Stop strings, given as a string or a list."""
    stops = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(stop, str) and stop for stop in stops):  # the engine's error would end the run
        raise ValueError(f"stop={json.dumps(value)[:200]}: must be non-empty strings")
    return stops


def arguments_of(text: str) -> Any:
    """Arguments of a tool call: parsed if they are a JSON object, otherwise the text."""
    try:
        parsed = json.loads(text or "{}")
    except ValueError:
        return text
    return parsed if isinstance(parsed, dict) else text


def call_message(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call of an assistant message."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}

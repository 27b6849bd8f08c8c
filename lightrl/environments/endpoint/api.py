"""What the APIs of model servers have in common."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightrl.environments.base import Message
from lightrl.environments.endpoint.session import Answered, Asked, RefusedError

__all__ = [
    "Api",
    "arguments_of",
    "call_message",
    "event",
    "function_tool",
    "listed",
    "new_id",
    "of_type",
    "pieces",
    "refuse",
    "text_of",
    "whole",
]


class Api(ABC):
    """One interface: from a body to what is asked, and from a turn to what is answered.

    What a program asks about sampling (`temperature`, `top_p`, `seed`, penalties ...) has no effect: the run's settings
    hold, because the loss takes tokens to be sampled by them. It is counted. What would change the shape of the
    answer (several choices, stop strings, a forced tool, JSON of a schema, log-probs) is refused by name, since the
    program would rely on it. The most tokens of a reply are kept to where they are fewer than the run's.

    Attributes:
        path: of its requests, without `/v1`.
        read_names: the members of a body that have an effect, or that name or store things without any on tokens.
    """

    path: str
    read_names: frozenset[str]

    @abstractmethod
    def read(self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]) -> Asked:
        """What a body asks.

        Args:
            body: parsed JSON.
            recall: the conversation of an earlier response, by its id.

        Raises:
            RefusedError: the body is malformed, or asks for what there is not.
        """

    @abstractmethod
    def write(self, asked: Asked, answered: Answered) -> dict[str, Any]:
        """The answer's body."""

    @abstractmethod
    def events(self, asked: Asked, answered: Answered, written: Mapping[str, Any]) -> Iterator[bytes]:
        """The same as server-sent events; `written` is the answer's body."""

    def error(self, refused: RefusedError) -> dict[str, Any]:
        """The body of an answer that is none; OpenAI's shape."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
        error = {"message": refused.message, "type": kind, "param": refused.parameter, "code": refused.code}
        return {"error": error}

    def _ignored(self, body: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(name for name, value in body.items() if value is not None and name not in self.read_names)


def new_id(prefix: str) -> str:
    """An id that nothing else has."""
    return prefix + uuid.uuid4().hex[:24]


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def pieces(text: str, size: int = 64) -> Iterator[str]:
    """The text in parts, as a stream brings it."""
    for start in range(0, len(text), size):
        yield text[start : start + size]


def of_type(value: Any, kind: type | tuple[type, ...], name: str, what: str) -> Any:
    """The value.

    Raises:
        RefusedError: it is of another type.
    """
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise RefusedError(400, f"{name} must be {what}, not {json.dumps(value)[:200]}.", name)
    return value


def refuse(body: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses what changes the shape of the answer.

    Args:
        body: of the request.
        allowed: name -> its values that change nothing, beside None.

    Raises:
        RefusedError: a member has another value.
    """
    for name, values in allowed.items():
        if (value := body.get(name)) is not None and not any(type(value) is type(v) and value == v for v in values):
            raise RefusedError(
                400, f"{name}={json.dumps(value)[:200]} is not offered here: the run's sampling settings hold.", name
            )


def listed(body: Mapping[str, Any], name: str) -> list[Any]:
    """A member that is a list; empty where it is missing or null."""
    value = body.get(name)
    found: list[Any] = [] if value is None else of_type(value, list, name, "a list")
    return found


def whole(value: Any, name: str) -> int | None:
    """A count above 0, or None.

    Raises:
        RefusedError: it is neither.
    """
    if value is not None and of_type(value, int, name, "an integer") < 1:
        raise RefusedError(400, f"{name} must be at least 1, not {value}.", name)
    count: int | None = value
    return count


def text_of(content: Any, name: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message's content: a string, or blocks of text, which are joined by newlines.

    Raises:
        RefusedError: it is something else, or shows something.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for block in of_type(content, list, name, "a string or a list of blocks"):
        kind = of_type(block, dict, name, "a list of objects").get("type")
        if kind not in kinds:
            raise RefusedError(400, f"{name} holds a block of type {kind!r}; this endpoint takes text only.", name)
        texts.append(of_type(block.get("text", block.get("refusal")), str, f"{name}.text", "a string"))
    return "\n".join(texts)


def function_tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as chat templates take it.

    Raises:
        RefusedError: it has no name, or a parameter schema that is none.
    """
    function: dict[str, Any] = {"name": of_type(name, str, f"{where}.name", "a string")}
    if description is not None:
        function["description"] = of_type(description, str, f"{where}.description", "a string")
    if parameters is not None:
        function["parameters"] = of_type(parameters, dict, f"{where}.parameters", "a JSON schema")
    return {"type": "function", "function": function}


def arguments_of(value: Any, name: str) -> Any:
    """Arguments of a tool call: parsed where they are a JSON object, else the text."""
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

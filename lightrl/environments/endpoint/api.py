"""The common form of the model server APIs: the body of a chat completions request."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightrl.environments.base import Message, call_message
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError

HARMLESS = {
    *("user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("prompt_cache_options", "request_id", "session_id", "priority", "cache_salt", "add_generation_prompt"),
    *("modalities", "prediction", "max_tool_calls", "cache_control", "diagnostics", "inference_geo", "speed"),
    *("billing_policy", "fallbacks", "fallback_credit_token"),
}
"""Parameters of the providers and of vLLM without an effect on the completion."""
REJECTED = (
    *("functions", "audio", "web_search_options", "documents", "chat_template"),
    *("background", "context_management", "conversation", "multi_agent", "prompt"),
    *("compaction", "container", "mcp_servers", "thread"),
)
"""Parameters that change what the model reads in ways that are not supported. Unknown parameters, such as sampling
parameters, are ignored, because the loss assumes the run's settings. They are counted and reported once."""
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's earlier parameters -> keys of its `structured_outputs`."""
MOST_LOGPROBS = 20


class Api(ABC):
    """Base class of an API at `path` (without `/v1`). Converts request bodies to `Asked`, and turns to responses."""

    path: str
    counting: str | None = None
    """Path of token counting requests."""

    def read(self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]) -> Asked:
        """Converts a JSON body to a request, or raises a RefusedError. `recall` maps response IDs to conversations."""
        for name in REJECTED:
            if body.get(name):
                shown = json.dumps(body[name])[:200]
                raise RefusedError(400, f"{name}={shown}: not supported. Remove {name}.", name, "unsupported_parameter")
        without = {*HARMLESS, *REJECTED}
        given = {name: value for name, value in body.items() if value is not None and name not in without}
        try:
            return _asked(self.chat(given, recall))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RefusedError(400, f"The request is malformed: {type(error).__name__}: {error}.") from error

    def chat(self, body: dict[str, Any], recall: Callable[[str], list[Message]]) -> dict[str, Any]:
        """Converts a body, with null values removed, to a chat completions body. Keeps unknown parameters."""
        return body

    @abstractmethod
    def write(self, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
        """Body of the response with `Asked.n` replies."""

    @abstractmethod
    def events(self, asked: Asked, answers: Sequence[Answered], written: Mapping[str, Any]) -> Iterator[bytes]:
        """Converts the response with the body `written` to server-sent events."""

    def error(self, refused: RefusedError) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error"}
        kind = kinds.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
        error = {"message": refused.message, "type": kind, "param": refused.parameter, "code": refused.code}
        return {"error": error}


def _asked(body: dict[str, Any]) -> Asked:
    """Converts the body of a chat completions request. Takes the known parameters out of it."""
    messages = [_message(message) for message in body.pop("messages")]
    if not messages:
        raise RefusedError(400, "messages: must not be empty. Add a message.", "messages")
    tools = [_tool(tool) for tool in body.pop("tools", ())]
    offered = {tool["function"]["name"] for tool in tools}
    choice = body.pop("tool_choice", None)
    forced = _forced(choice)
    if forced is not None and not (offered and {*forced} <= offered):
        names = ", ".join(forced) or "a tool"
        raise RefusedError(400, f"tool_choice: requires {names}, which is not in tools. Add it.", "tool_choice")
    limits = [whole(body.pop(name)) for name in ("max_completion_tokens", "max_tokens") if name in body]
    guided = {name: body.pop(old) for old, name in GUIDED.items() if old in body}
    top = int(body.pop("top_logprobs", 0))
    if not 0 <= top <= MOST_LOGPROBS:
        raise ValueError(f"top_logprobs={top}: must be from 0 to {MOST_LOGPROBS}")
    named = isinstance(choice, dict) and choice["type"] == "function"
    asked = Asked(
        messages=messages,
        tools=[] if choice == "none" else tools,
        max_new_tokens=min(limits, default=None),
        model=str(body.pop("model", "")),
        stream=bool(body.pop("stream", False)),
        usage=bool(body.pop("stream_options", {}).get("include_usage")),
        template_kwargs=dict(body.pop("chat_template_kwargs", {})),
        stop=_stops(body.pop("stop", ())),
        forced=forced,
        single=body.pop("parallel_tool_calls", True) is False or named,
        structured={**body.pop("structured_outputs", {}), **guided, **_grammar(body.pop("response_format", {}))},
        n=whole(body.pop("n", 1)),
        top_logprobs=top if body.pop("logprobs", False) else None,
        prefill=bool(body.pop("continue_final_message", False)),
    )
    asked.ignored = tuple(body)
    return asked


def _message(message: Mapping[str, Any]) -> Message:
    role, content = message["role"], message.get("content")
    if role in ("system", "developer", "user"):
        return {"role": "system" if role == "developer" else role, "content": content_of(content)}
    if role == "tool":
        return {"role": "tool", "tool_call_id": message["tool_call_id"], "content": content_of(content)}
    if role != "assistant":
        raise RefusedError(400, f"role={role!r}: unknown. Use system, developer, user, assistant, or tool.")
    said: Message = {"role": "assistant", "content": text_of(content or message.get("refusal"))}
    if thoughts := message.get("reasoning_content") or message.get("reasoning"):
        said["reasoning_content"] = thoughts
    if calls := message.get("tool_calls"):
        said["tool_calls"] = [
            call_message(call["id"], call["function"]["name"], _arguments(call["function"]["arguments"]))
            for call in calls
        ]
    return said


def _arguments(arguments: Any) -> Any:
    """Arguments of a tool call: parsed if they are the text of a JSON object."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a tool to the format of chat templates, which write its keys in this order."""
    if tool["type"] != "function":  # runs on the provider's servers
        raise RefusedError(400, f"tools: type {tool['type']!r} is not supported. Use functions.", "tools")
    function = dict.fromkeys(("name", "description", "parameters")) | dict(tool["function"])
    known = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return {"type": "function", "function": known}


def _forced(choice: Any) -> tuple[str, ...] | None:
    """`Asked.forced` of a tool choice."""
    if not isinstance(choice, dict):
        return () if choice == "required" else None
    if choice["type"] == "function":
        return (choice.get("function", choice)["name"],)
    allowed = choice.get("allowed_tools") or choice
    if choice["type"] != "allowed_tools" or allowed.get("mode") != "required":
        raise RefusedError(
            400,
            f'tool_choice={json.dumps(choice)[:200]}: not supported. Send only these tools, or "mode": "required".',
            "tool_choice",
            "unsupported_value",
        )
    return tuple(name for tool in allowed["tools"] for name in _forced(tool) or ())


def _grammar(form: Mapping[str, Any]) -> dict[str, Any]:
    """The grammar of a response format, in the format of vLLM's `structured_outputs`; empty for none."""
    kind = form.get("type")
    if kind in (None, "text"):
        return {}
    return {"json_object": True} if kind == "json_object" else {"json": (form.get("json_schema") or form)["schema"]}


def _stops(value: Any) -> tuple[str, ...]:
    """Stop strings, given as a string or a list."""
    stops = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(stop, str) and stop for stop in stops):  # the engine's error would end the run
        raise ValueError(f"stop={json.dumps(value)[:200]}: must be non-empty strings")
    return stops


def whole(value: Any) -> int:
    """A positive number. With any other value, an engine error would end the run."""
    if int(value) < 1:
        raise ValueError(f"{value}: must be at least 1")
    return int(value)


def text_of(content: Any) -> str:
    """Text of a message's content: a string, or text blocks joined by newlines. Rejects other content."""
    found = content_of(content)
    if not isinstance(found, str):
        raise RefusedError(400, "content: contains an image in a message that supports only text. Remove the image.")
    return found


def content_of(content: Any) -> Any:
    """A message's content in the format of chat templates: text, or a list of blocks if it contains images."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = []
    for block in content:
        kind = block["type"]
        if kind in ("image_url", "input_image", "image"):  # chat completions, responses, and messages
            blocks.append({"type": "image", "image": _image(block)})
        elif kind in ("text", "input_text", "output_text", "reasoning_text", "refusal"):
            blocks.append({"type": "text", "text": block["refusal" if kind == "refusal" else "text"]})
        else:
            raise RefusedError(400, f"content: a block of type {kind!r} is not supported. Use text or images.")
    if any(block["type"] == "image" for block in blocks):
        return blocks
    return "\n".join(block["text"] for block in blocks)


def _image(block: Mapping[str, Any]) -> str:
    source = block.get("source")
    if source:
        data = source["type"] == "base64"
        url = f"data:{source['media_type']};base64,{source['data']}" if data else source.get("url")
    else:
        url = block["image" if "image" in block else "image_url"]
        url = url["url"] if isinstance(url, dict) else url
    if not str(url).startswith("data:"):
        raise RefusedError(400, f"image={url!r}: must be a data URL. Send it as data:image/png;base64,...", "image")
    return str(url)


def new_id(prefix: str) -> str:
    """Generates a unique ID."""
    return prefix + uuid.uuid4().hex[:24]


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Formats a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()

"""Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightrl.environments.base import Message
from lightrl.environments.endpoint.api import (
    UNKNOWN,
    Api,
    Members,
    call_message,
    content_of,
    event,
    function_tool,
    given,
    new_id,
    of_type,
    pieces,
    stops_of,
    text_of,
    whole,
)
from lightrl.environments.endpoint.openai_apis import form_of
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError

_CHOICE = Members(read=["name", "disable_parallel_tool_use"], fixed={"type": ("auto", "none", "any", "tool")})
_OUTPUT = Members(read=["format"], sampling=["effort"], fixed={"task_budget": ()})
_TOOL = Members(
    read=["type", "name", "description", "input_schema", "strict"],
    harmless=["cache_control", "eager_input_streaming"],
    fixed={"allowed_callers": (["direct"],), "defer_loading": (False,), "input_examples": ([],)},
)
_MESSAGE = Members(read=["role", "content"], fixed={"clear_at": (), "output_config": ()})
_BLOCKS = {
    "thinking": Members(read=["type", "thinking"], harmless=["signature", "cache_control"]),
    "tool_use": Members(read=["type", "id", "name", "input"], harmless=["cache_control", "caller", "toolset_name"]),
    "tool_result": Members(
        read=["type", "tool_use_id", "content"], harmless=["cache_control", "is_error", "toolset_name"]
    ),
}

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
}


class Messages(Api):
    """`POST /messages`.

    Source: https://docs.claude.com/en/api/messages
    """

    path = "/messages"
    counting = "/messages/count_tokens"
    members = Members(
        read=[
            *("messages", "model", "system", "tools", "tool_choice", "stream", "max_tokens", "output_config"),
            *("output_format", "stop_sequences"),
        ],
        sampling=["temperature", "top_k", "top_p", "thinking"],
        harmless=[
            *("metadata", "service_tier", "cache_control", "diagnostics", "inference_geo", "speed"),
            *("billing_policy", "fallbacks", "fallback_credit_token"),
        ],
        fixed={
            "compaction": (),
            "container": (),
            "context_management": ({"edits": []},),
            "mcp_servers": ([],),
            "thread": (),
        },
    )
    required = ("messages", "max_tokens")

    def conversation(
        self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]
    ) -> tuple[list[Message], int]:
        said = of_type(body.get("messages"), list, "messages", "a list")
        if not said:
            raise RefusedError(400, "messages: must not be empty. Add a message.", "messages")
        messages: list[Message] = []
        if body.get("system"):
            messages.append({"role": "system", "content": text_of(body["system"], "system")})
        for i, message in enumerate(said):
            messages += _messages(message, f"messages[{i}]")
        return messages, 0

    def tool(self, tool: Any, where: str) -> dict[str, Any]:
        return _tool(tool, where)

    def wishes(self, body: Mapping[str, Any]) -> dict[str, Any]:
        choice, output = given(body, "tool_choice"), given(body, "output_config")
        _CHOICE.check(choice, "tool_choice.")
        wishes: dict[str, Any] = {
            "ignored": _OUTPUT.check(output, "output_config."),
            "max_new_tokens": whole(body.get("max_tokens"), "max_tokens"),
            "stop": stops_of(body.get("stop_sequences"), "stop_sequences"),
            "hidden": choice.get("type") == "none",
            "single": bool(choice.get("disable_parallel_tool_use")) or choice.get("type") == "tool",
            "structured": form_of(given(body, "output_format"), "output_format")
            | form_of(given(output, "format"), "output_config.format"),
            "prefill": _role(body["messages"][-1]) == "assistant" if body.get("messages") else False,
        }
        if choice.get("type") in ("any", "tool"):
            name = choice.get("name")
            wishes["forced"] = () if choice["type"] == "any" else (of_type(name, str, "tool_choice.name", "a string"),)
        return wishes

    def write(self, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
        (answered,) = answers
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": _blocks(answered),
            "stop_reason": _stop(answered),
            "stop_sequence": answered.stop,
            "usage": {"input_tokens": answered.prompt_tokens, "output_tokens": answered.completion_tokens},
        }

    def events(self, asked: Asked, answers: Sequence[Answered], written: Mapping[str, Any]) -> Iterator[bytes]:
        (answered,) = answers
        usage = {"input_tokens": answered.prompt_tokens, "output_tokens": 0}
        start = {**written, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=start)
        for i, block in enumerate(written["content"]):
            if block["type"] == "tool_use":
                empty: dict[str, Any] = {**block, "input": {}}
                parts = [
                    {"type": "input_json_delta", "partial_json": piece}
                    for piece in pieces(json.dumps(block["input"], ensure_ascii=False))
                ]
            elif block["type"] == "thinking":
                empty = {**block, "thinking": "", "signature": ""}
                parts = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
                parts.append({"type": "signature_delta", "signature": block["signature"]})
            else:
                empty = {"type": "text", "text": ""}
                parts = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
            yield _event("content_block_start", index=i, content_block=empty)
            for part in parts:
                yield _event("content_block_delta", index=i, delta=part)
            yield _event("content_block_stop", index=i)
        delta = {"stop_reason": written["stop_reason"], "stop_sequence": written["stop_sequence"]}
        yield _event("message_delta", delta=delta, usage={"output_tokens": answered.completion_tokens})
        yield _event("message_stop")

    def error(self, refused: RefusedError) -> dict[str, Any]:
        """Body of an error in Anthropic's format."""
        kind = _ERRORS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
        message = refused.message
        if refused.code == UNKNOWN:
            message = f"{refused.parameter}: Extra inputs are not permitted"
        error: dict[str, Any] = {"type": kind, "message": message}
        if refused.parameter == "thread":  # the SDK then sends the whole conversation
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": error}


def _event(kind: str, **members: Any) -> bytes:
    return event({"type": kind, **members}, kind)


def _stop(answered: Answered) -> str:
    if answered.reply.truncated:
        return "max_tokens"
    if answered.reply.tool_calls:
        return "tool_use"
    return "end_turn" if answered.stop is None else "stop_sequence"


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _blocks(answered: Answered) -> list[dict[str, Any]]:
    reply = answered.reply
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "none"})
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in reply.tool_calls
    ]
    return blocks


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = of_type(tool, dict, where, "an object").get("type")
    if kind not in (None, "custom"):
        raise RefusedError(400, f"{where}: tools of type {kind!r} are not supported. Use custom tools.", where)
    _TOOL.check(tool, f"{where}.")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)


def _messages(message: Any, where: str) -> list[Message]:
    """Converts a message to the format of chat templates. Tool results become separate messages."""
    role = of_type(message, dict, where, "an object").get("role")
    _MESSAGE.check(message, f"{where}.")
    content = message.get("content")
    where = f"{where}.content"
    if role == "system":
        return [{"role": "system", "content": text_of(content, where)}]
    if role not in ("user", "assistant"):
        raise RefusedError(400, f"{where}.role={role!r}: is unknown. Use user or assistant.", where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [
        of_type(block, dict, where, "a list of objects") for block in of_type(content, list, where, "text or a list")
    ]
    for block in blocks:
        if block.get("type") in _BLOCKS:
            _BLOCKS[block["type"]].check(block, f"{where}.")
    if role == "assistant":
        return [_assistant(blocks, where)]
    results = [block for block in blocks if block.get("type") == "tool_result"]
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    said: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": of_type(block.get("tool_use_id"), str, f"{where}.tool_use_id", "a string"),
            "content": content_of(block.get("content"), f"{where}.tool_result"),
        }
        for block in results
    ]
    if rest or not results:
        said.append({"role": "user", "content": content_of(rest, where)})
    return said


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    said: Message = {"role": "assistant", "content": ""}
    thoughts, texts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(of_type(block.get("thinking"), str, f"{where}.thinking", "a string"))
        elif kind == "tool_use":
            arguments = of_type(block.get("input"), dict, f"{where}.input", "an object")
            calls.append(call_message(block.get("id"), block.get("name"), arguments, where))
        else:
            texts.append(block)
    said["content"] = text_of(texts, where)
    if "".join(thoughts):
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return said

"""Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightrl.environments.base import Message
from lightrl.environments.endpoint.api import (
    Api,
    call_message,
    content_of,
    event,
    function_tool,
    new_id,
    stops_of,
    text_of,
    whole,
)
from lightrl.environments.endpoint.openai_apis import form_of
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError

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
    effective = (
        *("messages", "model", "system", "tools", "tool_choice", "stream", "max_tokens", "output_config"),
        *("output_format", "stop_sequences"),
    )
    harmless = (
        *("metadata", "service_tier", "cache_control", "diagnostics", "inference_geo", "speed"),
        *("billing_policy", "fallbacks", "fallback_credit_token"),
    )
    rejected = ("compaction", "container", "context_management", "mcp_servers", "thread")

    def conversation(
        self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]
    ) -> tuple[list[Message], int]:
        messages: list[Message] = []
        if body.get("system"):
            messages.append({"role": "system", "content": text_of(body["system"])})
        for message in body["messages"]:
            messages += _messages(message)
        return messages, 0

    def tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        if (kind := tool.get("type")) not in (None, "custom"):
            raise RefusedError(400, f"tools: type {kind!r} is not supported. Use custom tools.", "tools")
        return function_tool(tool["name"], tool.get("description"), tool.get("input_schema"))

    def wishes(self, body: Mapping[str, Any]) -> dict[str, Any]:
        choice = body.get("tool_choice") or {}
        kind = choice.get("type")
        wishes: dict[str, Any] = {
            "max_new_tokens": whole(body.get("max_tokens")),
            "stop": stops_of(body.get("stop_sequences")),
            "hidden": kind == "none",
            "single": bool(choice.get("disable_parallel_tool_use")) or kind == "tool",
            "structured": form_of(body.get("output_format") or (body.get("output_config") or {}).get("format")),
            "prefill": bool(body["messages"]) and body["messages"][-1]["role"] == "assistant",
        }
        if kind in ("any", "tool"):
            wishes["forced"] = () if kind == "any" else (choice["name"],)
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
                arguments = json.dumps(block["input"], ensure_ascii=False)
                parts = [{"type": "input_json_delta", "partial_json": arguments}]
            elif block["type"] == "thinking":
                empty = {**block, "thinking": "", "signature": ""}
                parts = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            else:
                empty = {"type": "text", "text": ""}
                parts = [{"type": "text_delta", "text": block["text"]}]
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
        error: dict[str, Any] = {"type": kind, "message": refused.message}
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


def _messages(message: Mapping[str, Any]) -> list[Message]:
    """Converts a message to the format of chat templates. Tool results become separate messages."""
    role, content = message["role"], message["content"]
    if role == "system":
        return [{"role": "system", "content": text_of(content)}]
    if role not in ("user", "assistant"):
        raise RefusedError(400, f"role={role!r}: is unknown. Use user or assistant.", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [_assistant(content)]
    results = [block for block in content if block["type"] == "tool_result"]
    rest = [block for block in content if block["type"] != "tool_result"]
    said: list[Message] = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content_of(block.get("content"))}
        for block in results
    ]
    if rest or not results:
        said.append({"role": "user", "content": content_of(rest)})
    return said


def _assistant(blocks: list[dict[str, Any]]) -> Message:
    said: Message = {"role": "assistant", "content": ""}
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [call_message(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    said["content"] = text_of([block for block in blocks if block["type"] not in ("thinking", "tool_use")])
    if "".join(thoughts):
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return said

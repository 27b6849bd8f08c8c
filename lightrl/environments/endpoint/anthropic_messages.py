"""Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightrl.environments.base import Message, call_message
from lightrl.environments.endpoint.api import Api, event, new_id
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError

_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_CHOICES = {"any": "required", "none": "none"}
"""Tool choices -> tool choices of chat completions."""


class Messages(Api):
    """`POST /messages`, see https://docs.claude.com/en/api/messages."""

    path = "/messages"
    counting = "/messages/count_tokens"

    def chat(self, body: dict[str, Any], recall: Callable[[str], list[Message]]) -> dict[str, Any]:
        system = body.pop("system", None)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for message in body["messages"]:
            messages += _messages(message)
        choice = body.pop("tool_choice", {})
        named = {"type": "function", "function": {"name": choice.get("name")}}
        form = body.pop("output_config", {}).get("format")
        form, stop = body.pop("output_format", form), body.pop("stop_sequences", ())
        return {
            **body,
            "messages": messages,
            "tools": [_tool(tool) for tool in body.get("tools", ())],
            "tool_choice": named if choice.get("type") == "tool" else _CHOICES.get(choice.get("type")),
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
            "stop": stop,
            "response_format": form or {},
            "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
            "n": 1,
        }

    def write(self, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
        (answered,) = answers
        reply = answered.reply
        blocks: list[dict[str, Any]] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "none"})
        if reply.content or not reply.tool_calls:
            blocks.append({"type": "text", "text": reply.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in reply.tool_calls
        ]
        ended = "end_turn" if answered.stop is None else "stop_sequence"
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": blocks,
            "stop_reason": "max_tokens" if reply.truncated else "tool_use" if reply.tool_calls else ended,
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
                empty: dict[str, Any] = {"input": {}}
                arguments = json.dumps(block["input"], ensure_ascii=False)
                parts = [{"type": "input_json_delta", "partial_json": arguments}]
            else:
                empty = {name: "" for name in ("text", "thinking", "signature") if name in block}
                parts = [{"type": f"{name}_delta", name: block[name]} for name in empty]
            yield _event("content_block_start", index=i, content_block={**block, **empty})
            for part in parts:
                yield _event("content_block_delta", index=i, delta=part)
            yield _event("content_block_stop", index=i)
        delta = {"stop_reason": written["stop_reason"], "stop_sequence": written["stop_sequence"]}
        yield _event("message_delta", delta=delta, usage={"output_tokens": answered.completion_tokens})
        yield _event("message_stop")

    def error(self, refused: RefusedError) -> dict[str, Any]:
        kind = _ERRORS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
        error: dict[str, Any] = {"type": kind, "message": refused.message}
        if refused.parameter == "thread":  # the SDK then sends the whole conversation
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": error}


def _event(kind: str, **members: Any) -> bytes:
    return event({"type": kind, **members}, kind)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind, shown = tool.get("type"), {"description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function" if kind in (None, "custom") else kind, "function": {"name": tool.get("name"), **shown}}


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Converts a message to messages of chat completions. Tool results become separate messages."""
    role, content = message["role"], message["content"]
    if role == "system" or isinstance(content, str):
        return [{"role": role, "content": content}]
    apart = ("thinking", "tool_use", "tool_result")
    said = {"role": role, "content": [block for block in content if block["type"] not in apart]}
    if role == "assistant":
        said["reasoning_content"] = "\n".join(block["thinking"] for block in content if block["type"] == "thinking")
        said["tool_calls"] = [
            call_message(block["id"], block["name"], block["input"]) for block in content if block["type"] == "tool_use"
        ]
        return [said]
    results = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block.get("content")}
        for block in content
        if block["type"] == "tool_result"
    ]
    return [*results, *([said] if said["content"] or not results else [])]

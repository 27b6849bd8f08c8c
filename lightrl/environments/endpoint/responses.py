"""OpenAI's responses API."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightrl.environments.base import Message
from lightrl.environments.endpoint.api import (
    Api,
    arguments_of,
    call_message,
    content_of,
    event,
    function_tool,
    new_id,
    text_of,
    whole,
)
from lightrl.environments.endpoint.openai_apis import (
    EFFECTIVE,
    HARMLESS,
    require_function,
    structured_of,
    tool_wishes,
    top_of,
)
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError

_LOGPROBS = "message.output_text.logprobs"
_TEXT = ("input_text", "output_text", "text", "refusal")


class Responses(Api):
    """`POST /responses`. A response can be continued by its ID within its trajectory.

    Source: https://platform.openai.com/docs/api-reference/responses
    """

    path = "/responses"
    counting = "/responses/input_tokens"
    effective = EFFECTIVE | {"input", "instructions", "max_output_tokens", "previous_response_id", "text", "include"}
    harmless = HARMLESS | {"max_tool_calls", "stream_options"}
    rejected = ("background", "context_management", "conversation", "multi_agent", "prompt")

    def conversation(
        self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]
    ) -> tuple[list[Message], int]:
        messages: list[Message] = []
        if body.get("instructions") is not None:
            messages.append({"role": "system", "content": text_of(body["instructions"])})
        first = len(messages)
        if (earlier := body.get("previous_response_id")) is not None:
            messages += recall(earlier)
        asked = body["input"]
        if isinstance(asked, str):
            messages.append({"role": "user", "content": asked})
        else:
            _add(messages, asked)
        return messages, first

    def tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        require_function(tool)
        return function_tool(tool["name"], tool.get("description"), tool.get("parameters"))

    def wishes(self, body: Mapping[str, Any]) -> dict[str, Any]:
        top = top_of(body)
        return {
            **tool_wishes(body),
            "max_new_tokens": whole(body.get("max_output_tokens")),
            "structured": structured_of(body, (body.get("text") or {}).get("format")),
            "top_logprobs": top if top or _LOGPROBS in (body.get("include") or ()) else None,
        }

    def write(self, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
        (answered,) = answers
        return {**_responses_head(asked), **_end(answered), "output": _items(answered)}

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def events(self, asked: Asked, answers: Sequence[Answered], written: Mapping[str, Any]) -> Iterator[bytes]:
        empty = {**written, "status": "in_progress", "incomplete_details": None, "usage": None, "output": []}
        number = itertools.count()

        def said(kind: str, **members: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(number), **members}, kind)

        yield said("response.created", response=empty)
        yield said("response.in_progress", response=empty)
        for i, item in enumerate(written["output"]):
            place = {"item_id": item["id"], "output_index": i}
            begun = {**item, "status": "in_progress"}
            if item["type"] == "message":
                block = item["content"][0]
                yield said("response.output_item.added", output_index=i, item={**begun, "content": []})
                yield said("response.content_part.added", **place, content_index=0, part={**block, "text": ""})
                yield said("response.output_text.delta", **place, content_index=0, delta=block["text"], logprobs=[])
                whole_text = {"text": block["text"], "logprobs": block["logprobs"]}
                yield said("response.output_text.done", **place, content_index=0, **whole_text)
                yield said("response.content_part.done", **place, content_index=0, part=block)
            elif item["type"] == "function_call":
                yield said("response.output_item.added", output_index=i, item={**begun, "arguments": ""})
                yield said("response.function_call_arguments.delta", **place, delta=item["arguments"])
                yield said(
                    "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
                )
            else:
                yield said("response.output_item.added", output_index=i, item={**begun, "content": []})
                text = item["content"][0]["text"]
                yield said("response.reasoning_text.delta", **place, content_index=0, delta=text)
                yield said("response.reasoning_text.done", **place, content_index=0, text=text)
            yield said("response.output_item.done", output_index=i, item=item)
        yield said(f"response.{written['status']}", response=written)


def _responses_head(asked: Asked) -> dict[str, Any]:
    head = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time()), "model": asked.model}
    unknown = dict.fromkeys(("error", "instructions", "temperature", "top_p"))
    return {**head, **unknown, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def _end(answered: Answered) -> dict[str, Any]:
    cut = answered.reply.truncated
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": answered.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answered.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answered.prompt_tokens + answered.completion_tokens,
        },
    }


def _items(answered: Answered) -> list[dict[str, Any]]:
    reply = answered.reply
    status = "incomplete" if reply.truncated else "completed"
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        thoughts = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"id": new_id("rs_"), "type": "reasoning", "summary": [], "content": thoughts, "status": status})
    if reply.content or not reply.tool_calls:
        block = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": answered.logprobs or []}
        said = {"type": "message", "role": "assistant", "status": status, "content": [block]}
        items.append({"id": new_id("msg_"), **said})
    for call in reply.tool_calls:
        said = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False), "status": status}
        items.append({"id": new_id("fc_"), "type": "function_call", "call_id": call.id, **said})
    return items


def _add(messages: list[Message], items: list[Any]) -> None:
    """Converts items to messages. Merges adjacent assistant items into one message."""
    open_one: Message | None = None  # the current assistant message
    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        if kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant"):
            if open_one is None:
                open_one = {"role": "assistant", "content": ""}
                messages.append(open_one)
            _add_to_assistant(open_one, kind, item)
            continue
        open_one = None
        if kind == "function_call_output":
            content = content_of(item["output"], _TEXT)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "message" and role in ("user", "system", "developer"):
            content = content_of(item["content"], _TEXT)
            messages.append({"role": "user" if role == "user" else "system", "content": content})
        else:
            raise RefusedError(400, f"input: type {kind!r} with role {role!r} is not supported. Remove it.", "input")


def _add_to_assistant(message: Message, kind: str, item: Mapping[str, Any]) -> None:
    if kind == "message":
        text = text_of(item["content"], _TEXT)
        message["content"] = f"{message['content']}\n{text}" if message["content"] else text
    elif kind == "function_call":
        call = call_message(item["call_id"], item["name"], arguments_of(item["arguments"]))
        message["tool_calls"] = [*message.get("tool_calls", ()), call]
    elif item.get("content"):
        message["reasoning_content"] = text_of(item["content"], ("reasoning_text",))

"""OpenAI's responses API."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightrl.environments.base import Message, call_message
from lightrl.environments.endpoint.api import Api, event, new_id, text_of
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError

_LOGPROBS = "message.output_text.logprobs"


class Responses(Api):
    """`POST /responses`, see https://platform.openai.com/docs/api-reference/responses."""

    path = "/responses"
    counting = "/responses/input_tokens"

    def read(self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]) -> Asked:
        return replace(super().read(body, recall), instructions=int(body.get("instructions") is not None))

    def chat(self, body: dict[str, Any], recall: Callable[[str], list[Message]]) -> dict[str, Any]:
        given, messages = body.pop("input"), list[dict[str, Any]]()
        if "instructions" in body:
            messages.append({"role": "system", "content": body.pop("instructions")})
        if "previous_response_id" in body:
            messages += recall(body.pop("previous_response_id"))
        messages += [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
        if "max_output_tokens" in body:
            body["max_tokens"] = body.pop("max_output_tokens")
        body["messages"] = messages
        keys = ("name", "description", "parameters")
        body["tools"] = [{"type": t["type"], "function": {k: t.get(k) for k in keys}} for t in body.get("tools", ())]
        body["response_format"] = body.pop("text", {}).get("format") or {}
        body["logprobs"] = _LOGPROBS in body.pop("include", ()) or bool(body.get("top_logprobs"))
        return {**body, "n": 1}

    def write(self, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
        (answered,) = answers
        cut = answered.reply.truncated
        return {
            **{"id": new_id("resp_"), "object": "response", "created_at": int(time.time()), "model": asked.model},
            **dict.fromkeys(("error", "instructions", "temperature", "top_p")),
            **{"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": answered.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answered.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answered.prompt_tokens + answered.completion_tokens,
            },
            "output": _items(answered),
        }

    def events(self, asked: Asked, answers: Sequence[Answered], written: Mapping[str, Any]) -> Iterator[bytes]:
        empty = {**written, "status": "in_progress", "incomplete_details": None, "usage": None, "output": []}
        number = itertools.count()

        def said(kind: str, **members: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(number), **members}, kind)

        yield said("response.created", response=empty)
        yield said("response.in_progress", response=empty)
        for i, item in enumerate(written["output"]):
            place = {"item_id": item["id"], "output_index": i}
            empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
            yield said("response.output_item.added", output_index=i, item={**item, "status": "in_progress", **empty})
            if item["type"] == "function_call":
                arguments = item["arguments"]
                yield said("response.function_call_arguments.delta", **place, delta=arguments)
                yield said("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
            else:
                (block,) = item["content"]
                place["content_index"] = 0
                if item["type"] == "message":
                    logprobs = block["logprobs"]
                    yield said("response.content_part.added", **place, part={**block, "text": ""})
                    yield said("response.output_text.delta", **place, delta=block["text"], logprobs=[])
                    yield said("response.output_text.done", **place, text=block["text"], logprobs=logprobs)
                    yield said("response.content_part.done", **place, part=block)
                else:
                    yield said("response.reasoning_text.delta", **place, delta=block["text"])
                    yield said("response.reasoning_text.done", **place, text=block["text"])
            yield said("response.output_item.done", output_index=i, item=item)
        yield said(f"response.{written['status']}", response=written)


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


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Converts input items to messages of chat completions. Merges adjacent assistant items into one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message" and role != "assistant":
            messages.append({"role": role, "content": item["content"]})
        elif kind in ("message", "reasoning", "function_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", "tool_calls": []})
            said = messages[-1]
            if kind == "message":
                said["content"] = "\n".join(filter(None, (said["content"], text_of(item["content"]))))
            elif kind == "function_call":
                said["tool_calls"].append(call_message(item["call_id"], item["name"], item["arguments"]))
            elif item.get("content"):
                said["reasoning_content"] = text_of(item["content"])
        else:
            raise RefusedError(400, f"input: type {kind!r} with role {role!r} is not supported. Remove it.", "input")
    return messages

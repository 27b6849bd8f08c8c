"""OpenAI's chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightrl.environments.base import Message
from lightrl.environments.endpoint.api import (
    OPENAI_FIXED,
    OPENAI_HARMLESS,
    OPENAI_SAMPLING,
    Api,
    Members,
    arguments_of,
    call_message,
    event,
    function_tool,
    given,
    listed,
    new_id,
    of_type,
    pieces,
    strict,
    text_of,
    whole,
)
from lightrl.environments.endpoint.session import Answered, Asked, RefusedError

_STREAM = Members(read=["include_usage"], harmless=["include_obfuscation"])
_TOOL = Members(read=["type", "function"], harmless=["cache_control"])
_MESSAGE = Members(
    read=["role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal"],
    # The last ones are what OpenRouter and LiteLLM add to messages that programs send back.
    harmless=[
        *("name", "annotations", "cache_control"),
        *("reasoning_details", "provider_specific_fields", "thinking_blocks"),
    ],
    fixed={"audio": (), "function_call": ()},
)
_CALL = Members(read=["id", "type", "function"], harmless=["index"])
_CALLED = Members(read=["name", "arguments"])


class ChatCompletions(Api):
    """`POST /chat/completions`.

    Source: https://platform.openai.com/docs/api-reference/chat
    """

    path = "/chat/completions"
    members = Members(
        read=[
            *("messages", "model", "tools", "stream", "stream_options", "max_tokens"),
            *("max_completion_tokens", "chat_template_kwargs"),
        ],
        sampling=OPENAI_SAMPLING | {"reasoning_effort", "verbosity"},
        harmless=OPENAI_HARMLESS | {"prediction", "prompt_cache_options"},
        fixed={
            **OPENAI_FIXED,
            "n": (1,),
            "logprobs": (False,),
            "top_logprobs": (0,),
            "response_format": ({"type": "text"},),
            "modalities": (["text"],),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "audio": (),
            "tool_choice": ("auto", "none"),
            "web_search_options": (),
        },
    )

    def read(self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]) -> Asked:
        ignored = self.members.check(body)
        said = of_type(body.get("messages"), list, "messages", "a list")
        if not said:
            raise RefusedError(400, "messages must not be empty.", "messages")
        limits = [whole(body.get(name), name) for name in ("max_completion_tokens", "max_tokens")]
        options = given(body, "stream_options")
        _STREAM.check(options, "stream_options.")
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed(body, "tools"))]
        return Asked(
            messages=[_message(message, f"messages[{i}]") for i, message in enumerate(said)],
            tools=[] if body.get("tool_choice") == "none" else tools,
            max_new_tokens=min((limit for limit in limits if limit is not None), default=None),
            model=str(body.get("model") or ""),
            stream=bool(body.get("stream")),
            usage=bool(options.get("include_usage")),
            ignored=ignored + strict(listed(body, "tools")),
            template_kwargs=given(body, "chat_template_kwargs"),
        )

    def write(self, asked: Asked, answered: Answered) -> dict[str, Any]:
        reply = answered.reply
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
        if not reply.tool_calls:
            message["content"] = reply.content
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = _calls(answered)
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(answered)}
        return {
            **_head(asked, "chat.completion"),
            "choices": [choice],
            "usage": _usage(answered),
        }

    def events(self, asked: Asked, answered: Answered, written: Mapping[str, Any]) -> Iterator[bytes]:
        head = {**_head(asked, "chat.completion.chunk"), "id": written["id"]}

        def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            return event({**head, "choices": [choice], **({"usage": None} if asked.usage else {})})

        yield chunk({"role": "assistant", "content": ""})
        for piece in pieces(answered.reply.reasoning or ""):
            yield chunk({"reasoning_content": piece})
        for piece in pieces(answered.reply.content):
            yield chunk({"content": piece})
        for i, call in enumerate(_calls(answered)):
            arguments = call["function"]["arguments"]
            yield chunk(
                {"tool_calls": [{"index": i, **call, "function": {**call["function"], "arguments": ""}}]},
            )
            for piece in pieces(arguments):
                yield chunk({"tool_calls": [{"index": i, "function": {"arguments": piece}}]})
        yield chunk({}, _finish(answered))
        if asked.usage:
            yield event({**head, "choices": [], "usage": _usage(answered)})
        yield b"data: [DONE]\n\n"


def _head(asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": new_id("chatcmpl-"), "object": kind, "created": int(time.time()), "model": asked.model}


def _finish(answered: Answered) -> str:
    if answered.reply.truncated:
        return "length"
    return "tool_calls" if answered.reply.tool_calls else "stop"


def _usage(answered: Answered) -> dict[str, int]:
    total = answered.prompt_tokens + answered.completion_tokens
    return {
        "prompt_tokens": answered.prompt_tokens,
        "completion_tokens": answered.completion_tokens,
        "total_tokens": total,
    }


def _calls(answered: Answered) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in answered.reply.tool_calls
    ]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = of_type(tool, dict, where, "an object").get("type")
    if kind != "function":
        raise RefusedError(400, f"{where}: tools of type {kind!r} are not offered here, only functions.", where)
    _TOOL.check(tool, f"{where}.")
    function = of_type(tool.get("function"), dict, f"{where}.function", "an object")
    made = function_tool(
        function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function"
    )
    more = {key: value for key, value in function.items() if key not in ("strict", *made["function"])}
    made["function"] |= {key: value for key, value in more.items() if value is not None}
    return made


def _message(message: Any, where: str) -> Message:
    """A message as chat templates take it."""
    role = of_type(message, dict, where, "an object").get("role")
    _MESSAGE.check(message, f"{where}.")
    if role in ("system", "developer", "user"):
        return {
            "role": "system" if role == "developer" else role,
            "content": text_of(message.get("content"), f"{where}.content"),
        }
    if role == "tool":
        return {
            "role": "tool",
            "tool_call_id": of_type(message.get("tool_call_id"), str, f"{where}.tool_call_id", "a string"),
            "content": text_of(message.get("content"), f"{where}.content"),
        }
    if role != "assistant":
        raise RefusedError(
            400, f"{where}.role must be system, developer, user, assistant or tool, not {role!r}.", where
        )
    said: Message = {
        "role": "assistant",
        "content": text_of(message.get("content") or message.get("refusal"), f"{where}.content", ("text", "refusal")),
    }
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if thoughts:
        said["reasoning_content"] = of_type(thoughts, str, f"{where}.reasoning_content", "a string")
    calls = []
    for i, call in enumerate(listed(message, "tool_calls")):
        place = f"{where}.tool_calls[{i}]"
        function = of_type(
            of_type(call, dict, place, "an object").get("function"), dict, f"{place}.function", "an object"
        )
        _CALL.check(call, f"{place}.")
        _CALLED.check(function, f"{place}.function.")
        arguments = arguments_of(function.get("arguments"), f"{place}.function.arguments")
        calls.append(call_message(call.get("id"), function.get("name"), arguments, place))
    if calls:
        said["tool_calls"] = calls
    return said

"""OpenAI's chat completions API, and code shared with the responses API."""

from __future__ import annotations

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
    stops_of,
    text_of,
    whole,
)
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError

HARMLESS = frozenset(
    [
        *("user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "request_id", "session_id", "priority", "cache_salt"),
    ]
)
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's earlier parameters -> keys of its `structured_outputs`."""
MOST_LOGPROBS = 20
EFFECTIVE = frozenset(
    [
        *("model", "tools", "stream", "chat_template_kwargs", "parallel_tool_calls", "structured_outputs"),
        *("tool_choice", "top_logprobs", *GUIDED),
    ]
)


class ChatCompletions(Api):
    """`POST /chat/completions`.

    Source: https://platform.openai.com/docs/api-reference/chat
    """

    path = "/chat/completions"
    effective = EFFECTIVE | {
        *("messages", "stop", "stream_options", "max_tokens", "max_completion_tokens", "response_format", "n"),
        *("logprobs", "continue_final_message"),
    }
    harmless = HARMLESS | {"add_generation_prompt", "modalities", "prediction"}
    rejected = ("functions", "audio", "web_search_options", "documents", "chat_template")

    def conversation(
        self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]
    ) -> tuple[list[Message], int]:
        return [_chat_message(message) for message in body["messages"]], 0

    def tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        require_function(tool)
        function = tool["function"]
        made = function_tool(function["name"], function.get("description"), function.get("parameters"))
        more = {key: value for key, value in function.items() if key not in ("strict", *made["function"])}
        made["function"] |= {key: value for key, value in more.items() if value is not None}
        return made

    def wishes(self, body: Mapping[str, Any]) -> dict[str, Any]:
        limits = [whole(body.get(name)) for name in ("max_completion_tokens", "max_tokens")]
        return {
            **tool_wishes(body),
            "stop": stops_of(body.get("stop")),
            "max_new_tokens": min((limit for limit in limits if limit is not None), default=None),
            "structured": structured_of(body, body.get("response_format")),
            "usage": bool((body.get("stream_options") or {}).get("include_usage")),
            "n": whole(body.get("n")) or 1,
            "top_logprobs": top_of(body) if body.get("logprobs") else None,
            "prefill": bool(body.get("continue_final_message")),
        }

    def write(self, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
        choices = []
        for i, answered in enumerate(answers):
            reply = answered.reply
            content = reply.content or (None if reply.tool_calls else "")
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if reply.reasoning:
                message["reasoning_content"] = reply.reasoning
            if reply.tool_calls:
                message["tool_calls"] = _calls(answered)
            finish = _finish(answered)
            choices.append({"index": i, "message": message, "logprobs": _logprobs(answered), "finish_reason": finish})
        return {**_chat_head(asked, "chat.completion"), "choices": choices, "usage": _usage(answers)}

    def events(self, asked: Asked, answers: Sequence[Answered], written: Mapping[str, Any]) -> Iterator[bytes]:
        head = {**_chat_head(asked, "chat.completion.chunk"), "id": written["id"]}

        def chunk(i: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
            choice = {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return event({**head, "choices": [choice], **({"usage": None} if asked.usage else {})})

        for i, answered in enumerate(answers):
            yield chunk(i, {"role": "assistant", "content": ""}, logprobs=_logprobs(answered))
            if answered.reply.reasoning:
                yield chunk(i, {"reasoning_content": answered.reply.reasoning})
            if answered.reply.content:
                yield chunk(i, {"content": answered.reply.content})
            for place, call in enumerate(_calls(answered)):
                yield chunk(i, {"tool_calls": [{"index": place, **call}]})
            yield chunk(i, {}, _finish(answered))
        if asked.usage:
            yield event({**head, "choices": [], "usage": _usage(answers)})
        yield b"data: [DONE]\n\n"


def require_function(tool: Mapping[str, Any]) -> None:
    """Rejects tools that run on the provider's servers."""
    if tool["type"] != "function":
        raise RefusedError(400, f"tools: type {tool['type']!r} is not supported. Use functions.", "tools")


def tool_wishes(body: Mapping[str, Any]) -> dict[str, Any]:
    """Tool choice, which both of OpenAI's APIs have."""
    wishes: dict[str, Any] = {"single": body.get("parallel_tool_calls") is False}
    choice = body.get("tool_choice")
    if choice == "none":
        wishes["hidden"] = True
    elif choice == "required":
        wishes["forced"] = ()
    elif isinstance(choice, dict):
        wishes |= _named(choice)
    return wishes


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    """A required function, or one of several allowed functions."""
    if choice["type"] == "function":
        return {"forced": (choice.get("function", choice)["name"],), "single": True}
    allowed = choice.get("allowed_tools") or choice
    if choice["type"] != "allowed_tools" or allowed.get("mode") != "required":
        raise RefusedError(
            400,
            f'tool_choice={json.dumps(choice)[:200]}: is not supported. Send only these tools, or "mode": "required".',
            "tool_choice",
            "unsupported_value",
        )
    return {"forced": tuple(name for tool in allowed["tools"] for name in _named(tool)["forced"])}


def top_of(body: Mapping[str, Any]) -> int:
    """Number of most likely tokens to return."""
    if not 0 <= (top := int(body.get("top_logprobs") or 0)) <= MOST_LOGPROBS:
        raise ValueError(f"top_logprobs={top}: must be from 0 to {MOST_LOGPROBS}")
    return top


def structured_of(body: Mapping[str, Any], form: Mapping[str, Any] | None) -> dict[str, Any]:
    """The grammar of the reply in the format of vLLM's `structured_outputs`; empty for none."""
    guided = {name: body[old] for old, name in GUIDED.items() if body.get(old) is not None}
    return {**(body.get("structured_outputs") or {}), **guided, **form_of(form)}


def form_of(form: Mapping[str, Any] | None) -> dict[str, Any]:
    """The grammar of a response format; empty for none."""
    kind = (form or {}).get("type")
    if form is None or kind in (None, "text"):
        return {}
    return {"json_object": True} if kind == "json_object" else {"json": (form.get("json_schema") or form)["schema"]}


def _logprobs(answered: Answered) -> dict[str, Any] | None:
    return None if answered.logprobs is None else {"content": answered.logprobs, "refusal": None}


def _chat_head(asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": new_id("chatcmpl-"), "object": kind, "created": int(time.time()), "model": asked.model}


def _finish(answered: Answered) -> str:
    if answered.reply.truncated:
        return "length"
    return "tool_calls" if answered.reply.tool_calls else "stop"


def _usage(answers: Sequence[Answered]) -> dict[str, int]:
    asked, said = answers[0].prompt_tokens, sum(answered.completion_tokens for answered in answers)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _calls(answered: Answered) -> list[dict[str, Any]]:
    calls = answered.reply.tool_calls
    return [call_message(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in calls]


def _chat_message(message: Mapping[str, Any]) -> Message:
    """Converts a message to the format of chat templates."""
    role, content = message["role"], message.get("content")
    if role in ("system", "developer", "user"):
        return {"role": "system" if role == "developer" else role, "content": content_of(content)}
    if role == "tool":
        return {"role": "tool", "tool_call_id": message["tool_call_id"], "content": content_of(content)}
    if role != "assistant":
        raise RefusedError(400, f"role={role!r}: is unknown. Use system, developer, user, assistant, or tool.")
    said: Message = {"role": "assistant", "content": text_of(content or message.get("refusal"), ("text", "refusal"))}
    if thoughts := message.get("reasoning_content") or message.get("reasoning"):
        said["reasoning_content"] = thoughts
    if calls := message.get("tool_calls"):
        said["tool_calls"] = [
            call_message(call["id"], call["function"]["name"], arguments_of(call["function"]["arguments"]))
            for call in calls
        ]
    return said

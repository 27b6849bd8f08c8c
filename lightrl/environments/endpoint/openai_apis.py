"""OpenAI's chat completions and responses."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightrl.environments.base import Message
from lightrl.environments.endpoint.api import (
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

_SAMPLING = frozenset(
    [
        *("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed"),
        *("top_k", "min_p", "repetition_penalty"),  # of vLLM and SGLang
    ]
)

_HARMLESS = frozenset(
    [
        *("user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_key"),
        *("prompt_cache_retention", "request_id", "session_id", "priority", "cache_salt"),
    ]
)

_FIXED: Mapping[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "moderation": (),
    # What vLLM and SGLang add.
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "length_penalty": (1.0,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
_STREAM = Members(read=["include_usage"], harmless=["include_obfuscation"])
_CHAT_TOOL = Members(read=["type", "function"], harmless=["cache_control"])
_CHAT_MESSAGE = Members(
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
        sampling=_SAMPLING | {"reasoning_effort", "verbosity"},
        harmless=_HARMLESS | {"prediction", "prompt_cache_options"},
        fixed={
            **_FIXED,
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
        tools = [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed(body, "tools"))]
        return Asked(
            messages=[_chat_message(message, f"messages[{i}]") for i, message in enumerate(said)],
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
            **_chat_head(asked, "chat.completion"),
            "choices": [choice],
            "usage": _usage(answered),
        }

    def events(self, asked: Asked, answered: Answered, written: Mapping[str, Any]) -> Iterator[bytes]:
        head = {**_chat_head(asked, "chat.completion.chunk"), "id": written["id"]}

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


def _chat_head(asked: Asked, kind: str) -> dict[str, Any]:
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


def _chat_tool(tool: Any, where: str) -> dict[str, Any]:
    kind = of_type(tool, dict, where, "an object").get("type")
    if kind != "function":
        raise RefusedError(400, f"{where}: tools of type {kind!r} are not offered here, only functions.", where)
    _CHAT_TOOL.check(tool, f"{where}.")
    function = of_type(tool.get("function"), dict, f"{where}.function", "an object")
    made = function_tool(
        function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function"
    )
    more = {key: value for key, value in function.items() if key not in ("strict", *made["function"])}
    made["function"] |= {key: value for key, value in more.items() if value is not None}
    return made


def _chat_message(message: Any, where: str) -> Message:
    """A message as chat templates take it."""
    role = of_type(message, dict, where, "an object").get("role")
    _CHAT_MESSAGE.check(message, f"{where}.")
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


_FORM = Members(sampling=["verbosity"], fixed={"format": ({"type": "text"},)})
_CACHE = Members(harmless=["mode", "ttl", "comparison_response_id"], fixed={"prewarm": (False,)})
_INCLUDE = Members(
    fixed={
        "include": (
            "reasoning.encrypted_content",
            # Of tools of the server, which are not offered, and of images.
            "file_search_call.results",
            "web_search_call.results",
            "web_search_call.action.sources",
            "message.input_image.image_url",
            "computer_call_output.output.image_url",
            "code_interpreter_call.outputs",
        )
    },
)
_RESPONSES_TOOL = Members(
    read=["type", "name", "description", "parameters", "strict"],
    fixed={"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,), "output_schema": ()},
)
_PLACE = ("id", "status", "phase", "caller")  # of an item in the conversation that it comes from
_ITEMS = {
    "message": Members(read=["type", "role", "content"], harmless=_PLACE),
    "reasoning": Members(read=["type", "content"], harmless=[*_PLACE, "summary", "encrypted_content"]),
    "function_call": Members(
        read=["type", "call_id", "name", "arguments"], harmless=_PLACE, fixed={"async": (False,), "namespace": ()}
    ),
    "function_call_output": Members(
        read=["type", "call_id", "output"], harmless=[*_PLACE, "name"], fixed={"namespace": ()}
    ),
}
_TEXT = ("input_text", "output_text", "text", "refusal")


class Responses(Api):
    """`POST /responses`. A response may be continued by its ID within its attempt.

    Source: https://platform.openai.com/docs/api-reference/responses
    """

    path = "/responses"
    members = Members(
        read=[
            *("input", "instructions", "model", "tools", "stream", "max_output_tokens"),
            *("previous_response_id", "text", "include", "prompt_cache_options", "chat_template_kwargs"),
        ],
        sampling=_SAMPLING | {"reasoning"},
        harmless=_HARMLESS | {"access_programs", "background_options", "image", "max_tool_calls", "stream_options"},
        fixed={
            **_FIXED,
            "background": (False,),
            "context_management": ([],),
            "conversation": (),
            "enable_response_messages": (False,),
            "multi_agent": ({"enabled": False},),
            "prompt": (),
            "tool_choice": ("auto", "none"),
            "top_logprobs": (0,),
            "truncation": ("disabled",),
        },
    )

    def read(self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]) -> Asked:
        ignored = self.members.check(body)
        ignored += _FORM.check(given(body, "text"), "text.")
        _CACHE.check(given(body, "prompt_cache_options"), "prompt_cache_options.")
        for wanted in listed(body, "include"):
            _INCLUDE.check({"include": wanted})
        messages: list[Message] = []
        if body.get("instructions") is not None:
            messages.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
        first = len(messages)
        if (earlier := body.get("previous_response_id")) is not None:
            messages += recall(of_type(earlier, str, "previous_response_id", "a string"))
        asked = body.get("input")
        if isinstance(asked, str):
            messages.append({"role": "user", "content": asked})
        else:
            items = of_type(asked, list, "input", "text or a list of items")
            _add(messages, items)
        if len(messages) == first:
            raise RefusedError(400, "input must not be empty.", "input")
        tools = [_responses_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed(body, "tools"))]
        return Asked(
            messages=messages,
            tools=[] if body.get("tool_choice") == "none" else tools,
            max_new_tokens=whole(body.get("max_output_tokens"), "max_output_tokens"),
            model=str(body.get("model") or ""),
            stream=bool(body.get("stream")),
            ignored=ignored + strict(listed(body, "tools")),
            template_kwargs=given(body, "chat_template_kwargs"),
            instructions=first,
        )

    def write(self, asked: Asked, answered: Answered) -> dict[str, Any]:
        return {**_responses_head(asked), **_end(answered), "output": _items(answered)}

    def events(self, asked: Asked, answered: Answered, written: Mapping[str, Any]) -> Iterator[bytes]:
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
                for piece in pieces(block["text"]):
                    yield said("response.output_text.delta", **place, content_index=0, delta=piece, logprobs=[])
                yield said("response.output_text.done", **place, content_index=0, text=block["text"], logprobs=[])
                yield said("response.content_part.done", **place, content_index=0, part=block)
            elif item["type"] == "function_call":
                yield said("response.output_item.added", output_index=i, item={**begun, "arguments": ""})
                for piece in pieces(item["arguments"]):
                    yield said("response.function_call_arguments.delta", **place, delta=piece)
                yield said(
                    "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
                )
            else:
                yield said("response.output_item.added", output_index=i, item={**begun, "content": []})
                text = item["content"][0]["text"]
                for piece in pieces(text):
                    yield said("response.reasoning_text.delta", **place, content_index=0, delta=piece)
                yield said("response.reasoning_text.done", **place, content_index=0, text=text)
            yield said("response.output_item.done", output_index=i, item=item)
        yield said(f"response.{written['status']}", response=written)


def _responses_head(asked: Asked) -> dict[str, Any]:
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "model": asked.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
    }


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
        block = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        items.append(
            {"id": new_id("msg_"), "type": "message", "role": "assistant", "status": status, "content": [block]}
        )
    items += [
        {
            "id": new_id("fc_"),
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
            "status": status,
        }
        for call in reply.tool_calls
    ]
    return items


def _responses_tool(tool: Any, where: str) -> dict[str, Any]:
    kind = of_type(tool, dict, where, "an object").get("type")
    if kind != "function":
        raise RefusedError(400, f"{where}: tools of type {kind!r} are not offered here, only functions.", where)
    _RESPONSES_TOOL.check(tool, f"{where}.")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), where)


def _add(messages: list[Message], items: list[Any]) -> None:
    """Appends items as messages: neighbouring items of the assistant's are one message."""
    open_one: Message | None = None  # the assistant's message that further items belong to
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = of_type(item, dict, where, "an object").get("type", "message")
        role = item.get("role")
        if kind in _ITEMS:
            _ITEMS[kind].check(item, f"{where}.")
        if kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant"):
            if open_one is None:
                open_one = {"role": "assistant", "content": ""}
                messages.append(open_one)
            _add_to_assistant(open_one, kind, item, where)
            continue
        open_one = None
        if kind == "function_call_output":
            call_id = of_type(item.get("call_id"), str, f"{where}.call_id", "a string")
            text = text_of(item.get("output"), f"{where}.output", _TEXT)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif kind == "message" and role in ("user", "system", "developer"):
            text = text_of(item.get("content"), f"{where}.content", _TEXT)
            messages.append({"role": "user" if role == "user" else "system", "content": text})
        else:
            raise RefusedError(400, f"{where}: an item of type {kind!r} and role {role!r} is not offered here.", where)


def _add_to_assistant(message: Message, kind: str, item: dict[str, Any], where: str) -> None:
    if kind == "message":
        text = text_of(item.get("content"), f"{where}.content", _TEXT)
        message["content"] = f"{message['content']}\n{text}" if message["content"] else text
    elif kind == "function_call":
        arguments = arguments_of(item.get("arguments"), f"{where}.arguments")
        call = call_message(item.get("call_id"), item.get("name"), arguments, where)
        message["tool_calls"] = [*message.get("tool_calls", ()), call]
    elif item.get("content"):
        message["reasoning_content"] = text_of(item["content"], f"{where}.content", ("reasoning_text",))

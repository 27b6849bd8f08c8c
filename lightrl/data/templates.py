"""Tokenizers and chat templates: from a prompt, plain or conversational, to text and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from jinja2 import TemplateError
from lightning.pytorch.utilities import rank_zero_warn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightrl.arguments import user_path
from lightrl.data.files import one_line
from lightrl.models.spec import read_chat_template
from lightrl.models.turns import text_ids

__all__ = [
    "ChatTemplate",
    "apply_template",
    "as_messages",
    "conversation",
    "encode",
    "load_tokenizer",
    "render_prompt",
    "require_text",
    "why_not_there",
]

ChatTemplate = bool | Literal["auto"]
"""True: always; False: never; "auto": where the tokenizer has a template."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles of a conversation; others only where the chat template names them."""

_BLOCK_KINDS = ("text", "image", "video", "audio")


def load_tokenizer(path: str, *, chat_template: str | None = None, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder or hub name.

    LightRL never reads a mask off the pad token, so padding may share an id with another token. Where the tokenizer has
    no pad token, its unknown token is used, or else its end-of-sequence token, and a warning says which.

    Args:
        path: folder or hub name.
        chat_template: Jinja text, or a file of it, in place of the tokenizer's own; None leaves that.
        **kwargs: further arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: the template is no Jinja, the folder does not exist or holds no tokenizer, or the tokenizer has no
            end-of-sequence token.
    """
    template = None if chat_template is None else read_chat_template(chat_template, "chat_template")
    local = user_path("tokenizer or actor.path", path)
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
    """Why transformers found nothing in a folder or on the hub, by the errors behind the one that it raised."""
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


def why_not_pushed(error: BaseException) -> str:
    """Why the hub did not take something, and what to do, by the error that `huggingface_hub` raised."""
    if isinstance(error, OfflineModeIsEnabled):
        return "the hub is switched off (HF_HUB_OFFLINE): unset it, or write a folder with save_pretrained."
    said = " ".join(str(error).split())[:300]
    if isinstance(error, HFValidationError):
        return f"this cannot be the name of a repository (organisation/name): {said}"
    if isinstance(error, HfHubHTTPError):
        return (
            f"the hub refuses: {said} Check the name, and that the token (HF_TOKEN, `hf auth login`) may write there."
        )
    return (
        f"the hub cannot be reached, or the upload broke off ({type(error).__name__}: {said}). Try again, or write a "
        "folder with save_pretrained and upload it where there is a network: `hf upload NAME FOLDER`."
    )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Any,
    *,
    system_prompt: str | None = None,
    chat_template: ChatTemplate = "auto",
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[str, bool]:
    """The text that a prompt is tokenised from.

    Args:
        tokenizer: its chat template is used.
        prompt: a string, or a conversation as a list of {"role": ..., "content": ...}. A string becomes the user's
            turn where the template is applied. A conversation that ends with an assistant turn is continued there.
        system_prompt: put in front as the system's turn.
        chat_template: whether the template is applied to a string; a conversation always needs it.
        template_kwargs: further variables of the template, such as `enable_thinking`.

    Returns:
        the text, and whether the template made it (its special tokens are then in the text).

    Raises:
        ValueError: a template is needed and the tokenizer has none, or the prompt is neither string nor conversation.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(prompt, str) and (chat_template is False or (chat_template == "auto" and not has_template)):
        if system_prompt is not None:
            raise ValueError(
                "system_prompt: a plain prompt has no place for it. Use a tokenizer with a chat template and "
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
    unknown = sorted({str(message["role"]) for message in messages} - ROLES)
    for role in unknown:
        if role not in str(tokenizer.chat_template):
            raise ValueError(
                f"the role {role!r}: roles are {', '.join(sorted(ROLES))} and those that the chat template names."
            )
    open_turn = messages[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not open_turn, "continue_final_message": open_turn, **(template_kwargs or {})}
    return apply_template(tokenizer, messages, **options), True


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The text that the tokenizer's chat template makes of a conversation.

    Raises:
        ValueError: the template refuses it, for example because roles do not take turns.
    """
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(f"the chat template cannot render this conversation ({roles}): {error}") from error


def conversation(prompt: Any, system_prompt: str | None = None) -> list[dict[str, Any]]:
    """A prompt as messages, after the system's, if there is one; a string is the user's turn."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else as_messages(prompt)
    return messages if system_prompt is None else [{"role": "system", "content": system_prompt}, *messages]


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """A conversation's messages as new dictionaries.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes) or not prompt:
        raise ValueError(f"A prompt must be a string or a list of messages that is not empty, got {_short(prompt)}.")
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"A message must be a dictionary with role and content, got {_short(message)}.")
        if not isinstance(message["role"], str) or not message["role"]:
            raise ValueError(f"A message's role must be a string, got {_short(message['role'])}.")
        _require_content(message["content"])
    return [dict(message) for message in prompt]


def _require_content(content: Any) -> None:
    if content is None:  # a turn that calls tools may say nothing
        return
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
    """Raises a `ValueError` where a string holds half of a surrogate pair, which no tokenizer takes."""
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
    """Token ids of a prompt's text.

    Args:
        tokenizer: the tokenizer.
        text: from `render_prompt`.
        templated: a template's text holds its special tokens already; a plain one gets those the tokenizer adds, such
            as a beginning-of-sequence token, but no end-of-sequence token: it is there to be continued.
    """
    require_text(text)
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if templated:
        return plain
    ids = text_ids(tokenizer, text)
    eos = getattr(tokenizer, "eos_token_id", None)
    return ids[:-1] if ids[-1:] == [eos] and ids[-1 - len(plain) : -1] == plain else ids

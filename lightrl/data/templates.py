"""Tokenizers and chat templates: from a prompt, plain or conversational, to text and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

__all__ = ["ChatTemplate", "as_messages", "encode", "load_tokenizer", "render_prompt"]

ChatTemplate = bool | Literal["auto"]
"""True: always; False: never; "auto": where the tokenizer has a template."""


def load_tokenizer(path: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder or hub name.

    LightRL never reads a mask off the pad token, so padding may share an id with another token. Where the tokenizer has
    no pad token, its unknown token is used, or else its end-of-sequence token, and a warning says which.

    Args:
        path: folder or hub name.
        **kwargs: further arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        ValueError: the folder does not exist or holds no tokenizer, or the tokenizer has no end-of-sequence token.
    """
    local = Path(path).expanduser()
    if not local.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ValueError(f"model path {path!r}: there is no such folder (looked from {Path.cwd()}).")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(local) if local.is_dir() else path, **kwargs)
    except OSError as error:
        raise ValueError(f"model path {path!r}: no tokenizer there, neither in a folder nor on the hub.") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer of {path!r} has no end-of-sequence token; set eos_token in its configuration.")
    if tokenizer.pad_token_id is None:
        unknown = tokenizer.unk_token if tokenizer.unk_token_id is not None else None
        tokenizer.pad_token = unknown or tokenizer.eos_token
        rank_zero_warn(f"The tokenizer of {path!r} has no pad token: padding with {tokenizer.pad_token!r}.")
    return tokenizer


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
    if isinstance(prompt, str):
        if chat_template is False or (chat_template == "auto" and not has_template):
            if system_prompt is not None:
                raise ValueError(
                    "system_prompt: a plain prompt has no place for it. Use a tokenizer with a chat template and "
                    "chat_template=True, or write the text into the prompts."
                )
            return prompt, False
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = as_messages(prompt)
    if not has_template:
        raise ValueError(
            "Conversational prompts (and chat_template=True) need a tokenizer with a chat template; this one has none. "
            "Use an instruction-tuned model's tokenizer, set tokenizer.chat_template, or give prompts as strings."
        )
    if system_prompt is not None:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    open_turn = messages[-1]["role"] == "assistant"
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=not open_turn,
        continue_final_message=open_turn,
        **(template_kwargs or {}),
    )
    return str(text), True


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """A conversation's messages as new dictionaries.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(prompt, Sequence) or not prompt:
        raise ValueError(f"A prompt must be a string or a list of messages that is not empty, got {prompt!r}.")
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"A message must be a dictionary with role and content, got {message!r}.")
    return [dict(message) for message in prompt]


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, templated: bool) -> list[int]:
    """Token ids of a prompt's text.

    Args:
        tokenizer: the tokenizer.
        text: from `render_prompt`.
        templated: a template's text holds its special tokens already; a plain one gets those the tokenizer adds, such
            as a beginning-of-sequence token.
    """
    return list(tokenizer(text, add_special_tokens=not templated)["input_ids"])

"""Special tokens shared by data, engines, and models: end of turn, BOS, and media placeholders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from lightrl.records import SamplingParams

TOKEN_INPUT = "token_type_ids"
"""Suffix of model inputs with an entry per token; all others have entries per medium or feature."""

_SAID = "Qa7"


def end_of_turn(tokenizer: Any) -> int:
    """Returns the ID of the token that ends an assistant's turn.

    This is the token that the chat template writes after an assistant's message, both at the end of a conversation and
    before another message: `<|im_end|>`, `<end_of_turn>`, `<|eot_id|>`. The tokenizer's EOS takes precedence if the
    template writes it there. It is also the default for tokenizers without a template.

    Example: Phi-3 writes `Hi<|end|>\\n<|endoftext|>` last and `Hi<|end|>\\n<|user|>` before another message. So
    `<|end|>` ends a turn, although the EOS is `<|endoftext|>`.
    """
    return _end_of_turn(tokenizer, str(getattr(tokenizer, "chat_template", None) or ""))


@lru_cache(maxsize=16)
def _end_of_turn(tokenizer: Any, template: str) -> int:
    eos: int = tokenizer.eos_token_id
    asked, said = {"role": "user", "content": "Qu8"}, {"role": "assistant", "content": _SAID}
    last = _tail(tokenizer, [asked, said]) if template else None
    if last is None:
        return eos
    between = _tail(tokenizer, [asked, said, asked])
    ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(last, between or last, strict=False))
    common = "".join(a for a, _ in alike)
    tail = common if first_of(common, ids) else last
    if tokenizer.eos_token in tail:
        return eos
    found = first_of(tail, special_texts(tokenizer).values()) or first_of(tail, ids)
    return eos if found is None else ids[found]


def _tail(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str | None:
    """Returns what the template writes after the last assistant message; None if it rejects the conversation."""
    blocks = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for said in (messages, blocks):
        try:
            text = str(tokenizer.apply_chat_template(list(said), tokenize=False))
        except Exception:  # templates may raise any error
            continue
        if _SAID in text:
            return text.rpartition(_SAID)[2]
    return None


def special_texts(tokenizer: Any) -> dict[int, str]:
    """Returns the tokens that the tokenizer treats as special as token ID -> text."""
    named, added = {*tokenizer.all_special_tokens}, tokenizer.added_tokens_decoder  # read once: Gemma has thousands
    return {i: token.content for i, token in added.items() if token.special or token.content in named}


def first_of(text: str, tokens: Iterable[str]) -> str | None:
    """Returns the first of the tokens in a text, the longest at the same position; None without one."""
    found = [(place, -len(token), token) for token in tokens if token and (place := text.find(token)) >= 0]
    return min(found)[2] if found else None


def ending_turns(sampling: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Adds the tokens at which every engine must end a completion: end of turn and EOS.

    Engines read the EOS tokens from the model directory. The run's tokenizer and chat template may have others.
    """
    own, ends = sampling.stop_token_ids or (), {end_of_turn(tokenizer), tokenizer.eos_token_id}
    if sampling.ignore_eos or ends <= {*own}:
        return sampling
    return replace(sampling, stop_token_ids=[*{*own, *ends}])


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the token IDs of a text with the special tokens that the tokenizer adds, and a single BOS.

    A text rendered by a chat template may already begin with the BOS, and the tokenizer would add another.
    """
    ids = list(tokenizer(text, add_special_tokens=True)["input_ids"])
    return ids[1:] if begins_with_bos(tokenizer, text) and ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def begins_with_bos(tokenizer: Any, text: str) -> bool:
    """Whether a text begins with the BOS as text."""
    bos = getattr(tokenizer, "bos_token", None)
    return bool(bos) and text.startswith(str(bos))


def placeholder_ids(config: Any) -> dict[str, int]:
    """Returns the ID of the token that stands for each feature in this config, by kind of media; {} for text models."""
    found = {}
    for kind in ("image", "video", "audio"):
        values = (getattr(config, f"{kind}_token_{name}", None) for name in ("id", "index"))
        value = next((value for value in values if value is not None), None)
        if value is not None:
            found[kind] = int(value)
    return found


def require_known(config: Any, token_id: int) -> None:
    """Raises a ValueError if a token ID has no embedding in a text model with this config."""
    words = getattr(config.get_text_config(), "vocab_size", token_id + 1)
    if token_id >= words and not placeholder_ids(config):
        raise ValueError(
            f"token ID {token_id}: the model's vocabulary has only {words} tokens. If tokens were added to the "
            "tokenizer, save the model after model.resize_token_embeddings(len(tokenizer))."
        )


def harmless_id(config: Any) -> int:
    """Returns a token ID that is not a placeholder."""
    return next(i for i in range(4) if i not in placeholder_ids(config).values())


def causal_type(config: Any) -> int:
    """Token type of text with causal attention: 1 for PaliGemma, whose type 0 is a bidirectional prefix."""
    return int(config.model_type == "paligemma")

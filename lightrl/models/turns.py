"""Special tokens, as data, engines, and models agree on them: the end of a turn, the BOS, placeholders of media."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from lightrl.records import SamplingParams

TOKEN_INPUT = "token_type_ids"
"""Model inputs whose name ends like this have an entry per token; all others have entries per medium or feature."""

_SAID = "Qa7"

# ---- turns and texts ---------------------------------------------------------------------------------------------


def end_of_turn(tokenizer: Any) -> int:
    """ID of the token that ends an assistant's turn.

    It is the token that the chat template writes after the content of an assistant's message, both at the end of a
    conversation and before the next message: `<|im_end|>`, `<end_of_turn>`, `<|eot_id|>`. The tokenizer's EOS wins if
    the template writes it there; it is also the default for tokenizers without a template.

    Example: Phi-3 writes `Hi<|end|>\\n<|endoftext|>` last and `Hi<|end|>\\n<|user|>` before another message, so that
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
    tail = common if _first(common, ids) else last
    if tokenizer.eos_token in tail:
        return eos
    found = _first(tail, [text for text, i in ids.items() if _is_special(tokenizer, i)]) or _first(tail, ids)
    return eos if found is None else ids[found]


def _tail(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str | None:
    """What the template writes after the last thing the assistant said; None if it rejects such a conversation."""
    blocks = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for said in (messages, blocks):
        try:
            text = str(tokenizer.apply_chat_template(list(said), tokenize=False))
        except Exception:  # a template may raise anything
            continue
        if _SAID in text:
            return text.rpartition(_SAID)[2]
    return None


def _is_special(tokenizer: Any, token_id: int) -> bool:
    token = tokenizer.added_tokens_decoder.get(token_id)
    return token is not None and (token.special or token.content in tokenizer.all_special_tokens)


def _first(text: str, tokens: Iterable[str]) -> str | None:
    """The first of the tokens in a text, the longest at the same place; None without one."""
    found = [(place, -len(token), token) for token in tokens if token and (place := text.find(token)) >= 0]
    return min(found)[2] if found else None


def ended_turn(tokenizer: Any, token_ids: Sequence[int]) -> list[int]:
    """The tokens of a rendered turn up to its end: what a policy would sample.

    Args:
        tokenizer: Of the template that rendered it.
        token_ids: What the template writes after the generation prompt. Tokens after the end of the turn, such as a
            line break, are cut off. A turn that another special token ends, such as a call's, stays as it is; one
            without an end gets it.
    """
    ids, end = list(token_ids), end_of_turn(tokenizer)
    if end in ids:
        return ids[: len(ids) - ids[::-1].index(end)]
    return ids if ids and _is_special(tokenizer, ids[-1]) else [*ids, end]


def ending_turns(sampling: SamplingParams, tokenizer: Any) -> SamplingParams:
    """The settings with the tokens at which every engine must end a completion: end of turn and EOS.

    Engines know the EOS tokens of the model directory; the run's tokenizer and chat template may have others.
    """
    own, ends = sampling.stop_token_ids or (), {end_of_turn(tokenizer), tokenizer.eos_token_id}
    if sampling.ignore_eos or ends <= {*own}:
        return sampling
    return replace(sampling, stop_token_ids=[*{*own, *ends}])


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Token IDs of a text with the special tokens that the tokenizer adds, and a single BOS.

    A text that a chat template rendered may begin with the BOS, to which the tokenizer would add another.
    """
    ids = list(tokenizer(text, add_special_tokens=True)["input_ids"])
    return ids[1:] if begins_with_bos(tokenizer, text) and ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def begins_with_bos(tokenizer: Any, text: str) -> bool:
    """Whether a text begins with the BOS written out."""
    bos = getattr(tokenizer, "bos_token", None)
    return bool(bos) and text.startswith(str(bos))


# ---- placeholders ------------------------------------------------------------------------------------------------


def placeholder_ids(config: Any) -> dict[str, int]:
    """Kind of media -> ID of the token that stands for each of its features; {} for text models.

    Args:
        config: A model's configuration, with `image_token_id` or, in older families, `image_token_index`.
    """
    found = {}
    for kind in ("image", "video", "audio"):
        values = (getattr(config, f"{kind}_token_{name}", None) for name in ("id", "index"))
        value = next((value for value in values if value is not None), None)
        if value is not None:
            found[kind] = int(value)
    return found


def harmless_id(config: Any) -> int:
    """A token ID that is not a placeholder."""
    return next(i for i in range(4) if i not in placeholder_ids(config).values())


def causal_type(config: Any) -> int:
    """Token type of text that attends to earlier tokens alone: 1 for PaliGemma, whose type 0 is a two-way prefix."""
    return int(config.model_type == "paligemma")

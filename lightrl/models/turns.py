"""The end of an assistant's turn and the beginning of a text, as data, engines, and reward models agree on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from lightrl.records import SamplingParams

_SAID = "Qa7"


def end_of_turn(tokenizer: Any) -> int:
    """ID of the token that ends an assistant's turn.

    It is the token that the chat template writes after the content of an assistant's message, both at the end of a
    conversation and before the next message: `<|im_end|>`, `<end_of_turn>`, `<|eot_id|>`. The tokenizer's EOS wins if
    the template writes it there; it also ends the turns of tokenizers without a template, and of templates that end a
    turn without a special token.

    Example: Phi-3 writes `Hi<|end|>\\n<|endoftext|>` last and `Hi<|end|>\\n<|user|>` before another message, so that
    `<|end|>` ends a turn, although the EOS is `<|endoftext|>`.
    """
    return _end_of_turn(tokenizer, str(getattr(tokenizer, "chat_template", None) or ""))


@lru_cache(maxsize=16)
def _end_of_turn(tokenizer: Any, template: str) -> int:
    eos: int = tokenizer.eos_token_id
    asked, said = {"role": "user", "content": "Qu8"}, {"role": "assistant", "content": _SAID}
    tails = [_tail(tokenizer, [asked, said, *more]) for more in ((), (asked,))] if template else [None, None]
    last, between = tails
    if last is None:
        return eos
    common = last if between is None else _common_start(last, between)
    tail = common if _first(common, _texts(tokenizer)) else last
    if tokenizer.eos_token in tail:
        return eos
    special = {text: i for text, i in _texts(tokenizer).items() if _is_special(tokenizer, i)}
    found = _first(tail, special) or _first(tail, _texts(tokenizer))
    return eos if found is None else _texts(tokenizer)[found]


def _tail(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str | None:
    """What the template writes after the last thing the assistant said; None if it rejects such a conversation."""
    for blocks in (False, True):
        said: Any = [
            {**message, "content": [{"type": "text", "text": message["content"]}]} if blocks else message
            for message in messages
        ]
        try:
            text = str(tokenizer.apply_chat_template(said, tokenize=False))
        except Exception:  # a template may raise anything
            continue
        if _SAID in text:
            return text[text.rfind(_SAID) + len(_SAID) :]
    return None


def _common_start(first: str, second: str) -> str:
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _texts(tokenizer: Any) -> dict[str, int]:
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}


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
        tokenizer: of the template that rendered it.
        token_ids: what the template writes after the generation prompt. Tokens after the end of the turn, such as a
            line break, are cut off. A turn that another special token ends, such as a call's, stays as it is; one
            without an end gets it.
    """
    ids, end = list(token_ids), end_of_turn(tokenizer)
    if end in ids:
        return ids[: len(ids) - ids[::-1].index(end)]
    return ids if ids and _is_special(tokenizer, ids[-1]) else [*ids, end]


def ending_turns(sampling: SamplingParams, tokenizer: Any) -> SamplingParams:
    """The settings with the tokens at which every engine must end a completion: end of turn and EOS.

    Engines know the EOS tokens of the model's folder; the run's tokenizer and chat template may have others.
    """
    ends = {end_of_turn(tokenizer), tokenizer.eos_token_id}
    if sampling.ignore_eos or ends <= {*(sampling.stop_token_ids or ())}:
        return sampling
    return replace(sampling, stop_token_ids=[*{*(sampling.stop_token_ids or ()), *ends}])


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

"""Texts of tokens that `RolloutWriter` saves: joined they are the text, for tokenizers of bytes and of words."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightrl.callbacks.rollout_writer import texts_of_tokens

WORDS = ["Hello world, how are you today? "] * 20


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """As of GPT-2, Qwen, and SmolLM2: an emoji is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(WORDS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def words_tokenizer() -> PreTrainedTokenizerFast:
    """As of Llama 2 and Mistral: a token alone loses its leading space, and unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<|end|>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, max_token_length=6)
    tokenizer.train_from_iterator(WORDS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>")


@pytest.mark.parametrize("make", [bytes_tokenizer, words_tokenizer])
def test_texts_of_tokens_join_to_the_text_with_whole_characters(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    text = "Hello world, 😀 how 👩‍👧 are you? \n\n\t東京 naïve<|end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = {token: tokenizer.decode([token]) for token in ids}
    assert "".join(pieces[token] for token in ids) != text, "tokens alone are not enough"
    texts = texts_of_tokens(ids, pieces, tokenizer, [0] * len(ids))
    assert len(texts) == len(ids) and "".join(texts) == text == tokenizer.decode(ids)
    assert sum("😀" in piece for piece in texts) == 1 and "" in texts and texts[-1] == "<|end|>"
    cut = ids[: next(i for i, piece in enumerate(texts) if "😀" in piece)]  # by max_new_tokens, within the emoji
    ends = texts_of_tokens(cut, pieces, tokenizer, [0] * len(cut))
    assert len(ends) == len(cut) and "".join(ends) == tokenizer.decode(cut)
    end = tokenizer("<|end|>", add_special_tokens=False)["input_ids"]
    both = texts_of_tokens(cut + end, {**pieces, end[0]: "<|end|>"}, tokenizer, [0] * len(cut) + [-1] * len(end))
    assert both[: len(cut)] == ends and "".join(both[len(cut) :]).strip() == "<|end|>"

"""Writes the quickstart's model directory: a Qwen2 configuration and a character tokenizer without weights.

    python scripts/make_quickstart_model.py [configs/quickstart/model]

The model has 0.45M parameters: hidden size 128, 3 layers, 4 heads, 2 key-value heads, tied embeddings, 64 positions,
and 32 tokens. Its weights are initialized at the start of the SFT run (`random_init: true`). The output is
deterministic.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import GenerationConfig, Qwen2Config, Qwen2Tokenizer

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
CHARACTERS = "0123456789+-*/= .,:;?!()<>\n#"
VOCABULARY = 32


def make_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer with one token per character and no added tokens. Drops characters outside the vocabulary.

    Uses Qwen2's byte-level class without merges, because `AutoTokenizer` always creates that class for this model type.
    The class represents a space as "Ġ" and a newline as "Ċ".
    """
    characters = CHARACTERS.replace(" ", "Ġ").replace("\n", "Ċ")
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    assert len(vocabulary) == VOCABULARY
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def make_config() -> Qwen2Config:
    """A Qwen2 configuration with 0.45M parameters."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        dtype="float32",
    )


def main(folder: str = "configs/quickstart/model") -> None:
    """Writes config.json, generation_config.json, tokenizer.json, and tokenizer_config.json to `folder`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    make_config().save_pretrained(folder)
    GenerationConfig(pad_token_id=0, eos_token_id=1, bos_token_id=2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])

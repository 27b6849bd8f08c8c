"""Writes the quickstart's model folder: a Qwen2 configuration and a character tokenizer, no weights.

    python scripts/make_quickstart_model.py [configs/quickstart/model]

0.45 M parameters: hidden size 128, 3 layers, 4 heads, 2 key-value heads, tied embeddings, 64 positions, 32 tokens. The
weights are drawn at the start of the supervised run (`random_init: true`); the same folder always comes out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import GenerationConfig, Qwen2Config, Qwen2Tokenizer

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
CHARACTERS = "0123456789+-*/= .,:;?!()<>\n#"
VOCABULARY = 32


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per character, nothing added in front or at the end; a character outside the vocabulary disappears.

    It is Qwen2's own byte-level class without a single merge, because `AutoTokenizer` builds that class for every model
    of this type whatever the folder says; there a space is written "Ġ" and a line break "Ċ".
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
    """The 0.45 M-parameter Qwen2."""
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
    """Writes config.json, generation_config.json, tokenizer.json and tokenizer_config.json to `folder`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    make_config().save_pretrained(folder)
    GenerationConfig(pad_token_id=0, eos_token_id=1, bos_token_id=2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])

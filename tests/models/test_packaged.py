"""Models shipped in Python packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from lightrl.models.packaged import add_bos


@pytest.mark.parametrize(("told", "expected"), [(True, [0, 1, 2]), (False, [1, 2]), (None, [1, 2])])
def test_texts_begin_with_the_bos_token_if_the_file_says_so(
    told: bool | None, expected: list[int], tmp_path: Path
) -> None:
    """Without it, Gemma 3 270M has twice the loss on English text: 4.7 instead of 2.3 nats per token."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    if told is not None:
        writer.add_add_bos_token(told)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    words = Tokenizer(WordLevel({"<bos>": 0, "a": 1, "b": 2}, unk_token="a"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>")
    add_bos(tokenizer, tmp_path / "model.gguf")
    tokenizer.save_pretrained(tmp_path)
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path)("a b")["input_ids"] == expected

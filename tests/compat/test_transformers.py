"""What models of transformers declare under names that begin with an underscore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Idefics3Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
)
from transformers.modeling_layers import GenericForSequenceClassification

from lightrl.compat import transformers as compat

SIZES: dict[str, Any] = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1}


def llama(**settings: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=8, num_attention_heads=2, **settings))


def test_what_models_can_do() -> None:
    mamba = MambaForCausalLM(MambaConfig(**SIZES, state_size=2))
    assert compat.supports_sdpa(llama())
    assert [compat.has_recurrent_state(model) for model in (llama(), mamba)] == [False, True]
    assert compat.block_class_names(llama()) == {"LlamaDecoderLayer"}
    assert not compat.supports_sdpa(object())
    assert not compat.has_recurrent_state(object())
    assert compat.block_class_names(object()) == set()


def test_the_attention_that_was_set_is_the_one_that_is_read() -> None:
    model = llama()
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert compat.attention_implementation(model.config) == name


def test_the_class_that_an_auto_class_makes() -> None:
    config = llama().config
    assert compat.model_class(AutoModel, config) is LlamaModel
    assert compat.model_class(AutoModelForCausalLM, config) is LlamaForCausalLM
    assert compat.model_class(AutoModelForSequenceClassification, Idefics3Config()) is None


def test_a_class_made_here_has_from_config() -> None:
    base = LlamaModel.__mro__[1]
    kind = compat.with_from_config("LlamaForScores", (GenericForSequenceClassification, base))
    model = kind.from_config(LlamaConfig(**SIZES, intermediate_size=8, num_attention_heads=2, num_labels=1))
    assert type(model).__name__ == "LlamaForScores"
    assert model.score.weight.shape == (1, 8)


def test_a_file_that_a_folder_lacks_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert compat.cached_path(str(tmp_path), "config.json") == str(tmp_path / "config.json")
    assert compat.cached_path(str(tmp_path), "processor_config.json") is None

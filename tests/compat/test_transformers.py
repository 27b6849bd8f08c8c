"""What models of transformers declare under names that begin with an underscore."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Idefics3Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.modeling_layers import GenericForSequenceClassification

from lightrl.compat import transformers as compat
from lightrl.compat import transformers_models

SIZES: dict[str, Any] = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1}


def llama(**settings: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=8, num_attention_heads=2, **settings))


def test_renamed_parts_have_the_names_of_this_release() -> None:
    model, ids = llama(), torch.tensor([[1, 2, 3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        name = compat.cache_argument(model)
        cache = getattr(model(ids[:, :2], use_cache=True), name)
        last = model(ids[:, 2:], **{name: cache}).logits[0, -1]
        compat.checkpoint_activations(model, {"use_reentrant": False})
    torch.testing.assert_close(last, model(ids).logits[0, -1])
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_class_made_here_has_from_config() -> None:
    base = LlamaModel.__mro__[1]
    kind = transformers_models.with_from_config("LlamaForScores", (GenericForSequenceClassification, base))
    model = kind.from_config(LlamaConfig(**SIZES, intermediate_size=8, num_attention_heads=2, num_labels=1))
    assert type(model).__name__ == "LlamaForScores"
    assert model.score.weight.shape == (1, 8)


def test_a_file_that_a_folder_lacks_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert transformers_models.cached_path(str(tmp_path), "config.json") == str(tmp_path / "config.json")
    assert transformers_models.cached_path(str(tmp_path), "processor_config.json") is None


@pytest.mark.parametrize("kind", ["Mixtral", "GraniteMoe", "HrmText"])
@pytest.mark.parametrize("loaded", [True, False])
def test_parameters_one_by_one_are_what_a_saved_folder_holds(kind: str, loaded: bool, tmp_path: Path) -> None:
    sizes = SIZES | {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 4}
    sizes |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    assert on_disk.keys() != dict(model.named_parameters()).keys()

    held = torch.empty(0)

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor is overwritten when the next one is asked for."""
        nonlocal held
        for name, parameter in model.named_parameters():
            held.fill_(float("nan"))
            held = parameter.detach().clone()
            yield name, held

    sent = {name: tensor.clone() for name, tensor in compat.as_saved(model, one_by_one())}
    assert sent.keys() == on_disk.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in on_disk.items())


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

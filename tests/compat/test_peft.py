"""What peft's injected layers are read for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightrl.compat import peft as compat

peft = pytest.importorskip("peft")


def test_an_embeddings_adapter_is_not_one_of_a_linear_layer() -> None:
    model = nn.Sequential(nn.Embedding(4, 3))
    config = peft.LoraConfig(r=2, target_modules=["0"])
    peft.inject_adapter_in_model(config, model, adapter_name=compat.ADAPTER)
    assert compat.lora_parts(compat.adapter_layers(model)["0"]) is None


def test_the_merged_weight_computes_what_the_layer_does() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU())
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"])
    peft.inject_adapter_in_model(config, model, adapter_name=compat.ADAPTER)
    layers = compat.adapter_layers(model)
    assert list(layers) == ["0"]
    parts = compat.lora_parts(layers["0"])
    assert parts is not None
    assert parts.a.shape == (2, 4)
    assert parts.b.shape == (3, 2)
    assert parts.scaling == 3.0
    assert not parts.transposed
    nn.init.normal_(parts.b)
    weight, x = layers["0"].base_layer.weight, torch.randn(5, 4)
    torch.testing.assert_close(model[0](x), x @ (weight + 3.0 * parts.b @ parts.a).T)
    layers["0"].enable_adapters(False)
    torch.testing.assert_close(model[0](x), x @ weight.T)
    assert compat.dequantized(layers["0"], weight) is weight

"""What peft's injected layers are read for."""

from __future__ import annotations

import pytest
from torch import nn

from lightrl.compat import peft as compat

peft = pytest.importorskip("peft")


def test_an_embeddings_adapter_is_not_one_of_a_linear_layer() -> None:
    model = nn.Sequential(nn.Embedding(4, 3))
    config = peft.LoraConfig(r=2, target_modules=["0"])
    peft.inject_adapter_in_model(config, model, adapter_name=compat.ADAPTER)
    assert compat.lora_parts(compat.adapter_layers(model)["0"]) is None

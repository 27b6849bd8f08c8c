"""The critic: (B, T) tensors in, (B, T) values out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

from lightrl.models.backbone import Backbone
from lightrl.models.loading import load_model
from lightrl.models.spec import Layout, ModelSpec
from lightrl.records import RowBatch


class ValueHead(nn.Linear):
    """A linear layer from (M, D) hidden states to (M,) float32 values."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes values in the head's precision: autocast would round close ones to ties."""
        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.to(self.weight.dtype)).squeeze(-1).float()


def new_value_head(model: Any) -> ValueHead:
    """Creates a head with initial values close to 0: weights with std 1 / (D + 1), bias 0."""
    from lightrl.compat.deepspeed import whole_parameters

    size = model.config.get_text_config().hidden_size
    with whole_parameters():
        head = ValueHead(size, 1)
    nn.init.normal_(head.weight, std=1.0 / (size + 1))
    nn.init.zeros_(head.bias)
    device = next(model.parameters()).device
    return head if device.type == "meta" else head.to(device)


class ValueModel(nn.Module):
    """A critic with a separate backbone, from `load_model`; `layout` as in `ModelSpec`."""

    def __init__(self, backbone: Any, *, layout: Layout = "auto") -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = new_value_head(backbone)
        self.stream = Backbone(backbone, backbone, layout)

    @classmethod
    def from_spec(cls, spec: ModelSpec, *, in_shards: bool = False) -> ValueModel:
        """Loads the backbone of a language model with a new head; `in_shards` as in `load_causal_lm`."""
        return cls(load_model(spec, AutoModel, trainable=True, in_shards=in_shards), layout=spec.layout)

    def forward(self, rows: RowBatch) -> Tensor:
        """Returns (B, T) float32 values of the state before each response token, 0 elsewhere."""
        out = self.stream(replace(rows, routes=[]))
        return out.scatter(self.value_head(out.hidden))

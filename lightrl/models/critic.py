"""The critic: (B, T) tensors in, (B, T) values out."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightrl.models.backbone import Backbone
from lightrl.models.loading import load_backbone
from lightrl.models.policy import StreamModel, new_value_head, read_values, transformer_blocks
from lightrl.models.spec import Layout, ModelSpec
from lightrl.records import HostRows


class ValueModel(StreamModel):
    """A critic with a separate backbone, from `load_backbone`; `layout` as in `ModelSpec`."""

    def __init__(self, backbone: Any, *, layout: Layout = "auto") -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = new_value_head(backbone)
        self._backbone = Backbone(backbone, backbone, layout)

    @classmethod
    def from_spec(cls, spec: ModelSpec, *, in_shards: bool = False) -> ValueModel:
        """Loads the backbone of a language model with a new head; `in_shards` as in `load_causal_lm`."""
        backbone = load_backbone(spec, trainable=True, in_shards=in_shards)
        return cls(backbone, layout=spec.layout)

    def forward(
        self,
        token_ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        *,
        group_ids: Tensor | None = None,
        host: HostRows | None = None,
        inputs: list[dict[str, Any]] | None = None,
    ) -> Tensor:
        """Returns (B, T) float32 values of the state before each response token, 0 elsewhere. See `PolicyModel`."""
        out = self._backbone(token_ids, attention_mask, response_mask, group_ids, inputs, host)
        return out.scatter(read_values(self.value_head, out.hidden))

    def blocks(self) -> list[nn.Module]:
        """Returns the transformer blocks, as FSDP2 shards them."""
        return transformer_blocks(self.backbone)

    def evaluate(self, rows: Any) -> Tensor:
        """Returns the (B, T) values of `Rollouts` or `Experience`."""
        values: Tensor = self(
            rows.token_ids,
            rows.attention_mask,
            rows.response_mask,
            group_ids=rows.group_ids,
            host=rows.host_rows(),
            inputs=rows.inputs,
        )
        return values

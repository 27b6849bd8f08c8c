"""Parts of peft 0.21 that LightRL relies on beyond its documented interface; see tests/compat/test_peft.py.

peft's wrapper class would change a model's type and its parameters' names, so adapters are injected into the model and
its layers are read directly. Importing this file does not import peft.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

ADAPTER = "default"
"""Name of the adapter that is trained."""

REFERENCE = "reference"
"""Name of the frozen copy of it that a run began with, where that is the reference."""


class LoraParts(NamedTuple):
    """The adapter of one layer: `scaling * B A` is added to its weight.

    Attributes:
        a: parameter (r, in). b: parameter (out, r).
        scaling: alpha / r.
        transposed: the layer's weight is (in, out).
    """

    a: Tensor
    b: Tensor
    scaling: float
    transposed: bool


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}


def lora_parts(layer: Any, name: str = ADAPTER) -> LoraParts | None:
    """The adapter of that name of a layer; None if there is none of two matrices, as on an embedding."""
    if name not in getattr(layer, "lora_A", ()):
        return None
    transposed = bool(getattr(layer, "fan_in_fan_out", False))
    return LoraParts(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], transposed)


def is_linear(layer: Any) -> bool:
    """Whether a layer with an adapter has two matrices for one of its own; a wrapped parameter, as of experts, not."""
    return lora_parts(layer) is not None and not hasattr(layer, "parameter_name")


def dequantized(layer: Any, weight: Tensor) -> Tensor:
    """A weight as it is; one that bitsandbytes packed into bytes, unpacked."""
    if not hasattr(weight, "quant_state"):
        return weight
    from peft.utils.integrations import dequantize_bnb_weight

    unpacked: Tensor = dequantize_bnb_weight(weight, state=getattr(layer.get_base_layer(), "state", None))
    return unpacked

"""Undocumented parts of PEFT 0.21; see tests/compat/test_peft.py.

PEFT's wrapper class would change a model's type and parameter names, so adapters are injected into the model and its
layers are read directly. Importing this module doesn't import PEFT.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

ADAPTER = "default"
"""Name of the trained adapter."""


class LoraParts(NamedTuple):
    """Adapter of one layer, which adds `scaling * B A` to its weight."""

    a: Tensor  # (r, in)
    b: Tensor  # (out, r)
    scaling: float  # alpha / r
    transposed: bool  # the layer's weight is (in, out)


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Returns the layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}


def lora_parts(layer: Any) -> LoraParts | None:
    """Returns a layer's adapter; None if it doesn't consist of two matrices, as on an embedding."""
    if ADAPTER not in getattr(layer, "lora_A", ()):
        return None
    transposed = bool(getattr(layer, "fan_in_fan_out", False))
    return LoraParts(layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER], transposed)


def is_linear(layer: Any) -> bool:
    """Whether a layer with an adapter is linear, rather than a wrapped parameter, such as an expert's."""
    return lora_parts(layer) is not None and not hasattr(layer, "parameter_name")


def dequantized(layer: Any, weight: Tensor) -> Tensor:
    """Returns a weight, dequantized if bitsandbytes packed it."""
    if not hasattr(weight, "quant_state"):
        return weight
    from peft.utils.integrations import dequantize_bnb_weight

    unpacked: Tensor = dequantize_bnb_weight(weight, state=getattr(layer.get_base_layer(), "state", None))
    return unpacked

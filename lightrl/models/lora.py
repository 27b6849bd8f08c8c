"""LoRA adapters in Hugging Face models, and a policy's weights under their Hugging Face names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightrl.compat.deepspeed import whole_parameters
from lightrl.compat.peft import ADAPTER, adapter_layers, dequantized, is_linear, lora_parts
from lightrl.compat.transformers import router_modules
from lightrl.distributed.strategies import gathered
from lightrl.models.spec import LoraSpec
from lightrl.models.turns import placeholder_ids


def add_lora(model: Any, spec: LoraSpec) -> None:
    """Adds adapters to `model` in place. Afterward, only they require gradients. Model type and parameter names stay.

    Raises a ValueError if no layer matches `target_modules`, or if one is not linear.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = spec.target_modules
    routed = {name.split(".")[-2] for name, _ in router_modules(model)}  # the name in their blocks, such as "mlp"
    if targets == "all-linear" and routed:  # PEFT would include the parameters of experts and routers
        linear = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        targets = [name for name, part in linear if part is not head and not routed.intersection(name.split("."))]
    config = LoraConfig(
        r=spec.r,
        lora_alpha=spec.alpha,
        target_modules=targets,
        exclude_modules=["score"] if hasattr(model, "score") else None,  # a reward model's head is fully trained
        bias="none",
    )
    with whole_parameters():
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, layer in adapter_layers(model).items():
        if not is_linear(layer):
            raise ValueError(
                f"lora.target_modules={spec.target_modules!r}: {name.removesuffix('.base_layer')} is not a linear "
                "layer. Use linear layers; in a mixture-of-experts model, use the attention layers."
            )


def adapts_media(lm: Any) -> bool:
    """Whether the vision or audio encoder has a LoRA adapter."""
    if not placeholder_ids(lm.config):
        return False
    language = {id(module) for module in (*lm.base_model.get_decoder().modules(), lm.get_output_embeddings())}
    return any(id(layer) not in language for layer in adapter_layers(lm).values())


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Context manager that runs `model` without its adapter."""
    layers = list(adapter_layers(model).values())
    trained = [[p.requires_grad for p in layer.parameters()] for layer in layers]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, flags in zip(layers, trained, strict=True):
            layer.enable_adapters(True)
            for parameter, flag in zip(layer.parameters(), flags, strict=True):
                parameter.requires_grad_(flag)


def named_merged_weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """`named_hf_weights` of a policy with adapters."""
    layers = adapter_layers(policy.lm)
    for name, parameter in policy.lm.named_parameters():
        if ".lora_" not in name:
            owner, adapted, leaf = name.rpartition(".base_layer.")
            with ExitStack() as stack:
                if adapted and leaf == "weight":
                    yield f"{owner}.weight", _merged(layers[owner], parameter, stack)
                else:
                    yield f"{owner}.{leaf}" if adapted else name, stack.enter_context(gathered(parameter))


def adapter_config(policy: Any, spec: LoraSpec) -> dict[str, Any]:
    """Returns PEFT's `adapter_config.json` of a policy's adapter."""
    names = adapter_layers(policy.lm)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": spec.r,
        "lora_alpha": spec.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in names}),
        "bias": "none",
        "fan_in_fan_out": any(parts.transposed for parts in map(lora_parts, names.values()) if parts),
    }


@torch.no_grad()
def named_adapter_weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields a policy's adapter parameters under PEFT's names, one at a time. See `named_hf_weights`."""
    for name, parameter in policy.lm.named_parameters():
        if ".lora_" in name and f".{ADAPTER}." in name:
            with gathered(parameter) as full:
                yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", full


def save_adapter(folder: Path, tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]) -> None:
    """Writes an adapter in PEFT's format, from its parameters under PEFT's names and its `adapter_config.json`."""
    weights = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(dict(config), indent=2) + "\n")


def _merged(layer: Any, weight: Tensor, stack: ExitStack) -> Tensor:
    parts = lora_parts(layer)
    assert parts is not None
    a, b, base = (stack.enter_context(gathered(x)) for x in (parts.a, parts.b, weight))
    base = dequantized(layer, base)
    delta = (b.float() @ a.float()) * parts.scaling
    return (base.float() + (delta.T if parts.transposed else delta)).to(base.dtype)

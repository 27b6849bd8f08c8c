"""LoRA adapters inside Hugging Face models, and the names and weights of a policy as others know them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.compat.deepspeed import whole_parameters
from lightrl.compat.peft import ADAPTER, adapter_layers, dequantized, lora_parts
from lightrl.models.spec import LoraSpec

__all__ = ["adapter_config", "adapter_disabled", "add_lora", "named_adapter_weights", "named_hf_weights"]

Gather = Callable[[Tensor], AbstractContextManager[Tensor]]


def add_lora(model: nn.Module, spec: LoraSpec) -> None:
    """Puts adapters into `model` in place; afterwards only they require gradients.

    peft's injection is used rather than its wrapper class, so the model keeps its type and its parameter names.

    Raises:
        ValueError: peft is not installed, or no layer matches `target_modules`.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("lora=... needs the package peft: pip install 'lightrl[peft]'.") from error
    config = LoraConfig(
        r=spec.r,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=spec.target_modules,
        exclude_modules=["score"] if hasattr(model, "score") else None,  # a reward model's head is trained whole
        bias="none",
    )
    with whole_parameters():
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    for name, layer in adapter_layers(model).items():
        if lora_parts(layer) is None:
            raise ValueError(f"lora.target_modules={spec.target_modules!r}: {name} is not a linear layer.")


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Runs `model` without its adapters: the reference policy of a LoRA run.

    Raises:
        ValueError: the model has no adapter, so that this would be the policy itself.
    """
    layers = list(adapter_layers(model).values())
    if not layers:
        raise ValueError("adapter_disabled: the model has no LoRA adapter; a full model needs a reference of its own.")
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


@torch.no_grad()
def named_hf_weights(
    policy: Any, gather: Gather | None = None, *, trained_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the policy's language model under its Hugging Face name, LoRA merged, one at a time.

    The module is not changed: `W + alpha / r * B A` is computed for one layer, handed out, and dropped. Tied
    parameters come once, under the name they have first. A value head is not among them.

    Args:
        policy: a `PolicyModel` (anything with `lm`).
        gather: gives a context manager around the full tensor of a sharded parameter; None for unsharded ones.
            Collective where it is: every rank must iterate to the end.
        trained_only: leave out what cannot have changed, frozen parameters without an adapter.

    Yields:
        (name, full tensor). The tensor may be a parameter itself and is valid until the next one is asked for.
    """
    gather = gather or nullcontext
    layers = adapter_layers(policy.lm)
    for name, parameter in policy.lm.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = path.removesuffix(".base_layer")
        if trained_only and not parameter.requires_grad and (owner == path or leaf != "weight"):
            continue
        if not path.endswith(".base_layer"):
            if ".lora_" not in name:
                with gather(parameter) as full:
                    yield name, full
        elif leaf == "weight":
            with ExitStack() as stack:
                yield f"{owner}.weight", _merged(layers[owner], parameter, gather, stack)
        else:
            with gather(parameter) as full:
                yield f"{owner}.{leaf}", full


def adapter_config(policy: Any, spec: LoraSpec) -> dict[str, Any]:
    """peft's `adapter_config.json` of a policy's adapter."""
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
def named_adapter_weights(policy: Any, gather: Gather | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the policy's adapter under peft's name, one at a time; arguments as of `named_hf_weights`."""
    gather = gather or nullcontext
    for name, parameter in policy.lm.named_parameters():
        if ".lora_" in name:
            with gather(parameter) as full:
                yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", full


def _merged(layer: Any, weight: Tensor, gather: Gather, stack: ExitStack) -> Tensor:
    parts = lora_parts(layer)
    assert parts is not None
    a, b, base = (stack.enter_context(gather(x)) for x in (parts.a, parts.b, weight))
    base = dequantized(layer, base)
    delta = (b.float() @ a.float()) * parts.scaling
    return (base.float() + (delta.T if parts.transposed else delta)).to(base.dtype)

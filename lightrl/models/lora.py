"""LoRA adapters in Hugging Face models, and a policy's weights under their Hugging Face names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.checkpoints.files import require_written
from lightrl.compat.arguments import install_command
from lightrl.compat.deepspeed import whole_parameters
from lightrl.compat.peft import ADAPTER, REFERENCE, adapter_layers, dequantized, is_linear, lora_parts
from lightrl.compat.transformers import router_modules
from lightrl.models.spec import LoraSpec
from lightrl.models.turns import placeholder_ids

Gather = Callable[[Tensor], AbstractContextManager[Tensor]]


def add_lora(model: Any, spec: LoraSpec) -> None:
    """Adds adapters to `model` in place. Afterward, only they require gradients.

    Uses PEFT's injection instead of its wrapper class, so the model keeps its type and parameter names.

    Raises:
        ValueError: PEFT is not installed, no layer matches `target_modules`, or `adapter` has other tensors.
    """
    targets = spec.target_modules
    routed = {name.split(".")[-2] for name, _ in router_modules(model)}  # the name in their blocks, such as "mlp"
    if targets == "all-linear" and routed:  # PEFT would include the parameters of experts and routers
        linear = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        targets = [name for name, part in linear if part is not head and not routed.intersection(name.split("."))]
    _inject(model, replace(spec, adapter=None, target_modules=targets), ADAPTER)
    for name, layer in adapter_layers(model).items():
        if not is_linear(layer):
            raise ValueError(
                f"lora.target_modules={spec.target_modules!r}: {name.removesuffix('.base_layer')} is not a linear "
                "layer. Use linear layers; in a mixture-of-experts model, those of attention."
            )
    if spec.adapter is not None:
        _read_adapter(model, spec.adapter)


@torch.no_grad()
def keep_reference(model: nn.Module, spec: LoraSpec) -> None:
    """Adds a frozen copy of the current adapter, which `as_reference` uses."""
    trained, layers = {p for p in model.parameters() if p.requires_grad}, adapter_layers(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second adapter is meant
        _inject(model, replace(spec, adapter=None, target_modules=sorted(layers)), REFERENCE)
    for layer in layers.values():
        kept, begun = lora_parts(layer, REFERENCE), lora_parts(layer)
        assert kept is not None and begun is not None
        kept.a.copy_(begun.a)
        kept.b.copy_(begun.b)
        layer.set_adapter([ADAPTER])
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained)


def _inject(model: nn.Module, spec: LoraSpec, name: str) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(f"lora: needs the package peft. Run {install_command('peft')}.") from error
    config = LoraConfig(
        r=spec.r,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=spec.target_modules,
        exclude_modules=["score"] if hasattr(model, "score") else None,  # a reward model's head is fully trained
        bias="none",
    )
    with whole_parameters():
        try:
            inject_adapter_in_model(config, model, adapter_name=name)
        except ValueError as error:
            linear = {path.rpartition(".")[2] for path, part in model.named_modules() if isinstance(part, nn.Linear)}
            raise ValueError(
                f"lora.target_modules={spec.target_modules!r}: {str(error).partition('. ')[0]}. Use some of "
                f"{', '.join(sorted(linear))}."
            ) from error


@torch.no_grad()
def _read_adapter(model: Any, folder: str) -> None:
    """Loads the tensors of a PEFT directory into the adapter; a language model's also fit its backbone."""
    from safetensors.torch import load_file

    file = Path(folder).expanduser() / "adapter_model.safetensors"
    if not file.is_file():
        raise ValueError(f"lora.adapter={folder!r}: has no {file.name}. Save it again with PEFT's save_pretrained.")
    own = {n.replace(f".{ADAPTER}.", "."): p for n, p in model.named_parameters() if ".lora_" in n}
    require_written(file.parent, f"lora.adapter={folder!r}")
    given = {name.removeprefix("base_model.model."): tensor for name, tensor in load_file(file).items()}
    if not own.keys() & given.keys():
        given = {name.removeprefix(f"{model.base_model_prefix}."): tensor for name, tensor in given.items()}
    wrong = sorted(own.keys() ^ given.keys()) or [n for n, p in own.items() if p.shape != given[n].shape]
    if wrong:
        raise ValueError(
            f"lora.adapter={folder!r}: doesn't match the model ({len(wrong)} missing, unknown, or misshapen tensors, "
            f"such as {wrong[0]}). Set `path` to the base model it was trained on."
        )
    for name, parameter in own.items():
        parameter.copy_(given[name])


def adapts_media(lm: Any) -> bool:
    """Whether the vision or audio encoder has a LoRA adapter."""
    if not placeholder_ids(lm.config):
        return False
    language = {id(module) for module in (*lm.base_model.get_decoder().modules(), lm.get_output_embeddings())}
    return any(id(layer) not in language for layer in adapter_layers(lm).values())


@contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Context manager that runs `model` as the reference: with the adapter of `keep_reference`, or without adapter.

    Raises:
        ValueError: The model has no adapter.
    """
    layers = list(adapter_layers(model).values())
    if not layers:
        raise ValueError("as_reference: the model has no LoRA adapter. Use a separate reference model.")
    trained = [[p.requires_grad for p in layer.parameters()] for layer in layers]
    for layer in layers:
        if lora_parts(layer, REFERENCE) is not None:
            layer.set_adapter([REFERENCE])
        else:
            layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, flags in zip(layers, trained, strict=True):
            layer.set_adapter([ADAPTER])
            layer.enable_adapters(True)
            for parameter, flag in zip(layer.parameters(), flags, strict=True):
                parameter.requires_grad_(flag)


@torch.no_grad()
def named_hf_weights(
    policy: Any, gather: Gather | None = None, *, trained_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters of the policy's language model under their Hugging Face names, LoRA merged, one at a time.

    `W + alpha / r * B A` is computed for one layer at a time, without changing the module. Tied parameters are yielded
    once, under their first name. A value head is excluded.

    Args:
        policy: `PolicyModel` (or any object with `lm`).
        gather: Returns a context manager around the full tensor of a sharded parameter. If it is collective, every rank
            must iterate to the end. Defaults to none, for unsharded parameters.
        trained_only: Skip frozen parameters without an adapter, which can't have changed.

    Yields:
        (name, full tensor). The tensor may be a parameter itself, and is valid until the next one is requested.
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
def named_adapter_weights(policy: Any, gather: Gather | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields a policy's adapter parameters under PEFT's names, one at a time. See `named_hf_weights` for arguments."""
    gather = gather or nullcontext
    for name, parameter in policy.lm.named_parameters():
        if ".lora_" in name and f".{ADAPTER}." in name:
            with gather(parameter) as full:
                yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", full


def _merged(layer: Any, weight: Tensor, gather: Gather, stack: ExitStack) -> Tensor:
    parts = lora_parts(layer)
    assert parts is not None
    a, b, base = (stack.enter_context(gather(x)) for x in (parts.a, parts.b, weight))
    base = dequantized(layer, base)
    delta = (b.float() @ a.float()) * parts.scaling
    return (base.float() + (delta.T if parts.transposed else delta)).to(base.dtype)

"""Private and renamed parts of transformers; tests/compat/test_transformers.py fails if they change.

Models declare their capabilities in private class attributes, which models outside transformers may lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from inspect import signature
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, rename_source_key


def attention_implementation(config: Any) -> str:
    """Returns the name of the attention function that models with this config call."""
    return str(config._attn_implementation)


def cache_argument(model: Any) -> str:
    """Returns the name of the KV cache in the model's inputs and outputs, which transformers 5.24 renamed."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def checkpoint_activations(model: Any, settings: dict[str, Any]) -> None:
    """Turns on gradient checkpointing, which transformers 5.23 renamed."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(settings)


def supports_sdpa(model: Any) -> bool:
    """Whether the model calls the registered attention function, so that it can be replaced."""
    return bool(getattr(model, "_supports_sdpa", False))


def has_recurrent_state(model: Any) -> bool:
    """Whether the model has a recurrent state, which padding would affect."""
    return bool(getattr(model, "_is_stateful", False))


def router_modules(model: Any) -> list[tuple[str, Any]]:
    """Returns (name, module) of mixture-of-experts routers: those whose logits its classes declare as outputs."""
    declared: list[tuple[Any, str | None]] = []
    for part in model.modules():
        specs = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        for spec in specs if isinstance(specs, list) else [specs]:
            declared.append((getattr(spec, "target_class", spec), getattr(spec, "layer_name", None)))
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(isinstance(module, kind) and f".{place or name}." in f".{name}." for kind, place in declared)
    ]


def as_saved(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full tensor) pairs under the names and in the shapes used by `save_pretrained`, one at a time.

    transformers 5 stores a layer's experts as two tensors, `gate_up_proj` (E, 2I, H) and `down_proj` (E, H, I), but
    saves 3E matrices. Its `revert_weight_conversion` needs all weights at once. This applies the same conversions to
    one parameter at a time, from a possibly sharded model. Only parameters that share a tensor on disk wait for each
    other, as copies. Each input and output tensor is valid until the next is requested.

    Raises:
        ValueError: Only some of the parameters that share a tensor on disk were passed. Raised at the end.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # built from a config: transformers then doesn't rename
        conversions = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        conversions = [x for x in conversions if not isinstance(x, PrefixChange)]
    backwards = [conversion.reverse_transform() for conversion in reversed(conversions)]
    converters = [x for x in backwards if isinstance(x, WeightConverter)]
    renamings = [x for x in backwards if not isinstance(x, WeightConverter)]
    converter_of = {pattern: x for x in converters for pattern in x.source_patterns}
    waiting: dict[str, Any] = {}
    for name, tensor in named_tensors:
        saved_name, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            yield saved_name, tensor
            continue
        converter = waiting.setdefault(saved_name, deepcopy(converter_of[pattern]))
        parts = converter.source_patterns
        converter.add_tensor(saved_name, name, pattern, tensor if len(parts) == 1 else tensor.clone())
        if len(converter.collected_tensors) == len(parts):
            converted = waiting.pop(saved_name).convert(saved_name, model=model, config=model.config)
            yield from ((n, x[0] if isinstance(x, list) else x) for n, x in converted.items())
    if waiting:
        raise ValueError(
            f"{', '.join(waiting)}: only some parameters of one checkpoint tensor are trained. Train or freeze all of "
            "them (with `freeze`, or LoRA's `target_modules`)."
        )


def model_class(auto_class: Any, config: Any) -> type[PreTrainedModel] | None:
    """Returns the class that an auto class such as `AutoModel` uses for a config; None if unknown."""
    mapping = auto_class._model_mapping
    known: type[PreTrainedModel] | None = mapping.get(type(config), None)
    return known

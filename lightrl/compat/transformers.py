"""Private parts of transformers 5.19 that LightRL relies on; tests/compat/test_transformers.py fails when they change.

Models declare what they can do in class attributes that begin with an underscore, which models outside of transformers
may lack.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

__all__ = [
    "attention_implementation",
    "block_class_names",
    "cached_path",
    "has_recurrent_state",
    "model_class",
    "router_modules",
    "supports_sdpa",
    "with_from_config",
]


def attention_implementation(config: Any) -> str:
    """Name of the attention function that models of this configuration call."""
    return str(config._attn_implementation)


def supports_sdpa(model: Any) -> bool:
    """Whether the model calls the registered attention function, so that it can be replaced."""
    return bool(getattr(model, "_supports_sdpa", False))


def has_recurrent_state(model: Any) -> bool:
    """Whether the model keeps a state in which padding would leave its traces."""
    return bool(getattr(model, "_is_stateful", False))


def router_modules(model: Any) -> list[tuple[str, Any]]:
    """(name, module) of the routers of a mixture of experts: those whose logits its classes declare as an output."""
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


def block_class_names(model: Any) -> set[str]:
    """Names of the classes of the model's blocks, which must not be split over devices."""
    return set(getattr(model, "_no_split_modules", None) or ())


def model_class(auto_class: Any, config: Any) -> type[PreTrainedModel] | None:
    """The class that an auto class such as `AutoModel` makes for a configuration; None if it knows none."""
    mapping = auto_class._model_mapping
    known: type[PreTrainedModel] | None = mapping.get(type(config), None)
    return known


def with_from_config(name: str, bases: tuple[type, ...]) -> Any:
    """A model class with a public `from_config`, as auto classes have, so that it can take the place of one."""
    own = {"from_config": classmethod(lambda cls, config, **kwargs: cls._from_config(config, **kwargs))}
    return type(name, bases, own)


def cached_path(path: str, name: str) -> str | None:
    """Where a file of a model folder or hub repository lies; None if it has no such file."""
    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return found

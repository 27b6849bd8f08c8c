"""Private parts of transformers 5.19 that LightRL relies on; tests/compat/test_transformers.py fails when they change.

Models declare what they can do in class attributes that begin with an underscore, which models outside of transformers
may lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import PrefixChange, WeightConverter, rename_source_key
from transformers.integrations import moe
from transformers.utils import cached_file


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


def as_saved(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters under the names and in the shapes in which `save_pretrained` writes them, one at a time.

    transformers 5 holds a layer's experts as one tensor each of `gate_up_proj` (E, 2I, H) and `down_proj` (E, H, I),
    and writes 3E matrices. Its `revert_weight_conversion` wants all weights at once; this applies the same conversions
    to one parameter at a time. Only parameters that are one tensor on disk wait for each other, as copies.

    Args:
        model: Whose parameters they are; may be sharded.
        named_tensors: (name, full tensor), each valid until the next one is requested, as are those that come out.

    Raises:
        ValueError: At the end, some but not all parameters of one tensor on disk have come.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # made from a configuration: transformers then leaves prefixes as they are
        conversions = get_model_conversion_mapping(model, add_legacy=False)
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
            f"{', '.join(waiting)}: only some parameters of one checkpoint tensor have come. Train or freeze (by "
            "`freeze`, or LoRA's `target_modules`) all of them."
        )


def block_class_names(model: Any) -> set[str]:
    """Names of the classes of the model's blocks, which must not be split over devices."""
    return set(getattr(model, "_no_split_modules", None) or ())


def model_class(auto_class: Any, config: Any) -> type[PreTrainedModel] | None:
    """The class that an auto class such as `AutoModel` makes for a configuration; None if it knows none."""
    mapping = auto_class._model_mapping
    known: type[PreTrainedModel] | None = mapping.get(type(config), None)
    return known


def with_from_config(name: str, bases: tuple[type, ...], reads_as: type[PreTrainedModel] | None = None) -> Any:
    """A model class with a public `from_config`, as auto classes have.

    Args:
        name: Of the class.
        bases: Its bases.
        reads_as: A class of the same backbone whose checkpoints it reads and whose names it writes. transformers keeps
            renamings by class name; a class that it does not know would report renamed weights as missing.
    """
    own: dict[str, Any] = {"from_config": classmethod(lambda cls, config, **kwargs: cls._from_config(config, **kwargs))}
    if reads_as is not None:
        own["__module__"] = reads_as.__module__
        conversions = get_checkpoint_conversion_mapping(reads_as.__name__)
        if conversions is not None:
            register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    return type(name, bases, own)


@contextmanager
def experts_of_any_dtype() -> Iterator[None]:
    """Context in which experts use an operation that fake tensors know for every dtype, and that keeps the same tensors
    for the backward pass."""
    usual = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *tensors: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = usual


def cached_path(path: str, name: str) -> str | None:
    """Where a file of a model folder or hub repository lies; None if it has no such file."""
    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return found

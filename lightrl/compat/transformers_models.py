"""Private parts of transformers that only sharding, exports, reward models, and memory plans need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel, conversion_mapping
from transformers.integrations import moe
from transformers.utils import cached_file


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that the transformers model inside `model` declares indivisible, as FSDP2 shards them."""
    inner: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    names = set(getattr(inner, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def with_from_config(name: str, bases: tuple[type, ...], reads_as: type[PreTrainedModel] | None = None) -> Any:
    """Creates a model class with a public `from_config`, like auto classes.

    `reads_as` is a class with the same backbone, whose checkpoint format is used. transformers stores renamings by
    class name and would report renamed weights as missing for an unknown class.
    """
    own: dict[str, Any] = {"from_config": classmethod(lambda cls, config, **kwargs: cls._from_config(config, **kwargs))}
    if reads_as is not None:
        own["__module__"] = reads_as.__module__
        conversions = conversion_mapping.get_checkpoint_conversion_mapping(reads_as.__name__)
        if conversions is not None:
            conversion_mapping.register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    return type(name, bases, own)


@contextmanager
def experts_of_any_dtype() -> Iterator[None]:
    """Context manager in which experts use an operation that supports fake tensors of every dtype, and that stores the
    same tensors for the backward pass."""
    usual = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *tensors: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = usual


def cached_path(path: str, name: str) -> str | None:
    """Returns the path of a file in a model directory or Hub repository; None if it has no such file."""
    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return found

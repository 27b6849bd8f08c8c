"""Weights that a rank reads from safetensors files part by part, so that no rank ever holds a whole model.

The model is built with its parameters on the meta device, which hold nothing, and sharded; then each rank reads the
rows that it keeps. Buffers (of rotary embeddings) are computed when the model is built, and new heads drawn, as ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from lightrl.compat.torch import persistent_buffers
from lightrl.compat.transformers import cached_path

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Place(NamedTuple):
    """Where a parameter is stored.

    Attributes:
        file: a safetensors file.
        key: its name there.
    """

    file: str
    key: str


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Parameters of modules that are made within go to the meta device one by one; buffers stay where they are."""

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta:  # one that is tied stays the same object
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def weight_places(model: PreTrainedModel) -> dict[str, Place] | None:
    """Parameter name -> where it lies in the folder or repository that the model's configuration comes from.

    A base model finds its weights in the files of one with a head, and the other way round.

    Returns:
        None where the files do not have all parameters under their names and in their shapes, as where transformers
        converts what it loads; such a model is loaded whole.
    """
    config: Any = model.config
    if persistent_buffers(model) or getattr(config, "quantization_config", None) is not None:
        return None
    index = cached_path(config.name_or_path, INDEX)
    names = [SINGLE]
    if index is not None:
        with open(index, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    found: dict[str, tuple[Place, list[int]]] = {}
    for name in names:
        path = cached_path(config.name_or_path, name)
        if path is None:
            return None
        with safe_open(path, "pt") as tensors:
            found |= {key: (Place(path, key), tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    prefix, places = f"{model.base_model_prefix}.", {}
    for name, parameter in model.named_parameters():
        key = next((key for key in (name, prefix + name, name.removeprefix(prefix)) if key in found), None)
        if key is None or found[key][1] != list(parameter.shape):
            return None
        places[name] = found[key][0]
    return places


@torch.no_grad()
def fill_shards(wrapper: nn.Module, device: torch.device) -> None:
    """Reads the parameters that are on the meta device; does nothing where none is. Every rank by itself.

    Args:
        wrapper: what holds the transformers model, sharded by `fully_shard` along the first dimension.
        device: where this rank's parts are to be.
    """
    for model in wrapper.children():
        if isinstance(model, PreTrainedModel) and any(p.is_meta for p in model.parameters()):
            places = weight_places(model)
            assert places is not None, "load_model leaves parameters on the meta device where they can be read"
            filled: dict[int, nn.Parameter] = {}
            for name, parameter in sorted(model.named_parameters(), key=lambda item: places[item[0]]):
                with safe_open(places[name].file, "pt") as tensors:
                    filled[id(parameter)] = _read(parameter, tensors.get_slice(places[name].key), device)
            named = model.named_parameters(remove_duplicate=False)
            model.load_state_dict({name: filled[id(p)] for name, p in named}, strict=False, assign=True)


def _read(parameter: Any, rows: Any, device: torch.device) -> nn.Parameter:
    """This rank's part of a sharded parameter, from a slice of a file."""
    from torch.distributed.tensor import DTensor, Shard

    mesh, local = parameter.device_mesh, parameter.to_local()
    assert list(parameter.placements) == [Shard(0)], "FSDP2 shards the first dimension"
    start = -(-parameter.shape[0] // mesh.size()) * mesh.get_local_rank()
    part: Tensor = rows[start : start + len(local)] if len(local) else torch.empty(local.shape)
    own = part.to(device, parameter.dtype, copy=True).contiguous()
    whole = DTensor.from_local(
        own, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)

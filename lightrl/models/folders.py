"""Model directories: sharded loading by each rank, and export.

To avoid loading the whole model on any rank, the model is built with parameters on the meta device and sharded. Each
rank then reads the rows that it keeps. Buffers (of rotary embeddings) and new heads are initialized as usual.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from lightrl.compat.deepspeed import skip_unused
from lightrl.compat.torch import persistent_buffers
from lightrl.compat.transformers_models import cached_path, transformer_blocks
from lightrl.distributed.sharded import keep_zero3_config, shard_model
from lightrl.models.turns import end_of_turn, placeholder_ids

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
UNUSED = re.compile("pad|reserved|unused", re.IGNORECASE)


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Context manager in which modules are built with parameters on the meta device; buffers are unaffected."""

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta:  # tied parameters stay the same object
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def without_weights(auto_class: Any, config: Any, dtype: torch.dtype) -> PreTrainedModel | None:
    """Builds the model with parameters on the meta device, if `fill_shards` can find all of them."""
    with _meta_parameters():
        model: Any = auto_class.from_config(config, dtype=dtype)
    if not all(p.is_meta for p in model.parameters()) or _weight_places(model) is None:
        return None
    if model.can_generate() and cached_path(config.name_or_path, "generation_config.json") is not None:
        model.generation_config = GenerationConfig.from_pretrained(config.name_or_path)
    return model


def _weight_places(model: PreTrainedModel) -> dict[str, tuple[str, str]] | None:
    """Maps parameter names to (safetensors file, name there). Base models also read files with a head, and vice versa.

    None if the files don't have all parameters under their names and in their shapes, for example if transformers
    converts them while loading. Such a model is loaded whole.
    """
    config: Any = model.config
    if persistent_buffers(model) or getattr(config, "quantization_config", None) is not None:
        return None
    index = cached_path(config.name_or_path, INDEX)
    names = [SINGLE] if index is None else sorted({*json.loads(Path(index).read_text())["weight_map"].values()})
    found: dict[str, tuple[tuple[str, str], list[int]]] = {}
    for name in names:
        path = cached_path(config.name_or_path, name)
        if path is None:
            return None
        with safe_open(path, "pt") as tensors:
            found |= {key: ((path, key), tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    prefix, places = f"{model.base_model_prefix}.", {}
    for name, parameter in model.named_parameters():
        key = next((key for key in (name, prefix + name, name.removeprefix(prefix)) if key in found), None)
        if key is None or found[key][1] != list(parameter.shape):
            return None
        places[name] = found[key][0]
    return places


@torch.no_grad()
def fill_shards(wrapper: nn.Module, device: torch.device) -> None:
    """Loads the parameters on the meta device, if any, to `device`. Every rank reads independently.

    `wrapper` contains the transformers model and is sharded by `fully_shard` along the first dimension.
    """
    for model in wrapper.children():
        if isinstance(model, PreTrainedModel) and any(p.is_meta for p in model.parameters()):
            places = _weight_places(model)
            assert places is not None, "load_model leaves parameters on the meta device only if they can be read"
            filled: dict[int, nn.Parameter] = {}
            for name, parameter in sorted(model.named_parameters(), key=lambda item: places[item[0]]):
                file, key = places[name]
                with safe_open(file, "pt") as tensors:
                    filled[id(parameter)] = _read(parameter, tensors.get_slice(key), device)
            named = model.named_parameters(remove_duplicate=False)
            model.load_state_dict({name: filled[id(p)] for name, p in named}, strict=False, assign=True)


def _read(parameter: Any, rows: Any, device: torch.device) -> nn.Parameter:
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


def build_in_shards(module: Any, strategy: Strategy, *, built: bool) -> None:
    """Builds the models unless `built`, and shards them. Collective."""
    _zero3_config = keep_zero3_config(strategy)
    in_shards = isinstance(strategy, ModelParallelStrategy)
    if not built:
        module.build_models(in_shards=in_shards)
    if not in_shards:
        return
    group = getattr(strategy, "context_group", None)  # ranks that share one stream of tokens; collective
    device = torch.device("cpu") if getattr(strategy, "cpu_offload", False) else strategy.root_device
    for model in module.models():
        shard_model(model, transformer_blocks(model), module)
        fill_shards(model, device)
        if group is not None and hasattr(model, "stream"):  # reward models read whole sequences on each rank
            model.stream.group = group


def save_model(model: Any, folder: str | Path, **kwargs: Any) -> None:
    """Calls `save_pretrained` on any rank, also for generation settings that transformers loads but refuses to save."""
    skip_unused()
    validate: Any = GenerationConfig.validate
    GenerationConfig.validate = lambda self, strict=False, **given: validate(self, **given)  # type: ignore[method-assign]
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        model.save_pretrained(folder, **kwargs)
    finally:
        del model.should_save_on_this_rank
        GenerationConfig.validate = validate  # type: ignore[method-assign]


def save_hf_folder(
    actor: Any,
    state: Mapping[str, Tensor],
    folder: str | Path,
    *,
    tokenizer_path: str,
    processor_path: str | None = None,
    chat_template: str | None = None,
) -> None:
    """Writes a model directory for transformers and vLLM: weights, config, tokenizer, and generation settings.

    Only the config and buffers of `actor` (`PolicyModel` or `RewardModel`) are read, so it may be sharded. `state` has
    full tensors by Hugging Face name, LoRA merged, from `named_hf_weights`. The paths are model directories or IDs;
    that of the media processor defaults to the tokenizer's. So does `chat_template`, a Jinja text.
    """
    lm = actor.lm
    buffers = {n: b.detach().cpu() for n, b in lm.named_buffers() if n in persistent_buffers(lm)}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    config = lm.config
    try:
        if isinstance(getattr(lm, "score", None), nn.Linear):
            lm.config, state = _with_padding(lm, state, tokenizer)
        save_model(lm, folder, state_dict={**state, **buffers})
    finally:
        lm.config = config
    tokenizer.save_pretrained(folder)
    if getattr(tokenizer, "eos_token_id", None) is not None:
        _stop_at(Path(folder, "generation_config.json"), end_of_turn(tokenizer))
    if placeholder_ids(lm.config):
        for name in PROCESSOR_FILES:  # copied as files, since processors may need packages that training doesn't
            file = cached_path(processor_path or tokenizer_path, name)
            if file is not None and Path(file).resolve() != Path(folder, name).resolve():
                shutil.copyfile(file, Path(folder, name))


def _with_padding(lm: Any, state: Mapping[str, Tensor], tokenizer: Any) -> tuple[Any, Mapping[str, Tensor]]:
    """Returns the config and weights of a reward model that transformers reads at the same tokens as LightRL.

    transformers reads each sequence at its last token that is not padding, detected by ID. The tokenizer therefore gets
    a pad token that ends no sequence: its own, a reserved one, or a new one. A new one may need an embedding row of 0.
    """
    ends, special = {tokenizer.eos_token_id, end_of_turn(tokenizer)}, tokenizer.added_tokens_decoder
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
        taken = ends | {*placeholder_ids(lm.config).values()}
        unused = (t.content for i, t in special.items() if t.special and i not in taken and UNUSED.search(t.content))
        tokenizer.add_special_tokens({"pad_token": next(unused, "<|pad|>")})
    config, state = deepcopy(lm.config), dict(state)
    text = config.get_text_config()
    config.pad_token_id = text.pad_token_id = tokenizer.pad_token_id
    embedding = lm.get_input_embeddings().weight
    name = next(name.replace("base_layer.", "") for name, p in lm.named_parameters() if p is embedding)
    lacking = tokenizer.pad_token_id + 1 - len(state[name])
    if lacking > 0:
        state[name] = nn.functional.pad(state[name], (0, 0, 0, lacking))
        text.vocab_size = len(state[name])
    return config, state


def _stop_at(file: Path, end: int) -> None:
    """Adds the end-of-turn token to the tokens at which an exported model stops generating."""
    if not file.is_file():
        return
    config = json.loads(file.read_text())
    eos = config.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if end not in ends:
        file.write_text(json.dumps({**config, "eos_token_id": [*ends, end]}, indent=2) + "\n")

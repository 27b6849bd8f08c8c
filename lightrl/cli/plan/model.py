"""What a model costs, from its configuration alone: parameters are counted on the meta device, activations on fake
tensors.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.compat.arguments import require_model_folder
from lightrl.compat.torch import fake_tensors, storage_key
from lightrl.compat.transformers import experts_of_any_dtype
from lightrl.data.templates import why_not_there
from lightrl.kernels.cpu import enabled
from lightrl.kernels.fusing import fuse
from lightrl.models.packing.attention import unsupported_reason
from lightrl.models.policy import transformer_blocks

_TOWERS = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector")


@dataclass(frozen=True)
class ModelSize:
    """Numbers of a model.

    Attributes:
        parameters: all of them, tied ones once.
        head: parameters of an untied output head, which a critic lacks.
        outside: parameters outside the transformer blocks; they are gathered together when a model is sharded.
        block: parameters of the largest block.
        vision: parameters of the vision tower and its projector; 0 for a model of text.
        linear: (rows, columns) of each linear layer in the blocks, for LoRA.
        layers: number of blocks, those of a vision tower left out.
        hidden: width of the residual stream.
        vocabulary: rows of the output head.
        kv_width: numbers that a token leaves in the KV cache, all layers together.
        saved_per_token: bytes that a token keeps for the backward pass in one block, without checkpointing.
        saved_weights: bytes of weights in the compute dtype that one block keeps for the backward pass; 0 without
            autocast.
        saved_outside: bytes that a token keeps outside the blocks (embedding, last norm, positions).
        packs: whether the model runs in the packed and shared-prefix layouts; else rows are padded.
    """

    parameters: int
    head: int
    outside: int
    block: int
    vision: int
    linear: tuple[tuple[int, int], ...]
    layers: int
    hidden: int
    vocabulary: int
    kv_width: int
    saved_per_token: float
    saved_weights: float
    saved_outside: float
    packs: bool = True

    def lora(self, rank: int) -> int:
        """Parameters of an adapter on all linear layers of the blocks."""
        return sum(rank * (rows + columns) for rows, columns in self.linear)


def measure_model(path: str, *, compute: torch.dtype, cpu: bool = False) -> ModelSize:
    """Reads a configuration and measures the model that it describes, without memory for its weights.

    Args:
        path: folder with a config.json, that file, or a hub name.
        compute: what matrix products run in: float32, or bfloat16 under autocast or with bfloat16 weights.
        cpu: Whether the model trains on a CPU, where LightRL's kernels keep fewer activations.

    Raises:
        ValueError: there is no such folder, and none on the hub; or its configuration is that of no policy.
    """
    path = path.removesuffix("config.json") or "."
    require_model_folder(path)
    try:
        return _measure(path, compute, cpu)
    except OSError as error:
        raise ValueError(f"model path {path!r}: {why_not_there(error)}") from error
    except Exception as error:  # whatever transformers and torch raise of numbers that make no model
        why = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(
            f"model path {path!r}: its config.json describes no model that can be planned "
            f"({type(error).__name__}: {why})"
        ) from error


def _measure(path: str, compute: torch.dtype, cpu: bool) -> ModelSize:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
    text: Any = config.get_text_config()
    family: Any = AutoModelForCausalLM if text is config else AutoModelForImageTextToText
    with torch.device("meta"):
        model: Any = family.from_config(config, dtype=torch.float32)
    towers = [module for name, module in model.named_modules() if name.split(".")[-1] in _TOWERS]
    blocks = transformer_blocks(model)
    parameters = sum(p.numel() for p in model.parameters())
    inside = [sum(p.numel() for p in block.parameters()) for block in blocks]
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    saved_per_token, saved_weights, saved_outside = _saved(text, compute, cpu)
    linear = [tuple(m.weight.shape) for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    return ModelSize(
        parameters=parameters,
        head=0 if head is embedding else head.numel(),
        outside=parameters - sum(inside),
        block=max(inside),
        vision=sum(p.numel() for tower in towers for p in tower.parameters()),
        linear=tuple((rows, columns) for rows, columns in linear),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=head.shape[0],
        kv_width=2 * text.num_hidden_layers * heads * width,
        saved_per_token=saved_per_token,
        saved_weights=saved_weights,
        saved_outside=saved_outside,
        packs=unsupported_reason(model, model.base_model) is None,
    )


def _saved(config: Any, compute: torch.dtype, cpu: bool) -> tuple[float, float, float]:
    """Bytes saved by a block per token, by a block in any case, and outside of blocks per token.

    From forwards with one and two blocks, of 16 and 32 tokens, of fake tensors: autograd saves of them what it would
    save of real ones.
    """
    one, two = ({n: _saved_bytes(config, blocks, compute, n, cpu) for n in (16, 32)} for blocks in (1, 2))
    block = {n: two[n] - one[n] for n in one}
    per_token = (block[32] - block[16]) / 16
    return per_token, max(0.0, 2.0 * block[16] - block[32]), (one[32] - one[16]) / 16 - per_token


def _saved_bytes(config: Any, layers: int, compute: torch.dtype, tokens: int, cpu: bool) -> int:
    from transformers import AutoModel

    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = (list(text.layer_types) * layers)[:layers]  # a model may have one block
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor.untyped_storage()) not in own and not isinstance(tensor, nn.Parameter):
            saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with fake_tensors(), experts_of_any_dtype():
        model: Any = AutoModel.from_config(small, dtype=torch.float32, attn_implementation="sdpa").train()
        fuse(model, cpu=cpu and enabled(None))
        own = {storage_key(p) for p in model.parameters()}
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=compute == torch.bfloat16, cache_enabled=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), autocast:
            model(input_ids=ids, use_cache=False)
    return sum(nbytes for storage, nbytes in saved.items() if storage not in own)

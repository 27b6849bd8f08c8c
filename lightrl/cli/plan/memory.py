"""Memory per GPU of each part of a run under each strategy, in bytes.

Parameters are counted on the meta device, activations on fake tensors. Gradients of all micro-batches of an update add
up on each GPU and are reduced once at its end, so each GPU holds them unsharded. For models with more than 3 billion
parameters, FSDP2, ZeRO-2, and ZeRO-3 reduce gradients after every micro-batch. Their ranks then hold shards, plus the
unsharded gradients that are being reduced.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.compat.torch import fake_tensors, storage_key
from lightrl.compat.transformers_models import experts_of_any_dtype, transformer_blocks
from lightrl.distributed.sharded import LARGE_MODEL
from lightrl.models.loading import model_config
from lightrl.models.logprobs import CHUNK_ELEMENTS, CUDA_CHUNK_ELEMENTS, KEPT_ELEMENTS
from lightrl.models.spec import ModelSpec

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
PARTS = (
    "weights", "gradients", "optimizer", "reference", "reward model", "gathered", "activations", "head",
    "optimizer step", "engine", "KV cache", "process", "heap",
)  # fmt: skip
USABLE = 0.9
"""Usable fraction of GPU memory; the CUDA context, NCCL buffers, and fragmentation take the rest."""

_PROCESS = 0.6e9  # Python, torch, transformers, and an engine's libraries, on a CPU
_TOWERS = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector")
_ZERO_BUCKET = 200_000_000  # gradients that DeepSpeed reduces at once (`reduce_bucket_size` of Lightning's strategy)


@dataclass(frozen=True)
class ModelSize:
    """Size of a model: numbers of parameters, widths, and bytes."""

    parameters: int  # tied ones count once
    head: int  # parameters of an untied output head, which a critic lacks
    outside: int  # parameters outside the transformer blocks, which are gathered together if the model is sharded
    block: int  # parameters of the largest block
    vision: int  # parameters of the vision tower and its projector
    linear: tuple[tuple[int, int], ...]  # (rows, columns) of each linear layer in the blocks
    layers: int  # blocks, excluding a vision tower's
    hidden: int  # width of the residual stream
    vocabulary: int  # rows of the output head
    kv_width: int  # KV cache entries per token in all layers
    saved_per_token: float  # bytes saved for the backward pass per token in one block, without checkpointing
    saved_weights: float  # bytes of weights in the compute dtype that one block saves for the backward pass
    saved_outside: float  # bytes saved per token outside the blocks (embedding, last norm, positions)

    def lora(self, rank: int) -> int:
        """Parameters of an adapter on all linear layers of the blocks."""
        return sum(rank * (rows + columns) for rows, columns in self.linear)


def measure_model(path: str, *, compute: torch.dtype) -> ModelSize:
    """Measures a model from a model ID, its directory, or its config.json, without allocating its weights.

    `compute` is the dtype of matrix products: float32, or bfloat16 under autocast or with bfloat16 weights.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    path = path.removesuffix("config.json") or "."
    config = model_config(ModelSpec(path, kwargs={"trust_remote_code": False}))
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
    saved_per_token, saved_weights, saved_outside = _saved(text, compute)
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
    )


def _saved(config: Any, compute: torch.dtype) -> tuple[float, float, float]:
    """Bytes saved (per token by a block, per block independent of tokens, per token outside the blocks).

    Measured in forward passes of 16 and 32 fake tokens through one and two blocks.
    """
    one, two = ({n: _saved_bytes(config, blocks, compute, n) for n in (16, 32)} for blocks in (1, 2))
    block = {n: two[n] - one[n] for n in one}
    per_token = (block[32] - block[16]) / 16
    return per_token, max(0.0, 2.0 * block[16] - block[32]), (one[32] - one[16]) / 16 - per_token


def _saved_bytes(config: Any, layers: int, compute: torch.dtype, tokens: int) -> int:
    from transformers import AutoModel

    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = (list(text.layer_types) * layers)[:layers]  # the model may have a single block
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor.untyped_storage()) not in own and not isinstance(tensor, nn.Parameter):
            saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with fake_tensors(), experts_of_any_dtype():
        model: Any = AutoModel.from_config(small, dtype=torch.float32, attn_implementation="sdpa").train()
        own = {storage_key(p) for p in model.parameters()}
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=compute == torch.bfloat16, cache_enabled=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), autocast:
            model(input_ids=ids, use_cache=False)
    return sum(nbytes for storage, nbytes in saved.items() if storage not in own)


@dataclass(frozen=True)
class Plan:
    """A run to plan. Attributes without a comment are arguments of `lightrl plan`."""

    actor: ModelSize  # the policy
    critic: bool = True  # a critic of the actor's size is trained
    reference: bool = True
    reward: ModelSize | None = None  # reward model in the run's processes
    gpus: int = 8
    precision: str = "bf16-mixed"
    lora: int = 0
    frozen_bytes: int = 2  # bytes per parameter of frozen models
    micro_batch_tokens: int = 16384
    checkpointing: bool = True  # blocks recompute their activations
    engine: bool = True  # each GPU also runs an engine
    engine_bytes: float | None = None  # its memory; None counts only weights and the KV cache of its sequences
    fused: bool = False  # of AdamW, which otherwise needs temporary tensors of the size of its parameters
    frozen_vision: bool = False  # the vision tower has no gradients and optimizer states
    sequences: int = 64
    length: int = 2048
    cpu: bool = False  # the run trains on a CPU
    engine_width: int = 2  # bytes per element of an engine's weights and KV cache
    caches: bool = True  # the engine keeps its KV cache during training, as vLLM does


def _bytes(plan: Plan, strategy: str) -> tuple[int, int, int]:
    """(weight, gradient, AdamW state) per trained parameter. DeepSpeed's state includes float32 weights."""
    if strategy.startswith("zero"):
        return (4, 4, 12) if plan.precision == "32-true" else (2, 2, 12)
    return (2, 2, 4) if plan.precision == "bf16-true" else (4, 4, 8)


def _shards(plan: Plan, strategy: str) -> tuple[int, int]:
    """Number of shards of (weights, optimizer state)."""
    if strategy in ("fsdp2", "zero3", "zero3_offload"):
        return plan.gpus, plan.gpus
    return 1, 1 if strategy == "ddp" else plan.gpus


def _gradients(plan: Plan, strategy: str) -> tuple[int, float]:
    """Number of shards of the gradients, and the number of unsharded gradients during reduction."""
    if plan.actor.parameters <= LARGE_MODEL or strategy in ("ddp", "zero1"):
        return 1, 0.0
    if plan.lora:
        return plan.gpus, 0.0
    unit = max(plan.actor.block, plan.actor.outside)
    return plan.gpus, plan.actor.block + plan.actor.outside if strategy == "fsdp2" else max(unit, _ZERO_BUCKET)


def held_parameters(plan: Plan) -> int:
    """Parameters of actor and critic, including adapters. A critic's head has a single output."""
    critic = plan.actor.parameters - plan.actor.head + plan.actor.hidden + 1
    adapters = plan.actor.lora(plan.lora) * (1 + plan.critic)
    return plan.actor.parameters + plan.critic * critic + adapters


def trained_parameters(plan: Plan) -> int:
    """Parameters that get gradients."""
    if not plan.lora:
        return held_parameters(plan) - plan.frozen_vision * plan.actor.vision * (1 + plan.critic)
    return plan.actor.lora(plan.lora) * (1 + plan.critic) + plan.critic * (plan.actor.hidden + 1)


def memory(plan: Plan, strategy: str) -> dict[str, float]:
    """Bytes per GPU of each of `PARTS` under one of `STRATEGIES`."""
    weight, gradient, state = _bytes(plan, strategy)
    weight_shards, state_shards = _shards(plan, strategy)
    held, trained = held_parameters(plan), trained_parameters(plan)
    parts = dict.fromkeys(PARTS, 0.0)
    parts["weights"] = weight * held / weight_shards
    pieces, whole = _gradients(plan, strategy)
    parts["gradients"] = gradient * trained / pieces
    parts["optimizer"] = state * trained / state_shards
    if plan.reference and not plan.lora:
        parts["reference"] = plan.frozen_bytes * plan.actor.parameters / weight_shards
    if plan.reward is not None:
        parts["reward model"] = plan.frozen_bytes * plan.reward.parameters / weight_shards
    if weight_shards > 1:
        # The current block, the prefetched block, and the parameters outside the blocks.
        parts["gathered"] = weight * (2 * plan.actor.block + plan.actor.outside)
    parts["gathered"] += gradient * whole
    parts["activations"] = activations(plan)
    parts["head"] = head(plan)
    if not plan.fused:
        parts["optimizer step"] = (2 if plan.precision == "bf16-true" and state == 4 else 4) * trained / state_shards
    if plan.engine and plan.engine_bytes is not None:
        parts["engine"] = plan.engine_bytes
    elif plan.engine:
        parts["engine"] = plan.engine_width * plan.actor.parameters
        parts["KV cache"] = plan.caches * plan.engine_width * plan.actor.kv_width * plan.sequences * plan.length
    parts["process"] = plan.cpu * _PROCESS
    parts["heap"] = heap(plan)
    if strategy.endswith("offload"):
        parts["optimizer"] = parts["optimizer step"] = 0.0
        parts["weights"] *= strategy == "zero2_offload"
    return parts


def activations(plan: Plan) -> float:
    """Bytes that a micro-batch saves for its backward pass, for actor and critic, which share one loss."""
    size, tokens = plan.actor, plan.micro_batch_tokens
    stream = 2 if plan.precision == "bf16-true" else 4  # under autocast the residual stream stays in float32
    block = size.saved_per_token * tokens + size.saved_weights
    models = 1 + plan.critic
    if plan.checkpointing:  # each block's input, and one recomputed block
        blocks = models * stream * size.hidden * size.layers * tokens + block
    else:
        blocks = models * size.layers * block
    return blocks + models * size.saved_outside * tokens


def heap(plan: Plan) -> float:
    """Bytes that glibc's heap can't reuse or return in a LoRA run on a CPU.

    Each adapted layer allocates temporaries as large as its output between small tensors that the backward pass keeps.
    The freed temporaries remain as holes: about two per layer, one with checkpointing. The numbers are fitted to
    benchmarks/results/memory.json. With the environment variable `MALLOC_MMAP_THRESHOLD_` there are none.
    """
    if not (plan.cpu and plan.lora) or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return 0.0
    width = 4 if plan.precision == "32-true" else 2
    outputs = sum(rows for rows, _ in plan.actor.linear)
    return (1 + plan.critic) * (2 - plan.checkpointing) * width * outputs * plan.micro_batch_tokens


def head(plan: Plan) -> float:
    """Maximum number of bytes for log-probs and entropies, excluding their gradients (`lightrl.models.logprobs`).

    Counts two float32 copies of a tile of logits and its gradient in the compute dtype. For the weight (V, D), counts a
    copy in the compute dtype under autocast, its gradient in that dtype, and the float32 accumulator of the gradient.
    """
    size = plan.actor
    weight = size.vocabulary * size.hidden
    if plan.cpu:  # some logits are saved for the backward pass; tied weights have two gradients
        logits = plan.micro_batch_tokens * size.vocabulary
        return 4 * (min(KEPT_ELEMENTS, logits) + 2.0 * min(CHUNK_ELEMENTS // 2, logits) + weight)
    tile = min(CUDA_CHUNK_ELEMENTS // 2, plan.micro_batch_tokens * size.vocabulary)
    if plan.precision == "32-true":
        return 2 * 4 * tile + 4.0 * weight
    return (4 + 4 + 2) * tile + (2 * (plan.precision == "bf16-mixed") + 2 + 4.0) * weight


def total(parts: dict[str, float]) -> float:
    """Peak bytes, given the parts from `memory`: the larger of a backward pass and an optimizer step."""
    backward = parts["activations"] + parts["head"] + parts["gathered"]
    return sum(parts.values()) - min(backward, parts["optimizer step"])


def host_memory(plan: Plan, strategy: str) -> float:
    """Bytes of host memory that offloading needs on all ranks together."""
    if not strategy.endswith("offload"):
        return 0.0
    weight, gradient, state = _bytes(plan, strategy)
    moved = (state + gradient) * trained_parameters(plan)
    return moved + weight * held_parameters(plan) * (strategy == "zero3_offload")


def largest_micro_batch(plan: Plan, strategy: str, limit: float) -> int | None:
    """Largest micro-batch in tokens (a power of two up to 131,072) that fits in `limit`; None if none fits."""
    tokens, largest = 1 << max(plan.length - 1, 1).bit_length(), None
    while tokens <= 1 << 17 and total(memory(replace(plan, micro_batch_tokens=tokens), strategy)) <= limit:
        largest, tokens = tokens, 2 * tokens
    return largest


def candidates(case: Plan) -> tuple[str, ...]:
    """Applicable strategies: sharding needs several processes, and offloading needs a GPU."""
    if case.gpus > 1:
        return STRATEGIES
    return ("ddp",) if case.cpu else ("ddp", "zero2_offload", "zero3_offload")


_WHY = {  # by preference
    "ddp": "every GPU holds a full replica, which is fastest (--config lightrl:strategies/ddp).",
    "fsdp2": "shards weights and optimizer states with PyTorch only (--config lightrl:strategies/fsdp2).",
    "zero2": "shards the optimizer states, not the weights (--config lightrl:strategies/deepspeed_zero2).",
    "zero1": "shards the optimizer states, not the weights (--config lightrl:strategies/deepspeed_zero1).",
    "zero3": "shards weights and optimizer states (--config lightrl:strategies/deepspeed_zero3).",
    "zero2_offload": "offloads the optimizer to host memory (--config lightrl:strategies/deepspeed_zero2_offload).",
    "zero3_offload": "offloads all states to host memory (--config lightrl:strategies/deepspeed_zero3_offload).",
}


def advice(case: Plan, limit: float) -> str:
    """Recommends a strategy that fits in `limit` bytes per GPU, or changes if none fits."""
    for name, why in _WHY.items():
        if name in candidates(case) and total(memory(case, name)) <= limit:
            tokens = largest_micro_batch(case, name, limit)
            room = "" if tokens is None else f" Micro-batches can have up to {tokens} tokens (micro_batch_tokens)."
            return f"Use {name}: {why}{room}"
    first = "MALLOC_MMAP_THRESHOLD_=1048576 in the environment" if heap(case) else "more GPUs, --engine asleep"
    return (
        f"No strategy fits. Try {first}, --lora 32, --gradient_checkpointing true, or smaller "
        "micro-batches (--micro_batch_tokens)."
    )

"""Memory per GPU, part by part, under each strategy. Bytes; N GPUs.

What is sharded follows from how LightRL runs an update: gradients of all its micro-batches add up on each GPU and are
reduced once at its end, so they are whole there. Models of more than 3 billion parameters are reduced after every
micro-batch under FSDP2 and ZeRO-2 and 3, whose ranks then hold shards, and the whole gradients of what is in reduction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightrl.cli.plan.model import ModelSize
from lightrl.cli.plan.options import Precision
from lightrl.distributed.strategies import LARGE_MODEL
from lightrl.models.logprobs import CACHE_ELEMENTS, CUDA_CHUNK_ELEMENTS, KEPT_ELEMENTS

PARTS = (
    "weights", "gradients", "optimizer", "reference", "reward model", "gathered", "activations", "head",
    "optimizer step", "engine", "KV cache", "process",
)  # fmt: skip

_PROCESS = 0.6e9  # Python, torch, transformers, and an engine's libraries, on a CPU
_ZERO_BUCKET = 200_000_000  # gradients that DeepSpeed reduces at once (`reduce_bucket_size` of Lightning's strategy)


@dataclass(frozen=True)
class Plan:
    """A case to be planned.

    Attributes:
        actor: the policy.
        critic: whether a critic of its size is trained.
        reference: whether a frozen reference model is held beside it.
        reward: the reward model in the run's processes, or None.
        gpus: N.
        precision: of the Trainer.
        lora: rank of the adapter; 0 trains the weights.
        frozen_bytes: bytes per parameter of frozen models.
        micro_batch_tokens: most tokens of a forward and backward.
        checkpointing: whether blocks recompute their activations.
        engine: whether each GPU has an engine of its own beside the trainer.
        engine_bytes: what that engine takes of the GPU, all in all (`gpu_memory_utilization` of it); None takes its
            weights and the cache of its sequences, the least that it can do with.
        fused: whether AdamW is fused; the other one makes temporaries of the size of its parameters.
        frozen_vision: whether the vision tower is frozen (`freeze: [visual]`): no gradients, no optimizer state.
        sequences: completions that one engine generates at a time.
        length: tokens of a prompt with its completion.
        cpu: Whether the run trains on a CPU.
        engine_width: Bytes per number of an engine's weights and KV cache.
        caches: Whether the engine keeps its KV cache while the trainer works, as vLLM does.
    """

    actor: ModelSize
    critic: bool = True
    reference: bool = True
    reward: ModelSize | None = None
    gpus: int = 8
    precision: Precision = "bf16-mixed"
    lora: int = 0
    frozen_bytes: int = 2
    micro_batch_tokens: int = 16384
    checkpointing: bool = True
    engine: bool = True
    engine_bytes: float | None = None
    fused: bool = False
    frozen_vision: bool = False
    sequences: int = 64
    length: int = 2048
    cpu: bool = False
    engine_width: int = 2
    caches: bool = True


def _bytes(plan: Plan, strategy: str) -> tuple[int, int, int]:
    """(weight, gradient, AdamW state) per trained parameter; in DeepSpeed's state are float32 weights too."""
    if strategy.startswith("zero"):
        return (4, 4, 12) if plan.precision == "32-true" else (2, 2, 12)
    return (2, 2, 4) if plan.precision == "bf16-true" else (4, 4, 8)


def _shards(plan: Plan, strategy: str) -> tuple[int, int]:
    """Number of pieces that (weights, optimizer state) are cut into."""
    if strategy in ("fsdp2", "zero3", "zero3_offload"):
        return plan.gpus, plan.gpus
    return 1, 1 if strategy == "ddp" else plan.gpus


def _gradients(plan: Plan, strategy: str) -> tuple[int, float]:
    """Number of pieces that gradients are cut into, and how many are whole beside them while they are reduced."""
    if plan.actor.parameters <= LARGE_MODEL or strategy in ("ddp", "zero1"):
        return 1, 0.0
    if plan.lora:
        return plan.gpus, 0.0
    unit = max(plan.actor.block, plan.actor.outside)
    return plan.gpus, plan.actor.block + plan.actor.outside if strategy == "fsdp2" else max(unit, _ZERO_BUCKET)


def held_parameters(plan: Plan) -> int:
    """Parameters of actor and critic, adapters included. A critic has one output in place of the language head."""
    critic = plan.actor.parameters - plan.actor.head + plan.actor.hidden + 1
    adapters = plan.actor.lora(plan.lora) * (1 + plan.critic)
    return plan.actor.parameters + plan.critic * critic + adapters


def trained_parameters(plan: Plan) -> int:
    """Parameters that get gradients."""
    if not plan.lora:
        return held_parameters(plan) - plan.frozen_vision * plan.actor.vision * (1 + plan.critic)
    return plan.actor.lora(plan.lora) * (1 + plan.critic) + plan.critic * (plan.actor.hidden + 1)


def memory(plan: Plan, strategy: str) -> dict[str, float]:
    """Bytes per GPU of each of `PARTS`.

    Args:
        plan: the case.
        strategy: one of `STRATEGIES`.
    """
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
        # The unit at work, the one that is fetched ahead, and what lies outside the blocks.
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
    if strategy.endswith("offload"):
        parts["optimizer"] = parts["optimizer step"] = 0.0
        parts["weights"] *= strategy == "zero2_offload"
    return parts


def activations(plan: Plan) -> float:
    """Bytes that a micro-batch keeps for its backward: of actor and critic, which share one loss."""
    size, tokens = plan.actor, plan.micro_batch_tokens
    stream = 2 if plan.precision == "bf16-true" else 4  # under autocast the residual stream stays in float32
    block = size.saved_per_token * tokens + size.saved_weights
    models = 1 + plan.critic
    if plan.checkpointing:  # each block's input, and one block that is computed again
        blocks = models * stream * size.hidden * size.layers * tokens + block
    else:
        blocks = models * size.layers * block
    return blocks + models * size.saved_outside * tokens


def head(plan: Plan) -> float:
    """Bytes that log-probs and entropies take beside their gradient, at most (`lightrl.models.logprobs`).

    A tile of logits, twice in float32, and its gradient in the dtype of the products; of the weight (V, D) a copy in
    that dtype under autocast, its gradient in that dtype, and the float32 sum of it, to which products are added.
    """
    size = plan.actor
    weight = size.vocabulary * size.hidden
    if plan.cpu:  # some logits are kept for the backward pass; the head's and the embedding's gradients of tied weights
        kept = min(KEPT_ELEMENTS, plan.micro_batch_tokens * size.vocabulary)
        return 4 * (kept + 2.0 * CACHE_ELEMENTS + weight)
    tile = min(CUDA_CHUNK_ELEMENTS // 2, plan.micro_batch_tokens * size.vocabulary)
    if plan.precision == "32-true":
        return 2 * 4 * tile + 4.0 * weight
    return (4 + 4 + 2) * tile + (2 * (plan.precision == "bf16-mixed") + 2 + 4.0) * weight


def micro_batch(layout: str, budget: int, prompts: int, group: int, prompt: int, response: int) -> int:
    """Tokens of the largest micro-batch of an update.

    Args:
        layout: "padded", "packed", or the layout that computes a group's prompt once.
        budget: `micro_batch_tokens`.
        prompts, group: Prompts in the update and completions of each.
        prompt, response: Tokens of a prompt and of a completion.
    """
    row = prompt + response
    tokens = prompts * (group * row if layout in ("padded", "packed") else prompt + group * response)
    return max(row, min(budget, tokens))


def total(parts: dict[str, float]) -> float:
    """Bytes at the worst moment: a backward pass or an optimizer step, which never come together.

    Args:
        parts: what `memory` returns.
    """
    backward = parts["activations"] + parts["head"] + parts["gathered"]
    return sum(parts.values()) - min(backward, parts["optimizer step"])


def host_memory(plan: Plan, strategy: str) -> float:
    """Bytes of the hosts' memory that offloading takes, all ranks together."""
    if not strategy.endswith("offload"):
        return 0.0
    weight, gradient, state = _bytes(plan, strategy)
    moved = (state + gradient) * trained_parameters(plan)
    return moved + weight * held_parameters(plan) * (strategy == "zero3_offload")


def largest_micro_batch(plan: Plan, strategy: str, limit: float) -> int | None:
    """The largest power of two of tokens, from a sequence's own to 131,072, with which the plan stays within `limit`.

    Returns:
        None where the shortest does not fit either.
    """
    tokens, largest = 1 << max(plan.length - 1, 1).bit_length(), None
    while tokens <= 1 << 17 and total(memory(replace(plan, micro_batch_tokens=tokens), strategy)) <= limit:
        largest, tokens = tokens, 2 * tokens
    return largest


def smallest_fit(plan: Plan, strategy: str, limit: float) -> int | None:
    """The smallest power of two of GPUs on which the plan stays within `limit` bytes each; None where no 1024 do."""
    gpus = 1
    while gpus <= 1024:
        if total(memory(replace(plan, gpus=gpus), strategy)) <= limit:
            return gpus
        gpus *= 2
    return None

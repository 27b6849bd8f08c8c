"""What a `VLLMEngine` needs to know of the machine before it starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

__all__ = [
    "chosen_gpus",
    "free_cached_memory",
    "free_port",
    "lacks_weights",
    "refuse_what_pushes_miss",
    "threads_per_engine",
]


def chosen_gpus(first: int, count: int) -> str:
    """CUDA_VISIBLE_DEVICES of an engine with `count` of the visible GPUs, from number `first` on.

    Raises:
        ValueError: there are too few.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = visible.split(",") if visible else [str(i) for i in range(first + count)]
    chosen = numbers[first : first + count]
    if len(chosen) < count:
        raise ValueError(
            f"VLLMEngine.tensor_parallel_size={count}: cuda:{first // count}'s engine needs GPUs {first} to "
            f"{first + count - 1} of the {len(numbers)} visible ones; lower it or use fewer ranks."
        )
    return ",".join(chosen)


def free_cached_memory() -> None:
    """Gives back what the trainer's allocator holds and does not use."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def threads_per_engine(num_processes: int) -> int:
    """Threads that each of so many engine processes may use: half of the cores are the trainers'."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (2 * num_processes))


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on; of all interfaces where `host` is empty."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def lacks_weights(model: str) -> bool:
    """Whether it is a folder with a configuration alone."""
    folder = Path(model)
    return folder.is_dir() and not any(file.suffix in (".safetensors", ".bin", ".pt") for file in folder.iterdir())


def refuse_what_pushes_miss(model: str, engine_args: Mapping[str, Any]) -> None:
    """Refuses an engine that would go on sampling from what it made of its first weights.

    Multi-head latent attention (DeepSeek-V2 and after) decodes with products of its projections that vLLM computes when
    it loads a model, and a push of the projections does not renew; the canary, which reads prompts, cannot see it.
    Pushes into quantised weights were never run.

    Args:
        model: folder or hub name.
        engine_args: of `VLLMEngine`.

    Raises:
        ValueError: it has either.
    """
    config, _ = PretrainedConfig.get_config_dict(model)
    text = config.get("text_config") or config
    quantised = engine_args.get("quantization") or (config.get("quantization_config") or {}).get("quant_method")
    if quantised:
        raise ValueError(
            f"VLLMEngine with {model!r} quantised by {quantised!r}: pushes of the policy's weights into quantised ones "
            "are not supported. Leave engine_args.quantization out and take a model with plain weights, or train an "
            'adapter with lora_sync="adapter".'
        )
    if text.get("kv_lora_rank") is not None and os.environ.get("VLLM_MLA_DISABLE") != "1":
        raise ValueError(
            f"VLLMEngine with {model!r}: its latent attention (kv_lora_rank={text['kv_lora_rank']}) decodes with "
            "products of weights that a push does not renew. Set the environment variable VLLM_MLA_DISABLE=1 to have "
            "vLLM attend without them."
        )

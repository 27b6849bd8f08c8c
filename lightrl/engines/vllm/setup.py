"""What a `VLLMEngine` needs to know of the machine before it starts."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from transformers import AutoConfig, PretrainedConfig

log = logging.getLogger(__name__)

_BLOCK = 128
"""Tokens in a block of vLLM's KV cache on a CPU."""
_SEQUENCES = 256
"""Sequences that vLLM runs at a time by default."""
_SHARE = 0.25
"""Share of the free memory that KV caches on a CPU may have, all ranks together."""
_BYTES = {"float32": 4, "float": 4, "auto": 4}


@dataclass(frozen=True)
class CacheSize:
    """A KV cache on a CPU.

    Attributes:
        nbytes: its size.
        max_model_len: Tokens of the longest sequence, at most what was asked for.
    """

    nbytes: int
    max_model_len: int


def cache_size(config: Any, dtype: str, length: int, sequences: int | None, *, known: bool, ranks: int) -> CacheSize:
    """Sizes the KV cache on a CPU for the sequences of a run, within a quarter of the free memory.

    Args:
        config: of the model, from transformers.
        dtype: of the cache.
        length: Tokens of the longest sequence.
        sequences: Sequences at a time; None if unknown.
        known: whether sequences of that length will come. Otherwise `length` is the model's own limit, which is
            lowered if one sequence of it does not fit.
        ranks: processes that share the memory.

    Raises:
        ValueError: one sequence needs more than the free memory.
    """
    per_block = _BLOCK * _BYTES.get(dtype, 2) * _kv_width(config)
    blocks = -(-length // _BLOCK)
    free = _free_memory() // ranks
    share = int(_SHARE * free) // per_block - 1  # vLLM keeps a block for itself
    if not known and blocks > share >= 1:
        length = share * _BLOCK
        log.warning(
            "VLLMEngine.max_model_len is %d tokens, which fit into a quarter of the free memory. The length of the "
            "prompts is unknown and the model's own limit does not fit: set max_model_len or prompts.max_prompt_tokens "
            "if sequences are longer.",
            length,
        )
        return CacheSize((share + 1) * per_block, length)
    if blocks * per_block > free:
        raise ValueError(
            f"VLLMEngine.max_model_len={length}: the KV cache of one sequence needs {blocks * per_block / 2**30:.1f} "
            f"GiB and {free / 2**30:.1f} GiB of memory are free. Lower sampling.max_new_tokens or "
            "prompts.max_prompt_tokens, or set max_model_len to the longest prompt plus completion."
        )
    wanted = blocks * min(sequences or _SEQUENCES, _SEQUENCES)
    return CacheSize((max(blocks, min(wanted, share)) + 1) * per_block, length)


def _kv_width(config: Any) -> int:
    """Numbers that a token leaves in the KV cache, all layers together; an upper bound with sliding windows."""
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width)


def _free_memory() -> int:
    """Bytes of memory that this process can still get: the host's, or those of its control group if fewer."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, KeyError):  # no limit, or another version
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))
    return max(free, 0)


def model_config(model: str) -> Any:
    """transformers' configuration; None if it cannot be read here."""
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        return None


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

"""Startup of `VLLMEngine`: arguments of `vllm.LLM`, environment variables, devices, and memory."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import psutil  # type: ignore[import-untyped]
import torch
from transformers import AutoConfig, PretrainedConfig

from lightrl.models.loading import longest_sequence, longrope_limit
from lightrl.records import EngineContext

log = logging.getLogger(__name__)

VLLMEngine: TypeAlias = Any  # avoids a circular import

_BLOCK = 32  # tokens per block of vLLM's KV cache on a CPU
_SEQUENCES = 256  # vLLM's default number of concurrent sequences
_SHARE = 0.25  # fraction of free memory for KV caches on a CPU, all ranks together
_BYTES = {"float32": 4, "float": 4, "auto": 4}
_CPU_KV_BYTES = 256 << 20  # for a model whose config transformers can't read
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def environment(engine: VLLMEngine, context: EngineContext, cuda: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Returns forced environment variables and defaults that the user's environment overrides."""
    gpu = int(context.device.partition(":")[2] or 0)
    if cuda and engine.in_process:
        # vLLM uses GPU LOCAL_RANK, so we set it to the trainer's GPU. vLLM reads the address only if no process group
        # exists yet, in single-process runs.
        forced = {"RANK": str(context.rank), "LOCAL_RANK": str(gpu), "WORLD_SIZE": str(context.world_size)}
        return forced, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if cuda:
        return {"CUDA_VISIBLE_DEVICES": _own_gpus(engine, context, gpu)}, {}
    if engine.in_process:
        return {}, {}
    # vLLM would bind every engine to core 0. One spinning thread per core would slow down trainer and engine tenfold.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // (2 * context.world_size * engine.tensor_parallel_size))
    return {}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}


def _own_gpus(engine: VLLMEngine, context: EngineContext, gpu: int) -> str:
    """Returns CUDA_VISIBLE_DEVICES for this rank's engine."""
    size, devices = engine.tensor_parallel_size, engine.devices
    if devices is None:
        numbers = list(range(gpu * size, gpu * size + size))
    else:
        numbers = devices[context.local_rank * size : (context.local_rank + 1) * size]
        if len(numbers) < size:
            raise ValueError(
                f"VLLMEngine.devices={devices}: local rank {context.local_rank} needs at least "
                f"{(context.local_rank + 1) * size} GPUs (tensor_parallel_size={size} per rank). Add GPUs, lower "
                "tensor_parallel_size, or use fewer ranks."
            )
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(i) for i in range(max(numbers) + 1)]
    if max(numbers) >= len(visible):
        raise ValueError(
            f"VLLMEngine.tensor_parallel_size={size}: the engine of cuda:{gpu} needs GPUs {min(numbers)} to "
            f"{max(numbers)}, but only {len(visible)} are visible. Lower it, or use fewer ranks."
        )
    return ",".join(visible[number] for number in numbers)


def arguments(engine: VLLMEngine, context: EngineContext, cuda: bool) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM`."""
    chosen: dict[str, Any] = {
        "model": engine.model or context.model_path,
        "dtype": engine.requested_dtype or context.dtype,
        "seed": context.seed % 2**31,
        "max_model_len": _wanted_length(engine, context),
        "tensor_parallel_size": engine.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "use_tqdm_on_load": False,
        "worker_extension_cls": "lightrl.compat.vllm_worker.WorkerExtension",
    }
    if not cuda:
        chosen["enforce_eager"] = True  # compilation takes 25-60 s and fails to save as much in a short run
        # With chunked prefill vLLM resets a seeded request's random state, which CPU generators don't support.
        chosen["enable_chunked_prefill"] = False
        # Completions of a prompt share the KV cache in whole blocks. In vLLM's blocks of 128 tokens, a prompt of 75
        # tokens is prefilled once for each of its completions, which doubles the time of a rollout of short ones.
        chosen["block_size"] = _BLOCK
        if not (engine.in_process or engine.tensor_parallel_size > 1 or "VLLM_CPU_OMP_THREADS_BIND" in os.environ):
            # Runs the worker in the engine core's process. Otherwise vLLM starts a second process and the core spins
            # while it works. vLLM overrides the short name ("uni").
            chosen["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    if engine.gpu_memory_utilization is not None:
        chosen["gpu_memory_utilization"] = engine.gpu_memory_utilization
    elif cuda:
        chosen["gpu_memory_utilization"] = 0.4 if engine.devices is None else 0.9
    elif "kv_cache_memory_bytes" not in engine.engine_args:
        chosen |= _cpu_cache(engine.engine_args, context, chosen)
    if cuda and engine.in_process:
        chosen["distributed_executor_backend"] = "external_launcher"
    if cuda and engine.sleep_level:
        chosen["enable_sleep_mode"] = True
    if context.random_init or _lacks_weights(chosen["model"]):
        chosen["load_format"] = "dummy"
    if adapter_rank(engine, context):
        fits = [rank for rank in _LORA_RANKS if rank >= context.lora_rank]
        if not fits:
            raise ValueError(
                f"lora.r={context.lora_rank}: vLLM supports adapter ranks up to {_LORA_RANKS[-1]}. Set "
                "VLLMEngine.lora_sync=merged."
            )
        chosen |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": fits[0]}
    chosen |= engine.engine_args
    if context.fire:
        if cuda and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
            raise ValueError(
                "SamplingParams.fire_temperature on a GPU: vLLM's V2 model runner does not support logits processors. "
                "Set the environment variable VLLM_USE_V2_MODEL_RUNNER=0, or remove fire_temperature."
            )
        own = engine.engine_args.get("logits_processors") or []
        chosen["logits_processors"] = ["lightrl.compat.vllm_worker:FireProcessor", *own]
    return chosen


def adapter_rank(engine: VLLMEngine, context: EngineContext) -> int:
    """Returns the rank of pushed adapters, or 0 for merged weights."""
    if not context.lora_rank or engine.lora_sync == "merged":
        return 0
    if engine.sleep_level == 2:
        raise ValueError(
            'VLLMEngine.sleep_level=2 with lora_sync="adapter": sleep drops the base weights, and adapter pushes do '
            'not restore them. Set sleep_level to 1, or lora_sync="merged".'
        )
    return context.lora_rank


def check(engine: VLLMEngine, context: EngineContext) -> None:
    """Rejects engine arguments and models that weight pushes don't support, and mismatched rotary factors.

    vLLM decodes multi-head latent attention (DeepSeek-V2 and later) with products of weights that it computes at load
    time. A push doesn't update them, and the weight-sync check, which only runs prefill, can't detect it.
    """
    model = engine.model or context.model_path
    v1_on_cpu = not context.device.startswith("cuda") and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1"
    if v1_on_cpu and engine.engine_args.get("enable_return_routed_experts"):
        raise ValueError(
            "VLLMEngine.engine_args.enable_return_routed_experts on a CPU: only vLLM's V2 model runner, the default on "
            "GPUs, supports it. Remove it, or use TransformersEngine, which records the experts."
        )
    if engine.engine_args.get("return_sampling_mask"):
        raise ValueError(
            "VLLMEngine.engine_args.return_sampling_mask: not supported, and it breaks greedy requests and the "
            "weight-sync check. Remove it. To train with top_p, top_k, or min_p, use TransformersEngine."
        )
    if adapter_rank(engine, context) == 0:
        config, _ = PretrainedConfig.get_config_dict(model)
        text = config.get("text_config") or config
        quantized = (config.get("quantization_config") or {}).get("quant_method")
        if quantized := engine.engine_args.get("quantization") or quantized:
            raise ValueError(
                f"VLLMEngine with {model!r} and quantization={quantized!r}: weight pushes into a quantized model are "
                "not supported. Remove engine_args.quantization and use an unquantized model, or train an adapter with "
                'lora_sync="adapter".'
            )
        if text.get("kv_lora_rank") is not None and os.environ.get("VLLM_MLA_DISABLE") != "1":
            raise ValueError(
                f"VLLMEngine with {model!r}: weight pushes do not update vLLM's kernels for latent attention "
                f"(kv_lora_rank={text['kv_lora_rank']}). Set the environment variable VLLM_MLA_DISABLE=1."
            )
    # vLLM chooses LongRoPE factors by `max_model_len`, by default those for short sequences.
    if (original := longrope_limit(model)) is not None:
        length = engine.engine_args.get("max_model_len", _wanted_length(engine, context)) or original
        if length > original:
            raise ValueError(
                f"VLLMEngine.max_model_len={length}: above {original} tokens, vLLM uses other LongRoPE factors. "
                "Lower it."
            )


def _wanted_length(engine: VLLMEngine, context: EngineContext) -> int | None:
    """Returns the `max_model_len` that the run needs, or None if unknown."""
    if engine.requested_model_len is not None:
        return engine.requested_model_len
    return None if context.max_prompt_tokens is None else context.max_prompt_tokens + context.max_new_tokens


def _cpu_cache(engine_args: Mapping[str, Any], context: EngineContext, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the KV cache size on a CPU: enough for the run's sequences, at most a quarter of the free memory."""
    config: Any = None
    if "hf_overrides" not in engine_args:
        with suppress(OSError, ValueError):
            config = AutoConfig.from_pretrained(chosen["model"])
    known = engine_args.get("max_model_len", chosen["max_model_len"])
    length = known if config is None else known or longest_sequence(config)
    if config is None or length is None:
        return {"kv_cache_memory_bytes": _CPU_KV_BYTES}
    dtype = str(engine_args.get("dtype", chosen["dtype"])).removeprefix("torch.")
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    block = engine_args.get("block_size") or _BLOCK
    per_block = block * _BYTES.get(dtype, 2) * 2 * text.num_hidden_layers * heads * width
    blocks, free = -(-length // block), _free_memory() // context.world_size
    share = int(_SHARE * free) // per_block - 1  # vLLM reserves a block
    if known is None and blocks > share >= 1:
        length = share * block
        log.warning(
            "VLLMEngine.max_model_len=%d: limited to a quarter of the free memory, because the prompt length is "
            "unknown. Set max_model_len or prompts.max_prompt_tokens if sequences are longer.",
            length,
        )
        return {"kv_cache_memory_bytes": (share + 1) * per_block, "max_model_len": length}
    if blocks * per_block > free:
        raise ValueError(
            f"VLLMEngine.max_model_len={length}: the KV cache of one sequence needs {blocks * per_block / 2**30:.1f} "
            f"GiB, but only {free / 2**30:.1f} GiB of memory are free. Lower sampling.max_new_tokens or "
            "prompts.max_prompt_tokens, or set max_model_len to the longest prompt plus completion."
        )
    sequences = engine_args.get("max_num_seqs", context.max_sequences) or _SEQUENCES
    held = max(blocks, min(blocks * min(sequences, _SEQUENCES), share))
    return {"kv_cache_memory_bytes": (held + 1) * per_block, "max_model_len": length}


def _free_memory() -> int:
    """Returns the free memory in bytes, limited by the process's control group."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, KeyError):  # no limit, or cgroup v1
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))
    return max(free, 0)


def free_cached_memory() -> None:
    """Frees unused memory of the trainer's CUDA allocator."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a free TCP port, on all interfaces if `host` is empty."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _lacks_weights(model: str) -> bool:
    """Whether the model is a directory without weights."""
    folder = Path(model)
    return folder.is_dir() and not any(file.suffix in (".safetensors", ".bin", ".pt") for file in folder.iterdir())

"""Conversion between LightRL and vLLM: startup arguments, environment variables, requests, and completions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import psutil  # type: ignore[import-untyped]
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from transformers import AutoConfig, PretrainedConfig

from lightrl.models.loading import longest_sequence, longrope_limit
from lightrl.records import Completion, EngineContext, GenerationRequest, SamplingParams

VLLMEngine: TypeAlias = Any  # avoids a circular import

_BLOCK = 32  # tokens per block of vLLM's KV cache on a CPU
_SEQUENCES = 256  # vLLM's default number of concurrent sequences
_SHARE = 0.25  # fraction of free memory for KV caches on a CPU, all ranks together
_BYTES = {"float32": 4, "float": 4, "auto": 4}
_WORKERS = {True: "vllm_worker.WorkerExtension", False: "vllm_process_worker.SeparateWorkerExtension"}
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def environment(engine: VLLMEngine, context: EngineContext, cuda: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Returns forced environment variables and defaults that the user's environment overrides."""
    gpu = int(context.device.partition(":")[2] or 0)
    if cuda and engine.in_process:
        # vLLM uses GPU LOCAL_RANK, so we set it to the trainer's GPU. vLLM reads the address only if no process group
        # exists yet, in single-process runs.
        forced = {"RANK": str(context.rank), "LOCAL_RANK": str(gpu), "WORLD_SIZE": str(context.world_size)}
        return forced, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    if cuda:
        return {"CUDA_VISIBLE_DEVICES": _own_gpus(engine, context, gpu)}, {}
    if engine.in_process:
        return {}, {}
    # vLLM would bind every engine to core 0. One spinning thread per core would slow down trainer and engine tenfold.
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // (2 * context.world_size * engine.tensor_parallel_size))
    return {}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}


def _own_gpus(engine: VLLMEngine, context: EngineContext, gpu: int) -> str:
    """Returns CUDA_VISIBLE_DEVICES for this rank's engine."""
    size = engine.tensor_parallel_size
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    if engine.devices is None:
        return ",".join(visible[gpu * size : gpu * size + size])
    return ",".join(visible[number] for number in engine.devices[context.local_rank * size :][:size])


def arguments(engine: VLLMEngine, context: EngineContext, cuda: bool) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM`."""
    chosen: dict[str, Any] = {
        "model": context.model_path,
        "dtype": engine.requested_dtype or context.dtype,
        "seed": context.seed % 2**31,
        "max_model_len": _wanted_length(engine, context),
        "tensor_parallel_size": engine.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "use_tqdm_on_load": False,
        "worker_extension_cls": f"lightrl.compat.{_WORKERS[engine.in_process]}",
    }
    if not cuda:
        chosen["enforce_eager"] = True  # compiling takes 25 to 60 s and saves less than that in a short run
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
    if context.random_init:
        chosen["load_format"] = "dummy"
    if adapter_rank(engine, context):
        rank = next((rank for rank in _LORA_RANKS if rank >= context.lora_rank), context.lora_rank)
        chosen |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    chosen |= engine.engine_args
    if context.fire:
        if cuda and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
            raise ValueError(
                "SamplingParams.fire_temperature on a GPU: vLLM's V2 model runner does not support logits processors. "
                "Set the environment variable VLLM_USE_V2_MODEL_RUNNER=0, or remove fire_temperature."
            )
        own = engine.engine_args.get("logits_processors") or []
        chosen["logits_processors"] = ["lightrl.compat.vllm_fire:FireProcessor", *own]
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
    """Rejects models that weight pushes don't support, and mismatched rotary factors.

    vLLM decodes multi-head latent attention (DeepSeek-V2 and later) with products of weights that it computes at load
    time. A push doesn't update them, and the weight-sync check, which only runs prefill, can't detect it.
    """
    model = context.model_path
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
                f"VLLMEngine.max_model_len={length}: above {original} tokens, vLLM uses different LongRoPE factors. "
                "Lower it."
            )


def _wanted_length(engine: VLLMEngine, context: EngineContext) -> int | None:
    """Returns the `max_model_len` that the run needs, or None if unknown."""
    if engine.requested_model_len is not None:
        return engine.requested_model_len
    return None if context.max_prompt_tokens is None else context.max_prompt_tokens + context.max_new_tokens


def _cpu_cache(engine_args: Mapping[str, Any], context: EngineContext, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the KV cache size on a CPU: enough for the run's sequences, at most a quarter of the free memory.

    A known length may use more for a single sequence. For an unknown one, vLLM chooses what fits.
    """
    config: Any = AutoConfig.from_pretrained(
        chosen["model"], trust_remote_code=engine_args.get("trust_remote_code", False)
    )
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dtype = str(engine_args.get("dtype", chosen["dtype"])).removeprefix("torch.")
    block = engine_args.get("block_size") or _BLOCK
    per_block = block * _BYTES.get(dtype, 2) * 2 * text.num_hidden_layers * heads * width
    length = engine_args.get("max_model_len", chosen["max_model_len"])
    blocks = -(-(length or longest_sequence(config) or 1) // block)
    free = _free_memory() // context.world_size
    share = int(_SHARE * free) // per_block - 1  # vLLM reserves a block
    if length is not None:
        share = max(share, min(blocks, free // per_block))
    sequences = engine_args.get("max_num_seqs", context.max_sequences) or _SEQUENCES
    held = min(blocks * min(sequences, _SEQUENCES), share)
    return {"kv_cache_memory_bytes": (held + 1) * per_block, "max_model_len": length or -1}


def _free_memory() -> int:
    """Returns the free memory in bytes, limited by the process's control group."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, KeyError):  # no limit, or cgroup v1
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))
    return max(free, 0)


# ---- requests and completions ------------------------------------------------------------------------------------

HARMLESS_EXTRA = frozenset(
    (
        *("flat_logprobs", "include_stop_str_in_output", "logprobs", "skip_reading_prefix_cache"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval"),
    )
)
"""Fields of vLLM's `SamplingParams` that change neither the sampling distribution nor the outputs LightRL uses."""


def completion_seed(prompt_seed: int, completion: int, begun: int = 0) -> int:
    """Returns the 63-bit hash of (prompt seed, index in the group) as the seed of a completion.

    vLLM's `n=G` uses seed, seed + 1, ..., so prompts with adjacent seeds would share random numbers. A completion that
    resumes after `begun` tokens gets a different seed, because its generator restarts.
    """
    name = f"{prompt_seed}:{completion}:{begun}" if begun else f"{prompt_seed}:{completion}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_params(sampling: SamplingParams) -> Any:
    """Converts sampling settings to vLLM's, without a seed."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structured = None
    if sampling.regex is not None:
        structured = StructuredOutputsParams(regex=sampling.regex)
    elif sampling.json_schema is not None:
        structured = StructuredOutputsParams(json=sampling.json_schema)
    extra = dict(sampling.extra or {})
    if isinstance(extra.get("structured_outputs"), dict):
        extra["structured_outputs"] = StructuredOutputsParams(**extra["structured_outputs"])
    fire = None if sampling.fire_temperature is None else {"fire_temperature": sampling.fire_temperature}
    arguments: dict[str, Any] = {
        **plain_sampling(sampling),
        "structured_outputs": structured,
        "extra_args": fire,
        "logprobs": 0,  # only the sampled token's
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return VLLMSamplingParams(**(arguments | extra))


def plain_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Returns the settings shared by vLLM's sampling parameters and server requests, under vLLM's names."""
    return {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": sampling.stop or [],
        "stop_token_ids": sampling.stop_token_ids or [],
        "ignore_eos": sampling.ignore_eos,
        "include_stop_str_in_output": True,
    }


def scoring_params() -> Any:
    """Returns parameters for the prompt's log-probs at temperature 1. vLLM must generate at least one token."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def engine_prompt(request: GenerationRequest, place: int) -> dict[str, Any]:
    """Converts a prompt and the partial completion at `place` to vLLM's format."""
    begun = request.so_far(place).token_ids
    if not request.media:
        return {"prompt_token_ids": request.token_ids + begun}
    from lightrl.engines.vllm.special_requests import media_prompt

    return media_prompt(request.media, begun)


def completion(output: Any, request: GenerationRequest, place: int) -> Completion:
    """Converts vLLM's `CompletionOutput`, without earlier tokens. Unfinished completions are "suspended"."""
    begun = len(request.so_far(place).token_ids)
    most = request.sampling.max_new_tokens
    tokens = [int(token) for token in output.token_ids]
    flat = getattr(output.logprobs, "logprobs", None)
    if flat is not None and len(flat) == len(tokens):
        logprobs = [float(value) for value in flat]
        top = []
    else:  # several per token, requested by `extra`
        top = [{int(word): float(found.logprob) for word, found in entry.items()} for entry in output.logprobs]
        logprobs = [entry[token] for token, entry in zip(tokens, top, strict=True)]
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"vLLM ended a completion of {request.name} with finish_reason={output.finish_reason!r}.")
    if output.finish_reason == "length" and begun + len(tokens) < most:
        raise ValueError(
            f"max_new_tokens={most}: vLLM cut a completion of {request.name} after {len(tokens)} tokens, because the "
            "prompt, expanded by images, exceeds max_model_len. Raise VLLMEngine.max_model_len, or lower "
            "max_new_tokens."
        )
    routes = None
    if (taken := getattr(output, "routed_experts", None)) is not None:
        from lightrl.records import Routes

        routes = Routes(torch.from_numpy(taken.astype("uint8" if taken.max() < 256 else "int16")))
    ended = output.finish_reason != "abort" and (output.finish_reason == "stop" or begun + len(tokens) == most)
    reason: Any = output.finish_reason if ended else "suspended"
    return Completion(tokens, logprobs, output.text, reason, routes=routes, top=top)

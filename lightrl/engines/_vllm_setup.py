"""What a `VLLMEngine` is started with: environment variables, and the arguments of `vllm.LLM`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.engines._vllm_lora import lora_arguments
from lightrl.engines.base import EngineContext

if TYPE_CHECKING:
    from lightrl.engines.vllm import VLLMEngine

__all__ = ["adapter_rank", "engine_arguments", "engine_environment", "free_port"]

_CPU_KV_BYTES = 256 << 20


def engine_environment(
    engine: VLLMEngine, context: EngineContext, *, cuda: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Environment variables that must hold while the engine starts, and those that yield to the user's."""
    forced: dict[str, str] = {}
    defaults: dict[str, str] = {}
    if cuda and engine.in_process:
        forced |= {"RANK": str(context.rank), "LOCAL_RANK": str(context.local_rank)}
        forced["WORLD_SIZE"] = str(context.world_size)
        # Only read where no process group exists yet, that is by a run of one process.
        defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    elif cuda:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        first = int(context.device.partition(":")[2] or 0) * engine.tensor_parallel_size
        numbers = visible.split(",") if visible else [str(i) for i in range(first + engine.tensor_parallel_size)]
        chosen = numbers[first : first + engine.tensor_parallel_size]
        if len(chosen) < engine.tensor_parallel_size:
            raise ValueError(
                f"VLLMEngine.tensor_parallel_size={engine.tensor_parallel_size}: {context.device}'s engine needs "
                f"GPUs {first} to {first + engine.tensor_parallel_size - 1} of the {len(numbers)} visible ones; "
                "lower it or use fewer ranks."
            )
        forced["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    elif not engine.in_process:
        # vLLM would bind every engine to core 0, and with as many spinning threads as cores trainer and engine
        # slow one another down tenfold.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, cores // (2 * context.world_size * engine.tensor_parallel_size))
        defaults = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    return forced, defaults


def engine_arguments(engine: VLLMEngine, context: EngineContext, *, cuda: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    length = engine.requested_model_len
    if length is None and context.max_prompt_tokens is not None:
        length = context.max_prompt_tokens + context.max_new_tokens
    arguments: dict[str, Any] = {
        "model": engine.model or context.model_path,
        "dtype": engine.requested_dtype or context.dtype,
        "seed": context.seed % 2**31,
        "max_model_len": length,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "use_tqdm_on_load": False,
        "worker_extension_cls": "lightrl.engines._vllm_worker.WorkerExtension",
    }
    if not cuda:
        arguments["enforce_eager"] = True  # compiling takes 25 s here and gains nothing
        # After half a prompt vLLM takes a seeded request's random state back, which CPU generators refuse.
        arguments["enable_chunked_prefill"] = False
        if not engine.in_process and engine.tensor_parallel_size == 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            # The core is its own worker. vLLM would start a second process, to bind its threads to cores, and the
            # core would spin on a core of its own while that one works. Its name alone ("uni") is overruled.
            arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    if engine.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = engine.gpu_memory_utilization
    elif cuda:
        arguments["gpu_memory_utilization"] = 0.4 if engine.in_process else 0.9
    else:
        arguments["kv_cache_memory_bytes"] = _CPU_KV_BYTES
    if cuda and engine.in_process:
        arguments["distributed_executor_backend"] = "external_launcher"
    if cuda and engine.sleep_level:
        arguments["enable_sleep_mode"] = True
    if context.random_init or _lacks_weights(arguments["model"]):
        arguments["load_format"] = "dummy"
    if adapter_rank(engine, context):
        arguments |= lora_arguments(context.lora_rank)
    if engine.fire_temperature is not None:
        arguments["logits_processors"] = ["lightrl.engines._vllm_worker:FireProcessor"]
    return arguments | engine.engine_args


def adapter_rank(engine: VLLMEngine, context: EngineContext) -> int:
    """Rank of the adapters that this engine will be given; 0 where merged weights are pushed."""
    if not context.lora_rank or engine.lora_sync == "merged":
        return 0
    if engine.sleep_level == 2:
        raise ValueError(
            'VLLMEngine.sleep_level=2 with lora_sync="adapter": sleep would drop the base weights, which an '
            'adapter does not bring back. Set sleep_level to 1, or lora_sync="merged".'
        )
    return context.lora_rank


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on; of all interfaces where `host` is empty."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _lacks_weights(model: str) -> bool:
    folder = Path(model)
    return folder.is_dir() and not any(file.suffix in (".safetensors", ".bin", ".pt") for file in folder.iterdir())

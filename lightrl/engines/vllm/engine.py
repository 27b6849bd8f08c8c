"""`VLLMEngine`: vLLM embedded in the run, in the trainer's process or beside it.

What touches vLLM's internals is in `lightrl.compat.vllm` (trainer's side) and `vllm_worker` (workers' side); `weights`
is the transport between them, `requests` translates requests and answers. vLLM is imported by `start`, not before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lightrl.compat.arguments import above, at_least, fraction, one_of
from lightrl.engines.base import EngineDiedError, EngineRestartedError, ExtraKeys, SteppingEngine
from lightrl.engines.vllm.lora import AdapterFolder, lora_arguments
from lightrl.engines.vllm.requests import (
    EVALUATION_EXTRA,
    HARMLESS_EXTRA,
    OWN_EXTRA,
    check_lengths,
    check_prompt,
    completion,
    completion_seed,
    engine_prompt,
    joined,
    remaining,
    sampling_params,
    scoring_params,
)
from lightrl.engines.vllm.setup import (
    cache_size,
    chosen_gpus,
    free_cached_memory,
    free_port,
    lacks_weights,
    model_config,
    refuse_what_pushes_miss,
    threads_per_engine,
)
from lightrl.models.loading import longest_sequence
from lightrl.records import Completion, CompletionGroup, EngineContext, GenerationRequest, Routes, SamplingParams

if TYPE_CHECKING:
    from lightrl.compat.vllm import VLLMAdapter
    from lightrl.engines.vllm.weights import WeightSender

log = logging.getLogger(__name__)

_CPU_KV_BYTES = 256 << 20
"""KV cache on a CPU for a model whose configuration transformers cannot read."""
DTYPES = ("float32", "bfloat16", "float16", "auto", "half", "float")


def _gpu_number(context: EngineContext) -> int:
    """Number of the trainer's GPU among the visible ones."""
    return int(context.device.partition(":")[2] or 0)


def _refuse_fire_on_v2() -> None:
    """vLLM's second model runner, which it takes on GPUs, refuses logits processors, and so FIRE.

    Raises:
        ValueError: the user did not choose the first one.
    """
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        raise ValueError(
            "SamplingParams.fire_temperature on a GPU: vLLM's second model runner takes no logits processors. Set the "
            "environment variable VLLM_USE_V2_MODEL_RUNNER=0 to have the first one, or leave fire_temperature out."
        )


class _Group:
    """A request under way: the completions that are done, and of the others what is known so far."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.so_far = {place: request.so_far(place) for place in range(request.num_completions)}
        self.done = {place: part for place, part in self.so_far.items() if part.finish_reason != "suspended"}

    def answer(self) -> CompletionGroup:
        parts = list((self.so_far | self.done).values())
        return CompletionGroup(self.request, parts, min((v for c in parts for v in c.policy_versions), default=-1))


class VLLMEngine(SteppingEngine):
    """Samples with an embedded `vllm.LLM`.

    Side effects of vLLM on its host process are undone: random states, environment variables, `torch.set_num_threads`,
    and the default process group survives `close`. What stays on CPU: vLLM's placeholders for some `torch.cuda`
    functions that do nothing without CUDA anyway. Log-probs are those of the distribution that was sampled from:
    temperature, penalties, FIRE, min-p, top-k and top-p are in them.

    Speed of a sync on CPU: vLLM's packing of linear weights is switched off, so new weights arrive at the speed of
    memcpy, for 10-15 % slower matrix products at 64 sequences (up to 2 x at 8 and fewer).

    Args:
        model: folder or hub name; the run's model where None.
        dtype: "float32", "bfloat16" or "float16" for weights and KV cache; the trainer's where None. vLLM's "auto",
            which serves float32 models in bfloat16, is only taken where it is asked for.
        in_process: the engine lives in the trainer's process: fastest start and sync. False: in processes of its own,
            which can generate while the trainer updates and whose death the trainer survives.
        max_model_len: Maximum number of tokens of prompt and completion together. Defaults to what the run's longest
            prompt and completion need, or to the model's own limit if the length of the prompts is unknown (streams,
            media, turns without a limit). On a CPU that limit is lowered to what fits into a quarter of the free
            memory.
        gpu_memory_utilization: Fraction of the device's memory for weights and KV cache, in (0, 1]. Defaults to 0.4 on
            a GPU that a trainer also uses and 0.9 on separate GPUs (`devices`). On a CPU the KV cache instead holds
            the run's sequences, in at most a quarter of the free memory; `engine_args.kv_cache_memory_bytes` sets it.
        tensor_parallel_size: number of devices the model is split over; more than 1 needs `in_process=False`.
        devices: numbers of the visible GPUs on which this machine's engines run, `tensor_parallel_size` for each rank
            in the order of the ranks; needs `in_process=False`. None: rank r's engine starts at its trainer's GPU.
        restart_engine: an engine that died is started again before the error is raised; the error is then
            `EngineRestartedError` and `policy_version` is -1, so a caller syncs and asks again.
        sleep_level: what `sleep` frees on a GPU: 0 nothing, 1 KV cache, with weights moved to the host, 2 KV cache and
            weights, which must be pushed again. On CPU memory stays, but the caches are dropped and level 2 still asks
            for a new push, so that a run behaves alike on both.
        lora_sync: of a policy with a LoRA adapter. "adapter": the engine keeps the base weights of the model's folder,
            and a push brings the adapter alone. "merged": a push brings all weights, the adapter merged; sampling is
            then as fast as without one. Quantised bases (QLoRA) are always merged.
        progress_timeout: seconds for which the trainer waits for any sign of life from the engine (one step of it, one
            part of a weight push). Engine processes then count as lost, are ended, and `EngineDiedError` is raised.
            None waits without a limit. An engine in the trainer's process has no limit
            (`RolloutDataModule.stall_timeout` logs what is waited for). vLLM bounds the start of engine processes by
            `VLLM_ENGINE_READY_TIMEOUT_S`, 600 seconds.
        engine_args: any further arguments of `vllm.LLM`, passed on untouched; they win over all of the above.

    Raises:
        ValueError: arguments that contradict each other.

    Source: https://docs.vllm.ai (0.32).
    """

    def __init__(
        self,
        model: str | None = None,
        dtype: str | None = None,
        in_process: bool = True,
        max_model_len: int | None = None,
        gpu_memory_utilization: float | None = None,
        tensor_parallel_size: int = 1,
        devices: list[int] | None = None,
        restart_engine: bool = False,
        sleep_level: Literal[0, 1, 2] = 0,
        lora_sync: Literal["adapter", "merged"] = "adapter",
        progress_timeout: float | None = 300.0,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        if tensor_parallel_size > 1 and in_process:
            raise ValueError(
                f"VLLMEngine.tensor_parallel_size={tensor_parallel_size} needs engine processes of its own: "
                "set in_process=False."
            )
        if devices is not None and in_process:
            raise ValueError(
                f"VLLMEngine.devices={devices}: an engine in the trainer's process runs on the trainer's GPU. Set "
                "in_process=False, or leave devices out."
            )
        if devices is not None and (not devices or len({*devices}) < len(devices) or min(devices) < 0):
            raise ValueError(f"VLLMEngine.devices={devices}: must be different numbers of GPUs, from 0 on.")
        if restart_engine and in_process:
            raise ValueError(
                "VLLMEngine.restart_engine=True: an engine in the trainer's process cannot die alone; "
                "set in_process=False or leave restart_engine off."
            )
        if "worker_extension_cls" in (engine_args or {}):
            raise ValueError("VLLMEngine.engine_args: leave out worker_extension_cls, LightRL pushes weights by it.")
        super().__init__()
        self.model = model
        self.requested_dtype = None if dtype is None else one_of("VLLMEngine.dtype", dtype, *DTYPES)
        self.in_process = in_process
        shortest = "VLLMEngine.max_model_len", max_model_len, 3  # what the canary of the weights asks for
        self.requested_model_len = at_least(*shortest, or_none="for what the run needs")
        share = "VLLMEngine.gpu_memory_utilization", gpu_memory_utilization, "(0, 1]"
        self.gpu_memory_utilization = fraction(*share, or_none="for what the device suggests")
        self.tensor_parallel_size = at_least("VLLMEngine.tensor_parallel_size", tensor_parallel_size, 1)
        self.devices = devices
        self.restart_engine = restart_engine
        self.sleep_level = sleep_level
        self.lora_sync = lora_sync
        self.progress_timeout = above("VLLMEngine.progress_timeout", progress_timeout, or_none="for no limit")
        self.engine_args = dict(engine_args or {})
        self._context: EngineContext | None = None
        self._adapter: VLLMAdapter | None = None
        self._sender: WeightSender | None = None
        self._adapter_folder: AdapterFolder | None = None
        self._finished: dict[str, Any] = {}
        self._switches: dict[str, list[tuple[int, int]]] = {}  # of each request, (tokens before, version from there)
        self._groups: dict[GenerationRequest, _Group] = {}
        self._places: dict[str, tuple[_Group, int]] = {}  # of each of vLLM's requests, its completion
        self._num_requests = 0
        self._asleep: Literal[0, 1, 2] = 0
        self._cache_asleep = False

    # -- life ------------------------------------------------------------------------------------------------------

    def check(self, context: EngineContext) -> None:
        """See `Engine.check`: what pushes do not reach (quantised weights, latent attention), and what is not read."""
        cpu = not context.device.startswith("cuda") and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1"
        if cpu and self.engine_args.get("enable_return_routed_experts"):
            raise ValueError(
                "VLLMEngine.engine_args.enable_return_routed_experts on a CPU: vLLM returns the experts of tokens from "
                "its second model runner alone, which it takes on GPUs. Leave it out, or take TransformersEngine, "
                "which records them anywhere."
            )
        if self.engine_args.get("return_sampling_mask"):
            raise ValueError(
                "VLLMEngine.engine_args.return_sampling_mask: what vLLM returns there is not read, and with it vLLM "
                "answers neither greedy requests nor the canary's. Leave it out; TransformersEngine records what "
                "top_p, top_k and min_p leave."
            )
        if self._adapter_rank(context) == 0:
            refuse_what_pushes_miss(self.model or context.model_path, self.engine_args)
        self._refuse_other_rope(context)

    def _wanted_length(self, context: EngineContext) -> int | None:
        """The `max_model_len` that the run needs; None if it doesn't know."""
        if self.requested_model_len is not None:
            return self.requested_model_len
        length = None if context.max_prompt_tokens is None else context.max_prompt_tokens + context.max_new_tokens
        original = self._longrope_limit(context) if context.long_rope else None
        return length if original is None else max(length or 0, original + 1)

    def _longrope_limit(self, context: EngineContext) -> int | None:
        from lightrl.models.loading import longrope_limit

        return longrope_limit(self.model or context.model_path)

    def _refuse_other_rope(self, context: EngineContext) -> None:
        """vLLM picks LongRoPE's factors by `max_model_len`; by default, those for short sequences."""
        if (original := self._longrope_limit(context)) is None:
            return
        length = self.engine_args.get("max_model_len", self._wanted_length(context)) or original
        if (length > original) != context.long_rope:
            raise ValueError(
                f"VLLMEngine.max_model_len={length} with actor.long_rope={context.long_rope}: above {original} tokens "
                "vLLM uses LongRoPE's factors for long sequences, and the trainer would use others. "
                f"{'Raise max_model_len above it' if context.long_rope else 'Set actor.long_rope: true, or lower it'}."
            )

    def known_model_len(self, model_path: str) -> int | None:
        if self.requested_model_len is not None or "hf_overrides" in self.engine_args:
            return self.requested_model_len
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.model or model_path)
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        return longest_sequence(config) if rope.get("rope_type") == "default" else None  # vLLM stretches scaled ones

    def start(self, context: EngineContext) -> None:
        if self._adapter is not None:
            return
        from lightrl.compat.vllm import VLLMAdapter
        from lightrl.engines.vllm.weights import WeightSender

        self._context = context
        cuda = context.device.startswith("cuda")
        forced, defaults = self.environment(context, cuda=cuda)
        arguments = self.arguments(context, cuda=cuda)
        self.dtype = str(arguments["dtype"]).removeprefix("torch.")
        try:
            self._adapter = VLLMAdapter(
                arguments,
                in_process=self.in_process,
                forced=forced,
                defaults=defaults,
                progress_timeout=self.progress_timeout,
            )
        except (ValueError, TypeError) as error:
            said = " ".join(str(error).split())
            if "KV cache" in said:
                raise ValueError(
                    f"VLLMEngine.max_model_len={arguments.get('max_model_len')}: the KV cache has no room for a "
                    "sequence of that length. Set max_model_len to the longest prompt plus completion, or raise "
                    f"gpu_memory_utilization or engine_args.kv_cache_memory_bytes. vLLM reports: {said[:600]}"
                ) from error
            if "max_model_len" not in said:
                if not self.engine_args:
                    raise
                raise ValueError(
                    f"VLLMEngine.engine_args ({', '.join(self.engine_args)}): vLLM says: {said[:600]}"
                ) from error
            raise ValueError(
                f"The model cannot hold max_model_len={arguments.get('max_model_len')} tokens (longest prompt "
                f"{context.max_prompt_tokens} and max_new_tokens={context.max_new_tokens}): lower max_new_tokens or "
                f"the prompts' length. vLLM says: {error}"
            ) from error
        self._finished, self._switches, self._groups, self._places = {}, {}, {}, {}
        self._asleep = 0
        self._cache_asleep = False
        self._heats = context.fire
        self.policy_version = -1
        self.device = context.device if self.in_process else "cpu"
        self.pushes = "adapter" if self._adapter_rank(context) else "checkpoint"
        try:
            self._sender = WeightSender(self._adapter)
        except BaseException:
            self.close()
            raise
        self.takes_parts = self._sender.takes_parts  # else vLLM rearranged weights, and reads the model as a whole

    def environment(self, context: EngineContext, *, cuda: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Environment variables that must hold while the engine starts, and those that yield to the user's."""
        if cuda and self.in_process:
            # vLLM takes the GPU of that number: the trainer's own, whatever its rank.
            forced = {"RANK": str(context.rank), "LOCAL_RANK": str(_gpu_number(context))}
            forced["WORLD_SIZE"] = str(context.world_size)
            # Only read where no process group exists yet, that is by a run of one process.
            return forced, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if cuda:
            return {"CUDA_VISIBLE_DEVICES": self._own_gpus(context)}, {}
        if self.in_process:
            return {}, {}
        # vLLM would bind every engine to core 0, and with as many spinning threads as cores trainer and engine slow
        # one another down tenfold.
        threads = threads_per_engine(context.world_size * self.tensor_parallel_size)
        return {}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}

    def arguments(self, context: EngineContext, *, cuda: bool) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": self.model or context.model_path,
            "dtype": self.requested_dtype or context.dtype,
            "seed": context.seed % 2**31,
            "max_model_len": self._wanted_length(context),
            "tensor_parallel_size": self.tensor_parallel_size,
            "logprobs_mode": "processed_logprobs",
            "use_tqdm_on_load": False,
            "worker_extension_cls": "lightrl.compat.vllm_worker.WorkerExtension",
        }
        if not cuda:
            arguments["enforce_eager"] = True  # compiling takes 25 s here and gains nothing
            # After half a prompt vLLM takes a seeded request's random state back, which CPU generators refuse.
            arguments["enable_chunked_prefill"] = False
            own_binding = "VLLM_CPU_OMP_THREADS_BIND" in os.environ
            if not self.in_process and self.tensor_parallel_size == 1 and not own_binding:
                # The core is its own worker. vLLM would start a second process, to bind its threads to cores, and the
                # core would spin on a core of its own while that one works. Its name alone ("uni") is overruled.
                arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        if self.gpu_memory_utilization is not None:
            arguments["gpu_memory_utilization"] = self.gpu_memory_utilization
        elif cuda:
            arguments["gpu_memory_utilization"] = 0.4 if self.devices is None else 0.9
        elif "kv_cache_memory_bytes" not in self.engine_args:
            arguments |= self._cpu_cache(context, arguments)
        if cuda and self.in_process:
            arguments["distributed_executor_backend"] = "external_launcher"
        if cuda and self.sleep_level:
            arguments["enable_sleep_mode"] = True
        if context.random_init or lacks_weights(arguments["model"]):
            arguments["load_format"] = "dummy"
        if self._adapter_rank(context):
            arguments |= lora_arguments(context.lora_rank)
        arguments |= self.engine_args
        if context.fire:
            if cuda:
                _refuse_fire_on_v2()
            own = self.engine_args.get("logits_processors") or []
            arguments["logits_processors"] = ["lightrl.compat.vllm_worker:FireProcessor", *own]
        return arguments

    def _cpu_cache(self, context: EngineContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The KV cache on a CPU, and the longest sequence if the run does not know it."""
        config = None if "hf_overrides" in self.engine_args else model_config(arguments["model"])
        length = self.engine_args.get("max_model_len", arguments["max_model_len"])
        longest = length if config is None else length or longest_sequence(config)
        if config is None or longest is None:
            return {"kv_cache_memory_bytes": _CPU_KV_BYTES}
        size = cache_size(
            config,
            str(self.engine_args.get("dtype", arguments["dtype"])).removeprefix("torch."),
            longest,
            self.engine_args.get("max_num_seqs", context.max_sequences),
            known=length is not None,
            ranks=context.world_size,
        )
        return {"kv_cache_memory_bytes": size.nbytes, "max_model_len": size.max_model_len}

    def _own_gpus(self, context: EngineContext) -> str:
        """CUDA_VISIBLE_DEVICES of this rank's engine."""
        size = self.tensor_parallel_size
        if self.devices is None:
            return chosen_gpus(_gpu_number(context) * size, size)
        own = self.devices[context.local_rank * size : (context.local_rank + 1) * size]
        if len(own) < size:
            raise ValueError(
                f"VLLMEngine.devices={self.devices}: rank {context.local_rank} of this machine needs "
                f"{(context.local_rank + 1) * size} of them (tensor_parallel_size={size} for each rank): add GPUs, "
                "lower tensor_parallel_size or use fewer ranks."
            )
        return ",".join(chosen_gpus(number, 1) for number in own)

    def _adapter_rank(self, context: EngineContext) -> int:
        """Rank of the adapters that this engine will be given; 0 where merged weights are pushed."""
        if not context.lora_rank or self.lora_sync == "merged":
            return 0
        if self.sleep_level == 2:
            raise ValueError(
                'VLLMEngine.sleep_level=2 with lora_sync="adapter": sleep would drop the base weights, which an '
                'adapter does not bring back. Set sleep_level to 1, or lora_sync="merged".'
            )
        return context.lora_rank

    @property
    def started(self) -> bool:
        return self._adapter is not None

    @property
    def max_model_len(self) -> int:
        return self._started().max_model_len

    @property
    def process_ids(self) -> list[int]:
        """Engine core and workers; empty for an engine in the trainer's process."""
        return list(self._started().pids)

    def close(self) -> None:
        stuck = not self.end_driver()
        if stuck and self.in_process:
            log.warning("VLLMEngine hangs in a step and is left behind.")
            self._adapter = self._sender = None
        self._release(dead=stuck)

    def _release(self, *, dead: bool) -> None:
        adapter, self._adapter, self._sender = self._adapter, None, None
        folder, self._adapter_folder = self._adapter_folder, None
        self.policy_version, self._finished, self._groups, self._places = -1, {}, {}, {}
        try:
            if adapter is not None:
                adapter.close(dead=dead)
        finally:
            if folder is not None:
                folder.remove()

    def _started(self) -> VLLMAdapter:
        if self._adapter is None:
            if self._lost is not None:
                raise self._lost
            raise RuntimeError("VLLMEngine is not started: call start(context) first.")
        return self._adapter

    @contextmanager
    def _serving(self) -> Iterator[VLLMAdapter]:
        """The adapter, for one call at a time; ends a lost engine, and restarts it with `restart_engine`."""
        from lightrl.compat.vllm import LostEngineError

        with self.lock:
            try:
                yield self._started()
            except LostEngineError as error:
                self._release(dead=True)
                died = EngineDiedError(str(error))
                if self.restart_engine:
                    assert self._context is not None
                    self.start(self._context)
                    died = EngineRestartedError(
                        "A vLLM engine process was lost and started again, without the policy's weights: push them and "
                        f"repeat the rollout. {error}"
                    )
                self.lose(died)
                raise died from error

    # -- sampling --------------------------------------------------------------------------------------------------

    extra = ExtraKeys(HARMLESS_EXTRA, EVALUATION_EXTRA, OWN_EXTRA)

    def check_overlap(self, *, in_flight: bool) -> None:
        if self.in_process:
            super().check_overlap(in_flight=in_flight)
        if self.sleep_level:
            raise ValueError(
                f"engine=VLLMEngine.sleep_level={self.sleep_level}: an engine that samples while the trainer computes "
                "never sleeps. Set it to 0."
            )

    def check_sampling(self, sampling: SamplingParams, name: str = "sampling", *, trained: bool) -> None:
        super().check_sampling(sampling, name, trained=trained)
        if 0 < sampling.temperature < 0.01:
            raise ValueError(
                f"{name}.temperature={sampling.temperature}: vLLM serves 0 (greedy) and 0.01 or more. Raise it."
            )
        for argument in ("logits_processors", "logprobs_mode", "watermark_config"):
            if trained and self.engine_args.get(argument):
                raise ValueError(
                    f"VLLMEngine.engine_args.{argument}={self.engine_args[argument]!r}: the trainer would score "
                    "another distribution than tokens are drawn from. Remove it."
                )

    def check_request(self, request: GenerationRequest) -> None:
        sampling, limit = request.sampling, self.max_model_len
        self.check_sampling(sampling, "SamplingParams", trained=False)
        if sampling.fire_temperature is not None and not self._heats:
            raise ValueError(
                f"SamplingParams.fire_temperature={sampling.fire_temperature}: this engine was started without it, "
                "start it with EngineContext(fire=True), which a run does whose own settings have one."
            )
        if request.media and not self._on_cuda and self._started().attends_both_ways:
            raise ValueError(
                f"engine=VLLMEngine on a CPU with images and {self._started().model_class}: the model attends in both "
                "directions within an image, and vLLM's attention on a CPU is causal. Use TransformersEngine."
            )
        check_lengths(request, limit=("engine's", limit), way_out="raise VLLMEngine.max_model_len")

    def add(self, requests: list[GenerationRequest]) -> None:
        with self._serving() as adapter:
            for request in requests:
                self._groups[request] = group = _Group(request)
                params = sampling_params(request.sampling)
                for place in request.live:
                    begun = len(request.so_far(place).token_ids)
                    own = sampling_params(remaining(request, place)) if begun else params.clone()
                    own.seed = completion_seed(request.seed, place, begun)
                    key = self._new_key()
                    self._places[key] = (group, place)
                    self._switches[key] = [(0, self.policy_version)]
                    salt = {"cache_salt": str(self.policy_version)} if self._keeps_cache else {}
                    adapter.add(key, engine_prompt(request, place) | salt, own)

    def step(self) -> list[CompletionGroup]:
        with self._serving() as adapter:
            if not self._finished:
                self._wake_cache()
                self._step(adapter)
            return self._collect()

    def _step(self, adapter: VLLMAdapter) -> None:
        self._finished.update({output.request_id: output for output in adapter.step(lambda: self.ending)})

    def _collect(self) -> list[CompletionGroup]:
        """Groups that are done with what has finished."""
        groups = []
        for key in [key for key in self._finished if key in self._places]:
            group, place = self._places.pop(key)
            group.done[place] = self._completion(group, place, key, self._finished.pop(key), self._switches.pop(key))
            if len(group.done) == group.request.num_completions:
                groups.append(self._groups.pop(group.request).answer())
        return groups

    def _completion(
        self, group: _Group, place: int, key: str, output: Any, switches: list[tuple[int, int]]
    ) -> Completion:
        check_prompt(output, group.request, place)
        new = completion(output.outputs[0], group.request, place)
        switches = [*switches, (len(new.token_ids), -1)]
        versions = [version for (at, version), (end, _) in pairwise(switches) for _ in range(end - at)]
        return joined(new, group.request, place, versions, self._started().decode)

    def abort(self, requests: list[GenerationRequest]) -> None:
        groups = [self._groups.pop(request, None) for request in requests]
        keys = [key for key, (group, _) in self._places.items() if group in groups]
        for key in keys:
            for of_keys in (self._places, self._finished, self._switches):
                of_keys.pop(key, None)
        with self._serving() as adapter:
            adapter.abort(keys)

    def partials(self) -> list[CompletionGroup]:
        with self._serving() as adapter:
            outputs = adapter.so_far(list(self._places)) | self._finished
            for key, (group, place) in self._places.items():
                if key in outputs:
                    group.so_far[place] = self._completion(group, place, key, outputs[key], self._switches[key])
            return [group.answer() for group in self._groups.values()]

    def pause(self) -> list[CompletionGroup]:
        with self._serving() as adapter:
            self._finished.update({output.request_id: output for output in adapter.pause()})
            return super().pause()

    def resume(self) -> None:
        with self._serving() as adapter:
            adapter.resume()
        super().resume()

    def _new_key(self) -> str:
        self._num_requests += 1
        return f"lightrl-{self._num_requests}"

    def logprobs(self, sequences: Sequence[Sequence[int]], routes: Sequence[Routes | None] = ()) -> list[list[float]]:
        limit = self.max_model_len
        for position, ids in enumerate(sequences):
            if not 2 <= len(ids) < limit:
                raise ValueError(
                    f"logprobs: sequence {position} has {len(ids)} tokens; vLLM takes 2 to {limit - 1} "
                    "(max_model_len - 1)."
                )
        keys = [self._new_key() for _ in sequences]
        with self._serving() as adapter:
            self._wake_cache()
            try:
                for key, ids in zip(keys, sequences, strict=True):
                    adapter.add(key, {"prompt_token_ids": list(ids)}, scoring_params())
                while not all(key in self._finished for key in keys):
                    self._step(adapter)
                outputs = [self._finished.pop(key) for key in keys]
            except BaseException:  # Ctrl-C too
                if self._adapter is not None:
                    adapter.abort(keys)
                raise
        pairs = [
            zip(ids[1:], out.prompt_logprobs[1:], strict=True) for ids, out in zip(sequences, outputs, strict=True)
        ]
        return [[float(entry[token].logprob) for token, entry in of_one] for of_one in pairs]

    # -- weights ---------------------------------------------------------------------------------------------------

    def load_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, partial: bool = False
    ) -> None:
        """See `Engine.load_weights`. With `EngineContext.keep_cache`, later requests do not share what was computed.

        Raises:
            ValueError: unknown names, or parameters of the engine that did not come; the message lists them.
            EngineDiedError: an engine process is gone.
        """
        if self._asleep == 2:
            self.wake()
        with self._changing(policy_version):
            assert self._sender is not None
            self._sender.push(named_tensors, partial=partial)

    @contextmanager
    def _changing(self, policy_version: int) -> Iterator[VLLMAdapter]:
        """Loading other weights between two steps: notes which tokens came before; drops caches, or keeps them."""
        self.policy_version = -1
        with self._serving() as adapter:
            busy = adapter.busy
            if busy:
                self._finished.update({output.request_id: output for output in adapter.pause()})
            yield adapter
            self._wake_cache()
            if not (busy and self._keeps_cache):
                adapter.reset_caches()
            for key, count in adapter.counts().items():
                if key in self._switches:
                    self._switches[key].append((count, policy_version))
            self.policy_version = policy_version
            if busy and not self._paused:
                adapter.resume()

    @property
    def _keeps_cache(self) -> bool:
        return self._context is not None and self._context.keep_cache

    def load_adapter(
        self, named_tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], *, policy_version: int
    ) -> None:
        """See `Engine.load_adapter`. Requests in flight go on with the new adapter, their prefix computed again."""
        with self._changing(policy_version) as adapter:
            self._wake_cache()
            self._adapter_folder = self._adapter_folder or AdapterFolder()
            self._adapter_folder.write(named_tensors, config)
            adapter.load_lora(self._adapter_folder.path)

    def sleep(self) -> None:
        if self._asleep or not self.sleep_level:
            return
        with self._serving() as adapter:
            if self._on_cuda:
                adapter.sleep(self.sleep_level)
            else:
                adapter.reset_caches()
            self._asleep = self.sleep_level
        if self.sleep_level == 2:
            self.policy_version = -1
            assert self._sender is not None
            self._sender.forget()

    def wake(self) -> None:
        if not self._asleep:
            return
        with self._serving() as adapter:
            if self._on_cuda:
                free_cached_memory()  # the trainer's own blocks, which no other process or allocator can take
                # After level 2 the KV cache comes back with the weights: until then the trainer may need the memory.
                adapter.wake(["weights"] if self._asleep == 2 else None)
        self._cache_asleep = self._asleep == 2
        self._asleep = 0

    def _wake_cache(self) -> None:
        if self._asleep:
            self.wake()
        if self._cache_asleep:
            self._cache_asleep = False
            if self._on_cuda:
                free_cached_memory()
                self._started().wake(["kv_cache"])

    @property
    def _on_cuda(self) -> bool:
        return self._context is not None and self._context.device.startswith("cuda")

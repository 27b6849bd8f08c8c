"""`VLLMEngine`: vLLM embedded in the run, in the trainer's process or in separate ones.

What touches vLLM's internals is in `lightrl.compat.vllm` (trainer's side) and `vllm_worker` (workers' side). `setup` is
what the engine is started with, `requests` translates requests and answers, `weights` brings weights to the workers.
vLLM is imported by `start`, not before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lightrl.compat.arguments import above, at_least, fraction, one_of
from lightrl.engines.base import EngineDiedError, EngineRestartedError, ExtraKeys, SteppingEngine
from lightrl.engines.vllm import setup
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
from lightrl.models.loading import longest_sequence
from lightrl.records import Completion, CompletionGroup, EngineContext, GenerationRequest, Routes, SamplingParams

if TYPE_CHECKING:
    from lightrl.compat.vllm import VLLMAdapter
    from lightrl.engines.vllm.weights import AdapterFolder, WeightSender

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16", "auto", "half", "float")


class _Group:
    """A request under way: the completions that are done, and what is known of the others so far."""

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
    and the default process group survives `close`. Log-probs are those of the distribution that was sampled from, with
    temperature, penalties, FIRE, min-p, top-k, and top-p. On a CPU, vLLM's packing of linear weights is off: pushes run
    at the speed of memcpy, and matrix products are 10-15% slower at 64 sequences.

    Args:
        model: Model directory or ID. Defaults to the run's model.
        dtype: "float32", "bfloat16", or "float16" for weights and KV cache. Defaults to the trainer's. vLLM's "auto",
            which serves float32 models in bfloat16, has to be set explicitly.
        in_process: Runs the engine in the trainer's process: fastest start and sync. False uses separate processes,
            which can sample while the trainer computes, and whose death the trainer survives.
        max_model_len: Maximum number of tokens of prompt and completion together. Defaults to what the run's longest
            prompt and completion need, or to the model's own limit if the length of the prompts is unknown (streams,
            media, turns without a limit). On a CPU that limit is lowered to what fits into a quarter of the free
            memory.
        gpu_memory_utilization: Fraction of the device's memory for weights and KV cache, in (0, 1]. Defaults to 0.4 on
            a GPU that a trainer also uses and 0.9 on separate GPUs (`devices`). On a CPU the KV cache instead holds
            the run's sequences, in at most a quarter of the free memory; `engine_args.kv_cache_memory_bytes` sets it.
        tensor_parallel_size: Number of devices that share the model; more than 1 needs `in_process=False`.
        devices: Numbers of the visible GPUs for this node's engines, `tensor_parallel_size` for each rank in the order
            of the ranks; needs `in_process=False`. By default rank r's engine starts at its trainer's GPU.
        restart_engine: Restarts an engine that died before the error is raised, which is then `EngineRestartedError`;
            the weights are pushed again and the lost requests repeated.
        sleep_level: What `sleep` frees on a GPU: 0 nothing; 1 the KV cache, with weights moved to the host; 2 KV cache
            and weights, which are pushed again. On a CPU memory stays, caches are dropped, and level 2 pushes again.
        lora_sync: How a LoRA adapter is pushed. "adapter": the engine keeps the base weights, and a push brings the
            adapter alone. "merged": a push brings all weights with the adapter merged; sampling is then as fast as
            without one. Quantized bases (QLoRA) are always merged.
        progress_timeout: Seconds that the trainer waits for any sign of life from engine processes (one step, one part
            of a push) before they are ended and `EngineDiedError` is raised; None waits forever. An in-process engine
            has no limit. vLLM bounds the start of its processes by `VLLM_ENGINE_READY_TIMEOUT_S`, 600 seconds.
        engine_args: Further arguments of `vllm.LLM`, which win over all of the above.

    Raises:
        ValueError: arguments that contradict each other.

    Source: https://docs.vllm.ai (0.32).
    """

    extra = ExtraKeys(HARMLESS_EXTRA, EVALUATION_EXTRA, OWN_EXTRA)

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
            raise ValueError(f"VLLMEngine.tensor_parallel_size={tensor_parallel_size}: needs in_process=False.")
        if devices is not None and in_process:
            raise ValueError(
                f"VLLMEngine.devices={devices}: an in-process engine uses its trainer's GPU. Set in_process=False."
            )
        if devices is not None and (not devices or len({*devices}) < len(devices) or min(devices) < 0):
            raise ValueError(f"VLLMEngine.devices={devices}: must be different numbers of GPUs, from 0 on.")
        if restart_engine and in_process:
            raise ValueError(
                "VLLMEngine.restart_engine=True: an in-process engine can't die alone. Set in_process=False."
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
        self._keys = map("lightrl-{}".format, count())
        self._heats = self._keeps_cache = self._on_cuda = False
        self._asleep: Literal[0, 1, 2] = 0
        self._cache_asleep = False

    # -- life ------------------------------------------------------------------------------------------------------

    def check(self, context: EngineContext) -> None:
        setup.check(self, context)

    def check_overlap(self, *, in_flight: bool) -> None:
        if self.in_process:
            super().check_overlap(in_flight=in_flight)
        if self.sleep_level:
            raise ValueError(
                f"engine=VLLMEngine.sleep_level={self.sleep_level}: an engine that samples while the trainer computes "
                "never sleeps. Set it to 0."
            )

    def known_model_len(self, model_path: str) -> int | None:
        if self.requested_model_len is not None or "hf_overrides" in self.engine_args:
            return self.requested_model_len
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.model or model_path)
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        return longest_sequence(config) if rope.get("rope_type") == "default" else None  # vLLM stretches scaled ones

    def environment(self, context: EngineContext, *, cuda: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Environment variables that must hold while the engine starts, and those that yield to the user's."""
        return setup.environment(self, context, cuda)

    def arguments(self, context: EngineContext, *, cuda: bool) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        return setup.arguments(self, context, cuda)

    def start(self, context: EngineContext) -> None:
        if self._adapter is not None:
            return
        from lightrl.compat.vllm import VLLMAdapter
        from lightrl.engines.vllm.weights import WeightSender

        cuda = context.device.startswith("cuda")
        forced, defaults = self.environment(context, cuda=cuda)
        arguments = self.arguments(context, cuda=cuda)
        try:
            self._adapter = VLLMAdapter(
                arguments,
                in_process=self.in_process,
                forced=forced,
                defaults=defaults,
                progress_timeout=self.progress_timeout,
            )
        except (ValueError, TypeError) as error:
            said, length = " ".join(str(error).split())[:600], arguments.get("max_model_len")
            if "KV cache" in said:
                raise ValueError(
                    f"VLLMEngine.max_model_len={length}: the KV cache has no room for a sequence of that length. Set "
                    "max_model_len to the longest prompt plus completion, or raise gpu_memory_utilization or "
                    f"engine_args.kv_cache_memory_bytes. vLLM reports: {said}"
                ) from error
            if "max_model_len" in said:
                raise ValueError(
                    f"VLLMEngine.max_model_len={length}: the model cannot hold the longest prompt "
                    f"({context.max_prompt_tokens} tokens) and max_new_tokens={context.max_new_tokens}: lower one of "
                    f"the two. vLLM reports: {said}"
                ) from error
            if not self.engine_args:
                raise
            raise ValueError(f"VLLMEngine.engine_args ({', '.join(self.engine_args)}): vLLM reports: {said}") from error
        self._context, self._on_cuda, self._lost = context, cuda, None
        self._heats, self._keeps_cache = context.fire, context.keep_cache
        self._finished, self._switches, self._groups, self._places = {}, {}, {}, {}
        self._asleep, self._cache_asleep = 0, False
        self.policy_version, self.dtype = -1, str(arguments["dtype"]).removeprefix("torch.")
        self.device = context.device if self.in_process else "cpu"
        self.pushes = "adapter" if setup.adapter_rank(self, context) else "checkpoint"
        try:
            self._sender = WeightSender(self._adapter)
        except BaseException:
            self.close()
            raise
        self.takes_parts = self._sender.takes_parts

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
            raise self._lost or RuntimeError("VLLMEngine is not started: call start(context) first.")
        return self._adapter

    @contextmanager
    def _serving(self) -> Iterator[VLLMAdapter]:
        """The adapter, for one thread at a time; ends a lost engine, and restarts it with `restart_engine`."""
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
        if sampling.extra:
            try:
                self._started().grammars.verify(sampling_params(sampling))
            except Exception as error:  # on hostile schemas nearly anything is raised
                raise ValueError(f"vLLM rejects the request: {str(error) or type(error).__name__}") from error

    def add(self, requests: list[GenerationRequest]) -> None:
        with self._serving() as adapter:
            for request in requests:
                self._groups[request] = group = _Group(request)
                params = sampling_params(request.sampling)
                for place in request.live:
                    begun = len(request.so_far(place).token_ids)
                    own = sampling_params(remaining(request, place)) if begun else params.clone()
                    own.seed = completion_seed(request.seed, place, begun)
                    key = next(self._keys)
                    self._places[key] = (group, place)
                    self._switches[key] = [(0, self.policy_version)]
                    salt = {"cache_salt": str(self.policy_version)} if self._keeps_cache else {}
                    adapter.add(key, engine_prompt(request, place) | salt, own)

    def step(self) -> list[CompletionGroup]:
        with self._serving() as adapter:
            groups = self._collect()
            if not groups:
                self._wake_cache()
                self._step(adapter)
                groups = self._collect()
            return groups

    def _step(self, adapter: VLLMAdapter) -> None:
        self._finished.update({output.request_id: output for output in adapter.step(lambda: self.ending)})

    def _collect(self) -> list[CompletionGroup]:
        """Groups that are done with what has finished."""
        groups = []
        for key in [key for key in self._finished if key in self._places]:
            group, place = self._places.pop(key)
            group.done[place] = self._completion(group, place, self._finished.pop(key), self._switches.pop(key))
            if len(group.done) == group.request.num_completions:
                groups.append(self._groups.pop(group.request).answer())
        return groups

    def _completion(self, group: _Group, place: int, output: Any, switches: list[tuple[int, int]]) -> Completion:
        check_prompt(output, group.request, place)
        new = completion(output.outputs[0], group.request, place)
        switches = [*switches, (len(new.token_ids), -1)]
        versions = [version for (at, version), (end, _) in pairwise(switches) for _ in range(end - at)]
        whole = joined(new, group.request, place, versions, self._started().decode)
        if (
            not group.request.trained
            and not group.request.so_far(place).token_ids
            and whole.finish_reason != "suspended"
        ):
            whole.support = self._started().grammars.support(sampling_params(group.request.sampling), whole.token_ids)
        return whole

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
                    group.so_far[place] = self._completion(group, place, outputs[key], self._switches[key])
            return [group.answer() for group in self._groups.values()]

    def pause(self) -> list[CompletionGroup]:
        with self._serving() as adapter:
            self._finished.update({output.request_id: output for output in adapter.pause()})
            return super().pause()

    def resume(self) -> None:
        with self._serving() as adapter:
            adapter.resume()
        super().resume()

    def logprobs(self, sequences: Sequence[Sequence[int]], routes: Sequence[Routes | None] = ()) -> list[list[float]]:
        limit = self.max_model_len
        for position, ids in enumerate(sequences):
            if not 2 <= len(ids) < limit:
                raise ValueError(
                    f"logprobs: sequence {position} has {len(ids)} tokens; vLLM takes 2 to {limit - 1} "
                    "(max_model_len - 1)."
                )
        keys = [next(self._keys) for _ in sequences]
        with self._serving() as adapter:
            self._wake_cache()
            try:
                for key, ids in zip(keys, sequences, strict=True):
                    adapter.add(key, {"prompt_token_ids": list(ids)}, scoring_params())
                while not all(key in self._finished for key in keys):
                    self._step(adapter)
                scored = [self._finished[key].prompt_logprobs[1:] for key in keys]
            finally:
                for key in keys:
                    self._finished.pop(key, None)
                if self._adapter is not None:
                    adapter.abort(keys)
        pairs = [zip(ids[1:], entries, strict=True) for ids, entries in zip(sequences, scored, strict=True)]
        return [[float(entry[token].logprob) for token, entry in of_one] for of_one in pairs]

    # -- weights ---------------------------------------------------------------------------------------------------

    def load_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, partial: bool = False
    ) -> None:
        """See `Engine.load_weights`. Names that are unknown or did not come are listed in a ValueError."""
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
            for key, tokens in adapter.counts().items():
                if key in self._switches:
                    self._switches[key].append((tokens, policy_version))
            self.policy_version = policy_version
            if busy and not self._paused:
                adapter.resume()

    def load_adapter(
        self, named_tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], *, policy_version: int
    ) -> None:
        from lightrl.engines.vllm.weights import AdapterFolder

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
                setup.free_cached_memory()  # the trainer's own blocks, which no other process or allocator can take
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
                setup.free_cached_memory()
                self._started().wake(["kv_cache"])

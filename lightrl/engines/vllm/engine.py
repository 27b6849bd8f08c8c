"""The embedded vLLM engine, which runs in the trainer's process or in separate ones.

`lightrl.compat.vllm` and `vllm_worker` wrap vLLM's internals, `vllm_process` its separate processes. `conversion`
has the startup arguments and converts requests and outputs. `start` imports vLLM.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightrl.compat.vllm import LostEngineError, VLLMAdapter
from lightrl.engines.base import EngineDiedError, SteppingEngine
from lightrl.engines.vllm import conversion
from lightrl.engines.vllm.conversion import (
    HARMLESS_EXTRA,
    completion,
    completion_seed,
    engine_prompt,
    sampling_params,
    scoring_params,
)
from lightrl.models.loading import longest_sequence
from lightrl.records import Completion, CompletionGroup, EngineContext, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from lightrl.records import Routes

log = logging.getLogger(__name__)


class _Group:
    """A pending request with its finished and partial completions."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.so_far = {place: request.so_far(place) for place in range(request.num_completions)}
        self.done = {place: part for place, part in self.so_far.items() if part.finish_reason != "suspended"}

    def answer(self) -> CompletionGroup:
        parts = list((self.so_far | self.done).values())
        return CompletionGroup(self.request, parts, min((v for c in parts for v in c.policy_versions), default=-1))


_Place: TypeAlias = tuple[_Group, int, list[tuple[int, int]]]
"""Group, index in it, and weight changes of a completion: (tokens before, version after)."""


class VLLMEngine(SteppingEngine):
    """Samples with an embedded `vllm.LLM`.

    Log-probs refer to the sampling distribution, after temperature, penalties, FIRE, min-p, top-k, and top-p. The
    engine restores what vLLM changes in the trainer's process: random states, environment variables, and
    `torch.set_num_threads`. The default process group survives `close`. On a CPU, packing of linear weights is
    disabled, which makes pushes a plain memory copy and matrix products 10-15% slower at 64 sequences.

    Args:
        dtype: Dtype of weights and KV cache: "float32", "bfloat16", "float16", or vLLM's "auto", which serves float32
            models in bfloat16. Defaults to the trainer's.
        in_process: Whether to run in the trainer's process, which has the fastest startup and weight sync. Separate
            processes can sample during updates, and the trainer survives if they crash.
        max_model_len: Maximum sequence length in tokens, including prompt and completion. Defaults to the run's longest
            prompt plus completion, or to the model's limit if prompt lengths are unknown (streams, media, turns without
            a limit). On a CPU, the model's limit is reduced to fit into a quarter of the free memory.
        gpu_memory_utilization: Fraction of GPU memory for weights and KV cache, in (0, 1]. Defaults to 0.4 on a GPU
            shared with a trainer and to 0.9 on separate GPUs (`devices`). On a CPU, the KV cache holds the run's
            sequences and uses at most a quarter of the free memory, unless `engine_args.kv_cache_memory_bytes` is set.
        tensor_parallel_size: Number of GPUs per engine. Values above 1 require `in_process=False`.
        devices: Indices of the visible GPUs for this node's engines, `tensor_parallel_size` per rank in rank order.
            Requires `in_process=False`. Defaults to GPUs starting at each trainer's GPU.
        sleep_level: Memory to free between rollouts on a GPU. 0 frees nothing, 1 frees the KV cache and offloads
            weights to the CPU, and 2 frees the KV cache and weights, which are pushed again. On a CPU, levels 1 and 2
            only drop caches, and level 2 also pushes the weights again.
        lora_sync: How to push LoRA weights. "adapter" pushes only the adapter. "merged" pushes all weights with the
            adapter merged, which samples at the speed of the base model. QLoRA bases are always merged.
        progress_timeout: Seconds without any activity of the engine processes (a step, a part of a push) after
            which they are stopped and `EngineDiedError` is raised. None waits forever. Doesn't apply to in-process
            engines, nor to startup, which vLLM limits by `VLLM_ENGINE_READY_TIMEOUT_S` (600 seconds).
        engine_args: Additional arguments of `vllm.LLM`, which override all of the above.

    Source: https://docs.vllm.ai (0.32).
    """

    harmless_extra = HARMLESS_EXTRA

    def __init__(
        self,
        dtype: str | None = None,
        in_process: bool = True,
        max_model_len: int | None = None,
        gpu_memory_utilization: float | None = None,
        tensor_parallel_size: int = 1,
        devices: list[int] | None = None,
        sleep_level: Literal[0, 1, 2] = 0,
        lora_sync: Literal["adapter", "merged"] = "adapter",
        progress_timeout: float | None = 300.0,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        apart: dict[str, tuple[Any, Any]] = {"tensor_parallel_size": (tensor_parallel_size, 1)}
        for name, (value, plain) in (apart | {"devices": (devices, None)}).items():
            if in_process and value != plain:
                raise ValueError(f"VLLMEngine.{name}={value}: needs separate processes. Set in_process=False.")
        super().__init__()
        self.requested_dtype = dtype
        self.in_process = in_process
        self.requested_model_len = max_model_len
        self.gpu_memory_utilization = gpu_memory_utilization
        self.tensor_parallel_size = tensor_parallel_size
        self.devices = devices
        self.sleep_level = sleep_level
        self.lora_sync = lora_sync
        self.progress_timeout = progress_timeout
        self.engine_args = dict(engine_args or {})
        self._adapter: VLLMAdapter | None = None
        self._pushed: frozenset[str] | None = None  # names of the last push, or None if all must be checked
        self._lora_folder: TemporaryDirectory[str] | None = None  # from which the workers read the adapter
        self._finished: dict[str, Any] = {}
        self._groups: dict[GenerationRequest, _Group] = {}
        self._places: dict[str, _Place] = {}  # by vLLM request
        self._keys = map("lightrl-{}".format, count())
        self._keeps_cache = self._on_cuda = False
        self._asleep: list[str] = []  # of "weights" and "kv_cache"

    # -- life ------------------------------------------------------------------------------------------------------

    def check(self, context: EngineContext) -> None:
        conversion.check(self, context)

    def check_overlap(self, *, in_flight: bool) -> None:
        if self.in_process:
            super().check_overlap(in_flight=in_flight)
        if self.sleep_level:
            raise ValueError(
                f"engine=VLLMEngine.sleep_level={self.sleep_level}: an engine that samples during updates can't sleep. "
                "Set it to 0."
            )

    def known_model_len(self, model_path: str) -> int | None:
        if self.requested_model_len is not None or "hf_overrides" in self.engine_args:
            return self.requested_model_len
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_path)
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        return longest_sequence(config) if rope.get("rope_type") == "default" else None  # vLLM extends scaled ones

    def start(self, context: EngineContext) -> None:
        if self._adapter is not None:
            return
        cuda = context.device.startswith("cuda")
        forced, defaults = conversion.environment(self, context, cuda)
        arguments = conversion.arguments(self, context, cuda)
        if self.in_process:
            self._adapter = VLLMAdapter(arguments, forced=forced, defaults=defaults)
        else:
            from lightrl.compat.vllm_process import SeparateAdapter

            self._adapter = SeparateAdapter(
                arguments, forced=forced, defaults=defaults, progress_timeout=self.progress_timeout
            )
        self._on_cuda, self._lost = cuda, None
        self._keeps_cache = context.keep_cache
        self._asleep = []
        self.policy_version, self.dtype = -1, str(arguments["dtype"]).removeprefix("torch.")
        self.device = context.device if self.in_process else "cpu"
        self.pushes = "adapter" if conversion.adapter_rank(self, context) else "checkpoint"

    @property
    def started(self) -> bool:
        return self._adapter is not None

    @property
    def max_model_len(self) -> int:
        return self._started().max_model_len

    @property
    def process_ids(self) -> list[int]:
        """Process IDs of engine core and workers. Empty for an in-process engine."""
        return list(self._started().pids)

    def close(self) -> None:
        stuck = not self.end_driver()
        if stuck and self.in_process:
            log.warning("VLLMEngine hangs in a step; its thread is leaked.")
            self._adapter = None
        self._release(dead=stuck)

    def _release(self, *, dead: bool) -> None:
        adapter, self._adapter, self._pushed = self._adapter, None, None
        folder, self._lora_folder = self._lora_folder, None
        self.policy_version, self._finished, self._groups, self._places = -1, {}, {}, {}
        try:
            if adapter is not None:
                adapter.close(dead=dead)
        finally:
            if folder is not None:
                folder.cleanup()

    def _started(self) -> VLLMAdapter:
        if self._adapter is None:
            raise self._lost or RuntimeError("VLLMEngine is not started: call start(context) first.")
        return self._adapter

    @contextmanager
    def _serving(self) -> Iterator[VLLMAdapter]:
        """Yields the adapter with the lock held. Cleans up a dead engine."""
        with self.lock:
            adapter = self._started()
            try:
                with adapter.guarded():
                    yield adapter
            except LostEngineError as error:
                died = EngineDiedError(str(error))
                if self._adapter is adapter:  # not closed in the meantime
                    self._release(dead=True)
                    self.lose(died)
                raise died from error

    # -- sampling --------------------------------------------------------------------------------------------------

    def check_sampling(self, sampling: SamplingParams, name: str = "sampling", *, trained: bool) -> None:
        super().check_sampling(sampling, name, trained=trained)
        if 0 < sampling.temperature < 0.01:
            raise ValueError(
                f"{name}.temperature={sampling.temperature}: vLLM supports 0 (greedy) and 0.01 or more. Raise it."
            )
        for argument in ("logits_processors", "logprobs_mode", "watermark_config") if trained else ():
            if self.engine_args.get(argument):
                raise ValueError(
                    f"VLLMEngine.engine_args.{argument}={self.engine_args[argument]!r}: the trainer can't reproduce "
                    "this sampling distribution. Remove it."
                )

    def check_request(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        self.check_sampling(sampling, "SamplingParams", trained=False)
        if request.media and not self._on_cuda and self._started().attends_both_ways:
            raise ValueError(
                f"engine=VLLMEngine on a CPU with {self._started().model_class}: vLLM does not support the model's "
                "bidirectional attention within an image on a CPU. Use TransformersEngine."
            )
        self.check_length(request)
        if sampling.extra:
            try:
                self._started().grammars.verify(sampling_params(sampling))
            except Exception as error:  # invalid schemas raise many error types
                raise ValueError(f"vLLM rejects the request: {str(error) or type(error).__name__}") from error

    def add(self, requests: list[GenerationRequest]) -> None:
        with self._serving() as adapter:
            for request in requests:
                self._groups[request] = group = _Group(request)
                params = sampling_params(request.sampling)
                for place in (place for place in group.so_far if place not in group.done):
                    begun = len(request.so_far(place).token_ids)
                    own = params.clone()
                    if begun:
                        from lightrl.engines.vllm.special_requests import remaining

                        own = sampling_params(remaining(request, place))
                    own.seed = completion_seed(request.seed, place, begun)
                    key = next(self._keys)
                    self._places[key] = group, place, [(0, self.policy_version)]
                    salt = {"cache_salt": str(self.policy_version)} if self._keeps_cache else {}
                    adapter.add(key, engine_prompt(request, place) | salt, own)

    def step(self) -> list[CompletionGroup]:
        with self._serving() as adapter:
            groups = self._collect()
            if not groups:
                self._wake("weights", "kv_cache")
                self._note(adapter.step())
                groups = self._collect()
            return groups

    def _note(self, outputs: Iterable[Any]) -> None:
        self._finished.update({output.request_id: output for output in outputs})

    def _collect(self) -> list[CompletionGroup]:
        """Returns the finished groups."""
        groups = []
        for key in [key for key in self._finished if key in self._places]:
            group, place, switches = self._places.pop(key)
            group.done[place] = self._completion(group.request, place, self._finished.pop(key), switches)
            if len(group.done) == group.request.num_completions:
                groups.append(self._groups.pop(group.request).answer())
        return groups

    def _completion(
        self, request: GenerationRequest, place: int, output: Any, switches: list[tuple[int, int]]
    ) -> Completion:
        if request.media:
            from lightrl.engines.vllm.special_requests import check_prompt

            check_prompt(output, request, place)
        new = completion(output.outputs[0], request, place)
        ends = pairwise([*switches, (len(new.token_ids), -1)])
        versions = [version for (at, version), (end, _) in ends for _ in range(end - at)]
        if request.so_far(place).token_ids:
            from lightrl.engines.vllm.special_requests import joined

            return joined(new, request, place, versions, self._started().decode)
        if not request.trained and new.finish_reason != "suspended":
            new.support = self._started().grammars.support(sampling_params(request.sampling), new.token_ids)
        return replace(new, policy_versions=versions)

    def abort(self, requests: list[GenerationRequest]) -> None:
        groups = [self._groups.pop(request, None) for request in requests]
        keys = [key for key, (group, *_) in self._places.items() if group in groups]
        for key in keys:
            del self._places[key]
            self._finished.pop(key, None)
        with self._serving() as adapter:
            adapter.abort(keys)

    def partials(self) -> list[CompletionGroup]:
        with self._serving() as adapter:
            outputs = adapter.so_far(list(self._places)) | self._finished
            for key, (group, place, switches) in self._places.items():
                if key in outputs:
                    group.so_far[place] = self._completion(group.request, place, outputs[key], switches)
            return [group.answer() for group in self._groups.values()]

    def pause(self) -> list[CompletionGroup]:
        with self._serving() as adapter:
            self._note(adapter.pause())
            return super().pause()

    def resume(self) -> None:
        with self._serving() as adapter:
            adapter.resume()
        super().resume()

    def logprobs(self, sequences: Sequence[Sequence[int]], routes: Sequence[Routes | None] = ()) -> list[list[float]]:
        keys = [next(self._keys) for _ in sequences]
        with self._serving() as adapter:
            self._wake("weights", "kv_cache")
            try:
                for key, ids in zip(keys, sequences, strict=True):
                    adapter.add(key, {"prompt_token_ids": list(ids)}, scoring_params())
                while not all(key in self._finished for key in keys):
                    self._note(adapter.step())
                scored = [self._finished[key].prompt_logprobs[1:] for key in keys]
            finally:
                for key in keys:
                    self._finished.pop(key, None)
                if self._adapter is not None:
                    adapter.abort(keys)
        pairs = [zip(ids[1:], entries, strict=True) for ids, entries in zip(sequences, scored, strict=True)]
        return [[float(entry[token].logprob) for token, entry in of_one] for of_one in pairs]

    # -- weights ---------------------------------------------------------------------------------------------------

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """See `Engine.load_weights`. Raises a ValueError that lists unknown and missing names."""
        if self.sleep_level == 2:
            self._wake("weights")
        with self._changing(policy_version) as adapter:
            self._push(adapter, named_tensors)

    def _push(self, adapter: VLLMAdapter, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Streams tensors to the workers and checks that none is missing.

        The first push fills all engine parameters with NaN and checks that none remains, which also detects missing
        parts of fused parameters. Later pushes must contain the same names.
        """
        strict, names = self._pushed is None, list[str]()

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named_tensors:
                names.append(name)
                yield name, tensor.detach()

        adapter.rpc("lightrl_begin", strict)
        errors = adapter.push(stream())
        missing = sorted({name for part in adapter.rpc("lightrl_finish", strict) for name in part})
        if errors:
            raise ValueError(f"vLLM could not load the weights: {errors[0]}")
        missing += sorted((self._pushed or frozenset()).difference(names))
        if missing:
            raise ValueError(
                f"Weight sync left {len(missing)} parameter(s) of the engine without new values (or with NaN): "
                f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}. Push every parameter under its "
                "Hugging Face name, and each tied parameter once."
            )
        self._pushed = frozenset(names)

    @contextmanager
    def _changing(self, policy_version: int) -> Iterator[VLLMAdapter]:
        """Pauses for loading weights, then drops or keeps caches and records the new version of pending requests."""
        self.policy_version = -1
        with self._serving() as adapter:
            busy = adapter.busy
            if busy:
                self._note(adapter.pause())
            yield adapter
            self._wake("weights", "kv_cache")
            if not (busy and self._keeps_cache):
                adapter.reset_caches()
            for key, tokens in adapter.counts().items():
                if key in self._places:
                    self._places[key][2].append((tokens, policy_version))
            self.policy_version = policy_version
            if busy and not self._paused:
                adapter.resume()

    def load_adapter(
        self, named_tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], *, policy_version: int
    ) -> None:
        from lightrl.models.lora import save_adapter

        with self._changing(policy_version) as adapter:
            self._wake("weights", "kv_cache")
            if self._lora_folder is None:
                memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
                self._lora_folder = TemporaryDirectory(prefix="lightrl-lora-", dir=memory)
            save_adapter(Path(self._lora_folder.name), named_tensors, config)
            adapter.load_lora(self._lora_folder.name)

    def sleep(self) -> None:
        if "weights" in self._asleep or not self.sleep_level:
            return
        with self._serving() as adapter:
            if self._on_cuda:
                adapter.sleep(self.sleep_level)
            else:
                adapter.reset_caches()
            self._asleep = ["weights", "kv_cache"]
        if self.sleep_level == 2:
            self.policy_version, self._pushed = -1, None

    def wake(self) -> None:
        # After level 2, the KV cache is restored after the push, because gathering weights needs memory.
        self._wake("weights", *(["kv_cache"] if self.sleep_level == 1 else []))

    def _wake(self, *parts: str) -> None:
        """Wakes the sleeping `parts`: "weights" and "kv_cache"."""
        parts = tuple(part for part in parts if part in self._asleep)
        if not parts:
            return
        with self._serving() as adapter:
            if self._on_cuda:
                torch.cuda.empty_cache()  # blocks of the trainer's allocator
                adapter.wake(list(parts) if len(parts) == 1 else None)
        self._asleep = [part for part in self._asleep if part not in parts]

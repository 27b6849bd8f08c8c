"""`VLLMEngine`: vLLM embedded in the run, in the trainer's process or beside it.

What touches vLLM's internals is in `_vllm_adapter` (trainer's side) and `_vllm_worker` (workers' side); `_vllm_weights`
is the transport between them, `_vllm_requests` translates requests and answers. vLLM is imported by `start`, not
before. P prompts, G completions per prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lightrl.engines._vllm_requests import (
    check_prompt,
    check_request,
    completion,
    completion_seed,
    engine_prompt,
    prompt_name,
    sampling_params,
    scoring_params,
)
from lightrl.engines._vllm_setup import adapter_rank, engine_arguments, engine_environment
from lightrl.engines.base import (
    Engine,
    EngineContext,
    EngineDiedError,
    EngineRestartedError,
    GenerationCancelledError,
)
from lightrl.types import Completion, CompletionGroup, Prompts, SamplingParams

if TYPE_CHECKING:
    from lightrl.engines._vllm_adapter import VLLMAdapter

__all__ = ["VLLMEngine", "completion_seed"]


class VLLMEngine(Engine):
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
        max_model_len: most tokens of prompt and completion together; where None, what the run's longest prompt and
            completion need, and the model's own limit where the run does not know its prompts' length.
        gpu_memory_utilization: fraction of the device's memory for weights and KV cache, in (0, 1]. None: 0.9 on a GPU
            with an engine of its own, 0.4 in the trainer's process; on CPU a KV cache of 256 MiB instead.
        tensor_parallel_size: number of devices the model is split over; more than 1 needs `in_process=False`.
        restart_engine: an engine that died is started again before the error is raised; the error is then
            `EngineRestartedError` and `policy_version` is -1, so a caller syncs and asks again.
        fire_temperature: temperature of each completion's first token (FIRE sampling); None is off. The rest follows
            the sampling settings. Greedy sampling is left alone.
        sleep_level: what `sleep` frees on a GPU: 0 nothing, 1 KV cache, with weights moved to the host, 2 KV cache and
            weights, which must be pushed again. On CPU memory stays, but the caches are dropped and level 2 still asks
            for a new push, so that a run behaves alike on both.
        lora_sync: of a policy with a LoRA adapter. "adapter": the engine keeps the base weights of the model's folder,
            and a push brings the adapter alone. "merged": a push brings all weights, the adapter merged; sampling is
            then as fast as without one. Quantised bases (QLoRA) are always merged.
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
        restart_engine: bool = False,
        fire_temperature: float | None = None,
        sleep_level: Literal[0, 1, 2] = 0,
        lora_sync: Literal["adapter", "merged"] = "adapter",
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        if tensor_parallel_size > 1 and in_process:
            raise ValueError(
                f"VLLMEngine.tensor_parallel_size={tensor_parallel_size} needs engine processes of its own: "
                "set in_process=False."
            )
        if fire_temperature is not None and fire_temperature <= 0:
            raise ValueError(f"VLLMEngine.fire_temperature={fire_temperature}: must be above 0, or None for off.")
        if restart_engine and in_process:
            raise ValueError(
                "VLLMEngine.restart_engine=True: an engine in the trainer's process cannot die alone; "
                "set in_process=False or leave restart_engine off."
            )
        if "worker_extension_cls" in (engine_args or {}):
            raise ValueError("VLLMEngine.engine_args: leave out worker_extension_cls, LightRL pushes weights by it.")
        self.model = model
        self.requested_dtype = dtype
        self.in_process = in_process
        self.requested_model_len = max_model_len
        self.gpu_memory_utilization = gpu_memory_utilization
        self.tensor_parallel_size = tensor_parallel_size
        self.restart_engine = restart_engine
        self.fire_temperature = fire_temperature
        self.sleep_level = sleep_level
        self.lora_sync = lora_sync
        self.engine_args = dict(engine_args or {})
        self._context: EngineContext | None = None
        self._adapter: VLLMAdapter | None = None
        self._sender: Any = None
        self._finished: dict[str, Any] = {}
        self._num_requests = 0
        self._num_cancels = 0
        self._asleep: Literal[0, 1, 2] = 0
        self._cache_asleep = False
        self._died = False

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self, context: EngineContext) -> None:
        if self._adapter is not None:
            return
        from lightrl.engines._vllm_adapter import VLLMAdapter
        from lightrl.engines._vllm_weights import WeightSender

        self._context = context
        cuda = context.device.startswith("cuda")
        forced, defaults = engine_environment(self, context, cuda=cuda)
        arguments = engine_arguments(self, context, cuda=cuda)
        self.dtype = str(arguments["dtype"]).removeprefix("torch.")
        try:
            self._adapter = VLLMAdapter(arguments, in_process=self.in_process, forced=forced, defaults=defaults)
        except ValueError as error:
            if "max_model_len" not in str(error):
                raise
            raise ValueError(
                f"The model cannot hold max_model_len={arguments.get('max_model_len')} tokens (longest prompt "
                f"{context.max_prompt_tokens} and max_new_tokens={context.max_new_tokens}): lower max_new_tokens or "
                f"the prompts' length. vLLM says: {error}"
            ) from error
        self._finished, self._asleep, self._cache_asleep, self._died, self.policy_version = {}, 0, False, False, -1
        self._lock = threading.RLock()
        try:
            self._sender = WeightSender(self._adapter)
        except BaseException:
            self.close()
            raise

    @property
    def started(self) -> bool:
        return self._adapter is not None

    @property
    def concurrent(self) -> bool:
        return not self.in_process

    @property
    def max_model_len(self) -> int:
        return self._running().max_model_len

    @property
    def process_ids(self) -> list[int]:
        """Engine core and workers; empty for an engine in the trainer's process."""
        return list(self._running().pids)

    def close(self) -> None:
        self._release(dead=False)

    def _release(self, *, dead: bool) -> None:
        adapter, self._adapter, self._sender = self._adapter, None, None
        self.policy_version, self._finished = -1, {}
        if adapter is not None:
            adapter.close(dead=dead)

    def _running(self) -> VLLMAdapter:
        if self._adapter is None:
            if self._died:
                raise EngineDiedError("The vLLM engine died earlier and was not started again (restart_engine=False).")
            raise RuntimeError("VLLMEngine is not started: call start(context) first.")
        return self._adapter

    @contextmanager
    def _serving(self) -> Iterator[VLLMAdapter]:
        """The adapter, for one call at a time; buries a dead engine, and restarts it where that is wished for."""
        adapter = self._running()
        with self._lock:
            try:
                yield adapter
            except EngineDiedError as error:
                self._release(dead=True)
                self._died = True
                if not self.restart_engine:
                    raise
                assert self._context is not None
                self.start(self._context)
                raise EngineRestartedError(
                    "A vLLM engine process died and was started again, without the policy's weights: "
                    "push them and repeat the rollout."
                ) from error

    # -- sampling --------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompts, sampling: SamplingParams, *, num_completions: int, seeds: Sequence[int]
    ) -> Iterator[CompletionGroup]:
        self._check(prompts, sampling, num_completions, seeds)
        return self._stream(prompts, sampling, num_completions, seeds)

    def _check(self, prompts: Prompts, sampling: SamplingParams, num_completions: int, seeds: Sequence[int]) -> None:
        limit = self.max_model_len
        if 0 < sampling.temperature < 0.01:
            raise ValueError(
                f"SamplingParams.temperature={sampling.temperature}: vLLM serves 0 (greedy) and 0.01 or more."
            )
        check_request(
            prompts,
            sampling,
            num_completions,
            seeds,
            limit=("engine's", limit),
            way_out="raise VLLMEngine.max_model_len",
        )

    def _stream(
        self, prompts: Prompts, sampling: SamplingParams, num_completions: int, seeds: Sequence[int]
    ) -> Iterator[CompletionGroup]:
        version, cancels = self.policy_version, self._num_cancels
        params = sampling_params(sampling, self.fire_temperature)
        owner: dict[str, tuple[int, int]] = {}
        groups: dict[int, dict[int, Completion]] = {}
        try:
            for p in range(len(prompts)):
                for g in range(num_completions):
                    request = params.clone()
                    request.seed = completion_seed(seeds[p], g)
                    self._num_requests += 1
                    key = f"lightrl-{self._num_requests}"
                    owner[key] = (p, g)
                    with self._serving() as adapter:
                        adapter.add(key, engine_prompt(prompts, p), request)
            while owner:
                for key, output in self._step(owner):
                    p, g = owner.pop(key)
                    group = groups.setdefault(p, {})
                    check_prompt(output, prompts, p)
                    group[g] = completion(output.outputs[0], sampling, prompt_name(prompts, p))
                    if len(group) == num_completions:
                        del groups[p]
                        yield CompletionGroup(p, [group[i] for i in range(num_completions)], version)
                if self._num_cancels != cancels:
                    raise GenerationCancelledError(f"{len(owner)} completions were cancelled.")
        finally:
            if owner and self._adapter is not None:
                self._abort(list(owner))

    def cancel(self) -> None:
        self._num_cancels += 1

    def _step(self, owner: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Finished requests of this stream; those of others that finish meanwhile wait for their own."""
        with self._serving() as adapter:  # looked up inside: another thread's step may just have brought them
            mine = [key for key in self._finished if key in owner]
            if not mine:
                self._wake_cache()
                self._finished.update({output.request_id: output for output in adapter.step()})
                mine = [key for key in self._finished if key in owner]
        return [(key, self._finished.pop(key)) for key in mine]

    def _abort(self, keys: list[str]) -> None:
        for key in keys:
            self._finished.pop(key, None)
        with self._serving() as adapter:
            adapter.abort(keys)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        limit = self.max_model_len
        for position, ids in enumerate(sequences):
            if not 2 <= len(ids) < limit:
                raise ValueError(
                    f"logprobs: sequence {position} has {len(ids)} tokens; vLLM takes 2 to {limit - 1} "
                    "(max_model_len - 1)."
                )
        params = scoring_params()
        owner: dict[str, int] = {}
        result: list[list[float]] = [[] for _ in sequences]
        try:
            for position, ids in enumerate(sequences):
                self._num_requests += 1
                key = f"lightrl-{self._num_requests}"
                owner[key] = position
                with self._serving() as adapter:
                    adapter.add(key, {"prompt_token_ids": list(ids)}, params)
            while owner:
                for key, output in self._step(owner):
                    position = owner.pop(key)
                    pairs = zip(sequences[position][1:], output.prompt_logprobs[1:], strict=True)
                    result[position] = [float(entry[token].logprob) for token, entry in pairs]
        finally:
            if owner and self._adapter is not None:
                self._abort(list(owner))
        return result

    # -- weights ---------------------------------------------------------------------------------------------------

    takes_parts = True

    def load_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, partial: bool = False
    ) -> None:
        """See `Engine.load_weights`. Requests in flight go on with the new weights, their prefix computed again.

        Raises:
            ValueError: unknown names, or parameters of the engine that did not come; the message lists them.
            EngineDiedError: an engine process is gone.
        """
        self.policy_version = -1
        if self._asleep == 2:
            self.wake()
        with self._serving() as adapter:
            self._sender.push(named_tensors, partial=partial)
            self._wake_cache()
            adapter.reset_caches()
        self.policy_version = policy_version

    @property
    def takes_adapter(self) -> bool:
        return self._context is not None and adapter_rank(self, self._context) > 0

    def load_adapter(
        self, named_tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], *, policy_version: int
    ) -> None:
        """See `Engine.load_adapter`. Requests in flight go on with the new adapter, their prefix computed again."""
        self.policy_version = -1
        with self._serving() as adapter:
            self._wake_cache()
            adapter.load_lora(named_tensors, config)
            adapter.reset_caches()
        self.policy_version = policy_version

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
            self._sender.forget()

    def wake(self) -> None:
        if not self._asleep:
            return
        with self._serving() as adapter:
            if self._on_cuda:
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
                self._running().wake(["kv_cache"])

    @property
    def _on_cuda(self) -> bool:
        return self._context is not None and self._context.device.startswith("cuda")

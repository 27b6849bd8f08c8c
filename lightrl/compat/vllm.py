"""vLLM interface of the trainer, including undocumented parts of vLLM. Written for vLLM 0.32.

Builds `vllm.LLM` without side effects on the trainer's process, adds requests, runs steps, and calls workers.
`vllm_worker` is the workers' side, and `vllm_process` runs the engine in separate processes. tests/compat/test_vllm.py
lists the private names.
"""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightrl.compat.vllm_parsers import Grammars


class LostEngineError(Exception):
    """Raised if an engine process has died or doesn't respond."""


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Preserves the trainer's random states: vLLM reseeds all of them, and its sampler draws from them."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def scoped_environment(forced: Mapping[str, str], defaults: Mapping[str, str]) -> Iterator[None]:
    """Sets `forced`, and `defaults` not set by the user. Afterward, reverts all changes except vLLM's own variables.

    vLLM sets LOCAL_WORLD_SIZE, LD_PRELOAD, and others, which later child processes of the trainer would inherit. Its
    VLLM_ variables are kept: it reads them while it runs.
    """
    before = dict(os.environ)
    os.environ.update(forced)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    ours = {*forced, *defaults}
    try:
        yield
    finally:
        for name in {*os.environ, *before}:
            if name in ours or not name.startswith("VLLM_"):
                if name in before:
                    os.environ[name] = before[name]
                else:
                    os.environ.pop(name, None)


def _keep_process_group(keep: bool) -> None:
    """Keeps vLLM's shutdown from destroying the default process group if it is the trainer's."""
    import vllm.distributed.parallel_state as state

    original = getattr(state, "_lightrl_destroy", state.destroy_distributed_environment)
    state._lightrl_destroy = original

    def forget() -> None:
        if state._WORLD:
            state._WORLD.destroy()
        state._WORLD = None
        state._NODE_COUNT = None

    state.destroy_distributed_environment = forget if keep else original


class VLLMAdapter:
    """A running `vllm.LLM(**arguments)` in this process.

    `forced` and `defaults` are environment variables to set while it starts; the user's override `defaults`.
    """

    in_process = True
    pids: Sequence[int] = ()

    def __init__(self, arguments: Mapping[str, Any], *, forced: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        had_group = torch.distributed.is_initialized()
        set_num_threads = torch.set_num_threads
        forced = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not self.in_process)), **forced}
        defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **defaults}
        try:
            with isolated_rng(), scoped_environment(forced, defaults):
                from vllm import envs
                from vllm.platforms import current_platform

                envs.disable_envs_cache()  # an earlier engine cached the environment variables
                if current_platform.is_cpu():
                    # Inductor would compile the sampler's rank count even with enforce_eager, which takes 12 s.
                    type(current_platform).simple_compile_backend = "eager"
                _keep_process_group(had_group and self.in_process)
                self.llm = self._make(arguments)
        finally:
            torch.set_num_threads = set_num_threads  # the CPU worker makes it a no-op
        if self.in_process and not had_group:
            # Lightning mistakes vLLM's single-process group for a distributed run, ignores `sync_dist=True` because its
            # own strategy is not distributed, and then recommends it.
            warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist=True")
        self._lora: Any = None
        self.engine: Any = self.llm.llm_engine
        self.client: Any = self.engine.engine_core
        self.max_model_len: int = self.llm.model_config.max_model_len
        self.dtype: torch.dtype = self.llm.model_config.dtype
        self.model_class: str = self.llm.model_config.architecture
        self.attends_both_ways: bool = self.llm.model_config.is_mm_prefix_lm

    def _make(self, arguments: Mapping[str, Any]) -> Any:
        from vllm import LLM

        return LLM(**arguments)

    def guarded(self) -> AbstractContextManager[None]:
        """Context manager of calls to the engine, which raise a `LostEngineError` if it is dead."""
        return nullcontext()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a worker method; returns one result per worker."""
        return list(self.llm.collective_rpc(method, args=args))

    def push(self, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Loads tensors by name into the workers' models; returns error texts."""
        return [error for error in self.rpc("lightrl_load", tensors) if error]

    def add(self, request_id: str, prompt: Mapping[str, Any], params: Any) -> None:
        """Queues a request; its output has this ID."""
        self.engine.add_request(request_id, prompt, params, lora_request=self._lora)

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars of constrained requests."""
        from lightrl.compat.vllm_parsers import Grammars

        return Grammars(self.engine)

    def step(self) -> list[Any]:
        """Runs the engine for one step; returns finished requests."""
        # A separate engine process draws no random numbers here, and this may not be the trainer's thread.
        with isolated_rng() if self.in_process else nullcontext():
            return [output for output in self.engine.step() if output.finished]

    def load_lora(self, path: str) -> None:
        """Replaces the adapter used by all requests with the one in a directory."""
        from vllm.lora.request import LoRARequest

        self.engine.add_lora(LoRARequest("policy", 1, path, load_inplace=True))
        self._lora = LoRARequest("policy", 1, path)

    def abort(self, request_ids: list[str]) -> None:
        """Cancels requests."""
        self.engine.abort_request(request_ids)

    def so_far(self, request_ids: list[str]) -> dict[str, Any]:
        """Returns partial results of requests by ID, with the finish reason "abort"."""
        from vllm.v1.engine import FinishReason

        processor, outputs = self.engine.output_processor, dict[str, Any]()
        for request_id in request_ids:
            for internal in processor.external_req_ids.get(request_id, []):
                state = processor.request_states[internal]
                outputs[request_id] = state.make_request_output([], None, FinishReason.ABORT, None)
        return outputs

    def pause(self) -> list[Any]:
        """Pauses between two steps, keeping the requests; returns finished ones."""
        return []

    def resume(self) -> None:
        """Continues after `pause`."""

    def counts(self) -> dict[str, int]:
        """Returns the number of sampled tokens of each unfinished request."""
        states = self.engine.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    def decode(self, token_ids: list[int]) -> str:
        """Decodes tokens, without special tokens."""
        return str(self.llm.get_tokenizer().decode(token_ids, skip_special_tokens=True))

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.engine.has_unfinished_requests())

    def reset_caches(self) -> None:
        """Drops everything computed with old weights, in the order that keeps multimodal requests alive.

        Requests in flight recompute their prefix with the new weights.
        """
        if self.llm.model_config.is_multimodal_model:
            self.llm.reset_mm_cache()
            self.engine.reset_encoder_cache()
        if not self.engine.reset_prefix_cache(reset_running_requests=self.busy):
            raise RuntimeError("vLLM did not drop its prefix cache; log-probs would mix old and new weights.")

    def sleep(self, level: int) -> None:
        """Enters vLLM's sleep mode (CUDA): 1 moves weights to host memory, 2 drops them. Both drop the KV cache."""
        self.llm.sleep(level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        """Leaves sleep mode, for everything or only for "weights" or "kv_cache"."""
        self.llm.wake_up(tags=tags)

    def close(self, *, dead: bool = False) -> None:
        """Ends the engine. `dead` means that it is already lost."""
        with isolated_rng():
            self.client.shutdown()
        del self.llm, self.engine, self.client
        gc.collect()  # it used this process's memory

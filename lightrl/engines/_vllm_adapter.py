"""The one place on the trainer's side that touches vLLM's internals. Written for vLLM 0.32.

Builds `vllm.LLM` without side effects on the trainer's process, adds requests and steps, calls workers, sees an
engine die, and ends every process it started.
"""

from __future__ import annotations

import gc
import os
import queue
import random
import signal
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrl.engines._vllm_lora import AdapterFolder
from lightrl.engines.base import EngineDiedError

__all__ = ["POLL_SECONDS", "TRAINER_PID", "VLLMAdapter", "isolated_rng"]

TRAINER_PID = "LIGHTRL_TRAINER_PID"
"""Environment variable by which an engine process knows whose death it must not outlive."""

POLL_SECONDS = 0.5
"""How often whoever waits for the engine looks whether it lives."""
_CLOSE_SECONDS = 5.0


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Leaves the trainer's random states as they were: vLLM reseeds all of them, and its sampler draws from them."""
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
    """Sets `forced`, and `defaults` where the user did not; afterwards takes back every change but vLLM's own.

    vLLM writes LOCAL_WORLD_SIZE, LD_PRELOAD and others, which later child processes of the trainer would inherit. Its
    VLLM_ variables stay: it reads them while it runs.
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
    """Makes vLLM's shutdown leave the default process group alone when it is the trainer's, not the engine's."""
    import vllm.distributed.parallel_state as state

    original = getattr(state, "_lightrl_destroy", state.destroy_distributed_environment)
    state._lightrl_destroy = original

    def forget() -> None:
        if state._WORLD:
            state._WORLD.destroy()
        state._WORLD = None
        state._NODE_COUNT = None

    state.destroy_distributed_environment = forget if keep else original


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started within never see SIGINT: a terminal sends it to all, and the trainer decides what it means.

    A blocked signal stays blocked in children, whatever handlers vLLM installs there. In this process it comes later.
    """
    resource_tracker.ensure_running()  # where it starts only now, it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _deaths() -> Iterator[None]:
    """Turns vLLM's word for a dead engine into ours."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDiedError(
            "A vLLM engine process is gone (killed, out of memory, or crashed; its own message stands above, more with "
            "VLLM_LOGGING_LEVEL=INFO). Nothing can be sampled until the engine is started and its weights pushed again."
        ) from error


class VLLMAdapter:
    """A running `vllm.LLM`.

    Args:
        arguments: of `vllm.LLM`.
        in_process: engine in this process, or in processes of its own.
        forced: environment variables while the engine starts.
        defaults: the same, but the user's own values win.
    """

    def __init__(
        self, arguments: Mapping[str, Any], *, in_process: bool, forced: Mapping[str, str], defaults: Mapping[str, str]
    ) -> None:
        self.in_process = in_process
        had_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        set_num_threads = torch.set_num_threads
        forced = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            TRAINER_PID: str(os.getpid()),
            **forced,
        }
        defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **defaults}
        try:
            with isolated_rng(), scoped_environment(forced, defaults):
                from vllm import LLM, envs
                from vllm.platforms import current_platform

                envs.disable_envs_cache()  # an earlier engine froze the variables as they were for it
                if current_platform.is_cpu():
                    # The sampler's rank count is compiled by inductor even with enforce_eager: 12 s for nothing.
                    type(current_platform).simple_compile_backend = "eager"
                _keep_process_group(had_group and in_process)
                with nullcontext() if in_process else _deaf_to_ctrl_c():
                    self.llm: Any = LLM(**arguments)
        finally:
            torch.set_num_threads = set_num_threads  # the CPU worker makes it a no-op
        if in_process and not had_group:
            # Lightning takes vLLM's group of one process for a distributed run, drops `sync_dist=True` because its own
            # strategy is not, and then asks for it.
            warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist=True")
        self._lora: Any = None
        self._lora_folder: AdapterFolder | None = None
        self.engine: Any = self.llm.llm_engine
        self.client: Any = self.engine.engine_core
        self.max_model_len: int = self.llm.model_config.max_model_len
        self.dtype: torch.dtype = self.llm.model_config.dtype
        if not in_process:
            self._notice_death()
        self.pids: list[int] = [] if in_process else self._processes()

    def _processes(self) -> list[int]:
        manager = self.client.resources.engine_manager
        cores = [process.pid for process in manager.processes] if manager is not None else []
        return sorted({*cores, *self.rpc("lightrl_pid")})

    def _notice_death(self) -> None:
        """vLLM's client waits for ever on a killed core; let it look up twice a second whether the core lives."""
        client = self.client

        def get_output() -> Any:
            while True:
                try:
                    output = client.outputs_queue.get(timeout=POLL_SECONDS)
                    break
                except queue.Empty:
                    client.ensure_alive()
            if isinstance(output, Exception):
                raise client._format_exception(output) from None
            if output.wave_complete is not None:
                client.engines_running = False
            return output

        client.get_output = get_output
        client.call_utility = lambda method, *args: self._submit_utility(method, *args)()

    def _submit_utility(self, method: str, *args: Any) -> Callable[[], Any]:
        from vllm.v1.engine import EngineCoreRequestType

        client, future, call_id = self.client, Future[Any](), uuid.uuid1().int >> 64
        client.utility_results[call_id] = future
        client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, method, args))

        def wait() -> Any:
            while True:
                try:
                    return future.result(timeout=POLL_SECONDS)
                except FutureTimeoutError:
                    if future.done():
                        raise
                    client.ensure_alive()

        return wait

    def submit(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Starts a worker method; the returned function waits for the workers' answers."""
        if self.in_process:
            answers = self.llm.collective_rpc(method, args=args)
            return lambda: answers
        with _deaths():
            wait = self._submit_utility("collective_rpc", method, None, args, None)

        def answer() -> list[Any]:
            from vllm.v1.engine.exceptions import EngineDeadError

            with _deaths():
                try:
                    return list(wait())
                except Exception as error:  # our worker methods do not raise: a call that failed lost its worker
                    raise EngineDeadError from error

        return answer

    def check_alive(self) -> None:
        """Raises `EngineDiedError` where an engine process is gone."""
        with _deaths():
            self.client.ensure_alive()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """One answer per worker."""
        return self.submit(method, *args)()

    def add(self, request_id: str, prompt: Mapping[str, Any], params: Any) -> str:
        """Queues a request and returns the id under which its output will come."""
        with _deaths():
            self.engine.add_request(request_id, prompt, params, lora_request=self._lora)
        return request_id

    def step(self) -> list[Any]:
        """Runs the engine once (in its own process: waits for its next news); finished requests."""
        # An engine of its own process draws no random numbers here, and its thread may not be the trainer's.
        with _deaths(), isolated_rng() if self.in_process else nullcontext():
            return [output for output in self.engine.step() if output.finished]

    def load_lora(self, tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]) -> None:
        """Replaces the adapter that all requests use from now on."""
        from vllm.lora.request import LoRARequest

        self._lora_folder = self._lora_folder or AdapterFolder()
        self._lora_folder.write(tensors, config)
        path = self._lora_folder.path
        with _deaths():
            self.engine.add_lora(LoRARequest("policy", 1, path, load_inplace=True))
        self._lora = LoRARequest("policy", 1, path)

    def abort(self, request_ids: list[str]) -> None:
        """Drops requests."""
        with _deaths():
            self.engine.abort_request(request_ids)

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self.engine.has_unfinished_requests())

    def reset_caches(self) -> None:
        """Drops everything computed by old weights, in the order that keeps multimodal requests alive.

        Requests in flight start their prefix over with the new weights.
        """
        with _deaths():
            if self.llm.model_config.is_multimodal_model:
                self.llm.reset_mm_cache()
                self.engine.reset_encoder_cache()
            if not self.engine.reset_prefix_cache(reset_running_requests=self.busy):
                raise RuntimeError("vLLM did not drop its prefix cache; log-probs would mix old and new weights.")

    def sleep(self, level: int) -> None:
        """vLLM's sleep mode (CUDA): 1 weights to host memory, 2 weights dropped; the KV cache is dropped by both."""
        with _deaths():
            self.llm.sleep(level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        """Undoes `sleep`, wholly or for "weights" or "kv_cache" alone."""
        with _deaths():
            self.llm.wake_up(tags=tags)

    def close(self, *, dead: bool = False) -> None:
        """Ends the engine and waits until each of its processes is gone, killing those that stay.

        With `dead` a process is missing already: what is left gets no time to say goodbye.
        """
        import psutil  # type: ignore[import-untyped]

        processes = [psutil.Process(pid) for pid in self.pids if psutil.pid_exists(pid)]
        if dead:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        try:
            with isolated_rng():
                self.client.shutdown()
        finally:
            if self._lora_folder is not None:
                self._lora_folder.remove()
            _, left = psutil.wait_procs(processes, timeout=_CLOSE_SECONDS)
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=_CLOSE_SECONDS)
            del self.llm, self.engine, self.client
            gc.collect()

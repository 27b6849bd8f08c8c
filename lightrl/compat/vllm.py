"""What LightRL uses of vLLM beyond its documented interface, on the trainer's side. Written for vLLM 0.32.

Builds `vllm.LLM` without side effects on the trainer's process, adds requests and steps, calls workers, sees an
engine die or hang, and ends every process it started. Which private names are used and why stands in `PRIVATE`, which
a test compares with the installed vLLM; the workers' side is in `vllm_worker`.
"""

from __future__ import annotations

import gc
import mmap
import os
import queue
import random
import shutil
import signal
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightrl.compat.torch import page_lock

if TYPE_CHECKING:
    from lightrl.compat.vllm_grammars import Grammars

PRIVATE = {
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": "requests of our own ids join while others run",
    "vllm.v1.engine.llm_engine:LLMEngine.step": "groups come out as they finish",
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": "cancelled and abandoned requests",
    "vllm.v1.engine.output_processor:OutputProcessor.__init__": "request_states has what came of a request so far",
    "vllm.v1.engine.output_processor:RequestState.make_request_output": "that as an output, as for an aborted request",
    "vllm.v1.engine:FinishReason.ABORT": "which such an output has",
    "vllm.v1.engine.core:EngineCoreProc.pause_scheduler": "weights change between two steps, requests stay",
    "vllm.v1.engine.core:EngineCoreProc.resume_scheduler": "and go on",
    "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests": "whether requests are in flight",
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": "keys and values of old weights",
    "vllm.v1.engine.llm_engine:LLMEngine.reset_encoder_cache": "pictures seen by old weights",
    "vllm.v1.engine.llm_engine:LLMEngine.add_lora": "a new adapter in place of the old one",
    "vllm.v1.engine.core_client:SyncMPClient.get_output": "replaced: it waits for ever for a dead or stopped core",
    "vllm.v1.engine.core_client:SyncMPClient.call_utility": "replaced for the same reason",
    "vllm.v1.engine.core_client:SyncMPClient._send_input": "asks the core for a call without waiting",
    "vllm.v1.engine.core_client:MPClient._format_exception": "what the replaced get_output calls",
    "vllm.v1.engine.core_client:MPClient.ensure_alive": "whether the core lives",
    "vllm.v1.engine.core_client:MPClient.shutdown": "ends the core's process",
    "vllm.v1.engine.core_client:InprocClient.shutdown": "ends an engine in the trainer's process",
    "vllm.v1.engine.core_client:BackgroundResources": "engine_manager has the core's processes",
    "vllm.v1.engine:EngineCoreRequestType.UTILITY": "what a call is sent as",
    "vllm.v1.engine.exceptions:EngineDeadError": "vLLM's error for a dead core",
    "vllm.distributed.parallel_state:destroy_distributed_environment": "replaced: it ends the trainer's process group",
    "vllm.envs:disable_envs_cache": "an earlier engine froze the environment variables",
    "vllm.platforms:current_platform": "simple_compile_backend: the CPU sampler compiles for 12 s",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": "a CPU engine of one process",
    "vllm.distributed.weight_transfer.nccl_common:trainer_init": "the trainer's end of a server's weight transfer",
}
"""Private and undocumented names of vLLM ("module:attribute") and what they are used for."""

TRAINER_PID = "LIGHTRL_TRAINER_PID"
"""Environment variable by which an engine process knows whose death it must not outlive."""

POLL_SECONDS = 0.5
"""How often whoever waits for the engine looks whether it lives."""
_CLOSE_SECONDS = 4.0
_KILL_SECONDS = 2.0


class LostEngineError(Exception):
    """An engine process is gone, or gives no sign of life."""


def shared_path(descriptor: int) -> str:
    """Where another process of the same user may open a file descriptor of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def map_shared(descriptor: int, nbytes: int) -> Tensor:
    """The file's memory as bytes, page-locked in a process that uses CUDA for as long as the tensor is there."""
    memory = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    page_lock(memory)
    return memory


def transfer_group(host: str, port: int, size: int) -> Any:
    """Rank 0 of a group with a server's workers; anything with `broadcast(tensor, src)`."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init({"master_address": host, "master_port": port, "world_size": size})


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
def _ctrl_c_blocked() -> Iterator[None]:
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
def _deaths_translated() -> Iterator[None]:
    """Turns vLLM's error for a dead engine into ours."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise LostEngineError(
            "A vLLM engine process is gone (killed, out of memory, or crashed; its own message stands above, more with "
            "VLLM_LOGGING_LEVEL=INFO). Nothing can be sampled until the engine is started and its weights pushed again."
        ) from error


def _no_life(seconds: float) -> str:
    return (
        f"vLLM's engine gave no sign of life for {seconds:g} s (VLLMEngine.progress_timeout): it hangs or was stopped, "
        "and is ended. Look at its log (VLLM_LOGGING_LEVEL=INFO) and at the machine's memory; raise progress_timeout "
        "where a single step may take longer."
    )


class _GaveUpError(Exception):
    """Nobody waits for the engine's output any more."""


class VLLMAdapter:
    """A running `vllm.LLM`.

    Args:
        arguments: of `vllm.LLM`.
        in_process: engine in this process, or in processes of its own.
        forced: environment variables while the engine starts.
        defaults: the same, but the user's own values win.
        progress_timeout: seconds without a sign of life, while an answer is waited for, after which engine processes
            count as lost; None waits for ever.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        in_process: bool,
        forced: Mapping[str, str],
        defaults: Mapping[str, str],
        progress_timeout: float | None,
    ) -> None:
        self.in_process = in_process
        self.progress_timeout = progress_timeout
        self._give_up: Callable[[], bool] = lambda: False
        had_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        set_num_threads = torch.set_num_threads
        forced = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            TRAINER_PID: str(os.getpid()),
            **forced,
        }
        self._sockets = None if in_process else tempfile.mkdtemp(prefix="vllm-")  # those of a killed process stay
        if self._sockets is not None:
            forced["VLLM_RPC_BASE_PATH"] = self._sockets
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
                with nullcontext() if in_process else _ctrl_c_blocked():
                    self.llm: Any = LLM(**arguments)
        except BaseException:
            self._remove_sockets()
            raise
        finally:
            torch.set_num_threads = set_num_threads  # the CPU worker makes it a no-op
        if in_process and not had_group:
            # Lightning takes vLLM's group of one process for a distributed run, drops `sync_dist=True` because its own
            # strategy is not, and then asks for it.
            warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist=True")
        self._lora: Any = None
        self.engine: Any = self.llm.llm_engine
        self.client: Any = self.engine.engine_core
        self.max_model_len: int = self.llm.model_config.max_model_len
        self.dtype: torch.dtype = self.llm.model_config.dtype
        self.model_class: str = self.llm.model_config.architecture
        self.attends_both_ways: bool = getattr(self.llm.model_config, "is_mm_prefix_lm", False)
        if not in_process:
            self._bound_waits()
        self.pids: list[int] = [] if in_process else self._processes()

    def _remove_sockets(self) -> None:
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _processes(self) -> list[int]:
        manager = self.client.resources.engine_manager
        cores = [process.pid for process in manager.processes] if manager is not None else []
        return sorted({*cores, *self.rpc("lightrl_pid")})

    def watch(self, seconds: float | None = None) -> Callable[[], None]:
        """A function for who waits to call now and then.

        It raises `LostEngineError` once an engine process is gone, or so many seconds have passed (the engine's
        `progress_timeout` where None).
        """
        limit = self.progress_timeout if seconds is None else seconds
        begin = time.monotonic()

        def look() -> None:
            with _deaths_translated():
                self.client.ensure_alive()
            if limit is not None and time.monotonic() - begin > limit:
                raise LostEngineError(_no_life(limit))

        return look

    def _bound_waits(self) -> None:
        """vLLM's client waits for ever on a core that is gone or hangs; let it look up twice a second."""
        client = self.client

        def get_output() -> Any:
            look = self.watch()
            while True:
                try:
                    output = client.outputs_queue.get(timeout=POLL_SECONDS)
                    break
                except queue.Empty:
                    look()
                    if self._give_up():
                        raise _GaveUpError from None
            if isinstance(output, Exception):
                raise client._format_exception(output) from None
            if output.wave_complete is not None:
                client.engines_running = False
            return output

        client.get_output = get_output
        client.call_utility = lambda method, *args: self._submit_utility(method, *args)()

    def _submit_utility(self, method: str, *args: Any) -> Callable[..., Any]:
        from vllm.v1.engine import EngineCoreRequestType

        client, future, call_id = self.client, Future[Any](), uuid.uuid1().int >> 64
        client.utility_results[call_id] = future
        client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, method, args))

        def wait(seconds: float | None = None) -> Any:
            look = self.watch(seconds)
            while True:
                try:
                    return future.result(timeout=POLL_SECONDS)
                except FutureTimeoutError:
                    if future.done():
                        raise
                    look()

        return wait

    def submit(self, method: str, *args: Any) -> Callable[..., list[Any]]:
        """Starts a worker method; the returned function waits for the workers' answers, at most the given seconds."""
        if self.in_process:
            answers = self.llm.collective_rpc(method, args=args)
            return lambda seconds=None: answers
        with _deaths_translated():
            wait = self._submit_utility("collective_rpc", method, None, args, None)

        def answer(seconds: float | None = None) -> list[Any]:
            from vllm.v1.engine.exceptions import EngineDeadError

            with _deaths_translated():
                try:
                    return list(wait(seconds))
                except LostEngineError:
                    raise
                except Exception as error:  # our worker methods do not raise: a call that failed lost its worker
                    raise EngineDeadError from error

        return answer

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """One answer per worker."""
        return self.submit(method, *args)()

    def add(self, request_id: str, prompt: Mapping[str, Any], params: Any) -> None:
        """Queues a request, whose output will come under this id."""
        with _deaths_translated():
            self.engine.add_request(request_id, prompt, params, lora_request=self._lora)

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars of constrained requests."""
        from lightrl.compat.vllm_grammars import Grammars

        return Grammars(self.engine)

    def step(self, give_up: Callable[[], bool] = lambda: False) -> list[Any]:
        """Runs the engine once; finished requests.

        Args:
            give_up: asked now and then while an engine of its own process is waited for; True ends the wait.
        """
        self._give_up = give_up
        # An engine of its own process draws no random numbers here, and its thread may not be the trainer's.
        with _deaths_translated(), isolated_rng() if self.in_process else nullcontext():
            try:
                return [output for output in self.engine.step() if output.finished]
            except _GaveUpError:
                return []

    def load_lora(self, path: str) -> None:
        """Replaces the adapter that all requests use from now on by that in a folder."""
        from vllm.lora.request import LoRARequest

        with _deaths_translated():
            self.engine.add_lora(LoRARequest("policy", 1, path, load_inplace=True))
        self._lora = LoRARequest("policy", 1, path)

    def abort(self, request_ids: list[str]) -> None:
        """Drops requests."""
        with _deaths_translated():
            self.engine.abort_request(request_ids)

    def so_far(self, request_ids: list[str]) -> dict[str, Any]:
        """What has come of requests, by their id, with the finish reason "abort"."""
        from vllm.v1.engine import FinishReason

        processor, outputs = self.engine.output_processor, dict[str, Any]()
        for request_id in request_ids:
            for internal in processor.external_req_ids.get(request_id, []):
                state = processor.request_states[internal]
                outputs[request_id] = state.make_request_output([], None, FinishReason.ABORT, None)
        return outputs

    def pause(self) -> list[Any]:
        """Stops an engine of its own process between two steps, its requests as they are; those that finished."""
        finished: list[Any] = []
        if not self.in_process:
            with _deaths_translated():
                self._submit_utility("pause_scheduler", "keep", False)()
            while not self.client.outputs_queue.empty():  # of the steps before
                finished += self.step()
        return finished

    def resume(self) -> None:
        """Undoes `pause`."""
        if not self.in_process:
            with _deaths_translated():
                self._submit_utility("resume_scheduler")()

    def counts(self) -> dict[str, int]:
        """How many tokens have come of each unfinished request."""
        states = self.engine.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, without special ones."""
        return str(self.llm.get_tokenizer().decode(token_ids, skip_special_tokens=True))

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self.engine.has_unfinished_requests())

    def reset_caches(self) -> None:
        """Drops everything computed by old weights, in the order that keeps multimodal requests alive.

        Requests in flight start their prefix over with the new weights.
        """
        with _deaths_translated():
            if self.llm.model_config.is_multimodal_model:
                self.llm.reset_mm_cache()
                self.engine.reset_encoder_cache()
            if not self.engine.reset_prefix_cache(reset_running_requests=self.busy):
                raise RuntimeError("vLLM did not drop its prefix cache; log-probs would mix old and new weights.")

    def sleep(self, level: int) -> None:
        """vLLM's sleep mode (CUDA): 1 weights to host memory, 2 weights dropped; the KV cache is dropped by both."""
        with _deaths_translated():
            self.llm.sleep(level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        """Undoes `sleep`, wholly or for "weights" or "kv_cache" alone."""
        with _deaths_translated():
            self.llm.wake_up(tags=tags)

    def close(self, *, dead: bool = False) -> None:
        """Ends the engine and waits until each of its processes is gone, killing those that stay; within 6 s.

        With `dead` the engine is lost already, and what is left of it is killed at once, as is a stopped process.
        """
        import psutil  # type: ignore[import-untyped]

        end = time.monotonic() + _CLOSE_SECONDS
        processes = [psutil.Process(pid) for pid in self.pids if psutil.pid_exists(pid)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if dead or process.status() == psutil.STATUS_STOPPED:
                    process.kill()
        try:
            with isolated_rng():
                self.client.shutdown(timeout=_CLOSE_SECONDS)
        finally:
            _, left = psutil.wait_procs(processes, timeout=max(end - time.monotonic(), 0.0))
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=_KILL_SECONDS)
            del self.llm, self.engine, self.client
            self._remove_sockets()
            if self.in_process:  # what it held is memory of this process; collecting takes seconds on a busy machine
                gc.collect()

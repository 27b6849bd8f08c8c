"""vLLM interface of the trainer, beyond vLLM's documented one. Written for vLLM 0.32.

Builds `vllm.LLM` without side effects on the trainer's process, adds requests, runs steps, calls workers, detects dead
or hanging engines, and ends every process it started. A test compares the private names in `PRIVATE` with the installed
vLLM. `vllm_worker` is the workers' side.
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
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": "adds requests with our own IDs while others run",
    "vllm.v1.engine.llm_engine:LLMEngine.step": "returns groups as they finish",
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": "cancels requests",
    "vllm.v1.engine.output_processor:OutputProcessor.__init__": "request_states has partial results",
    "vllm.v1.engine.output_processor:RequestState.make_request_output": "partial results as an output",
    "vllm.v1.engine:FinishReason.ABORT": "finish reason of such an output",
    "vllm.v1.engine.core:EngineCoreProc.pause_scheduler": "changes weights between two steps, keeping requests",
    "vllm.v1.engine.core:EngineCoreProc.resume_scheduler": "continues requests",
    "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests": "whether requests are in flight",
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": "drops keys and values of old weights",
    "vllm.v1.engine.llm_engine:LLMEngine.reset_encoder_cache": "drops image features of old weights",
    "vllm.v1.engine.llm_engine:LLMEngine.add_lora": "replaces the adapter",
    "vllm.v1.engine.core_client:SyncMPClient.get_output": "replaced: it waits forever for a dead or stopped core",
    "vllm.v1.engine.core_client:SyncMPClient.call_utility": "replaced for the same reason",
    "vllm.v1.engine.core_client:SyncMPClient._send_input": "calls the core without waiting",
    "vllm.v1.engine.core_client:MPClient._format_exception": "called by the replaced get_output",
    "vllm.v1.engine.core_client:MPClient.ensure_alive": "whether the core is alive",
    "vllm.v1.engine.core_client:MPClient.shutdown": "ends the core's process",
    "vllm.v1.engine.core_client:InprocClient.shutdown": "ends an engine in the trainer's process",
    "vllm.v1.engine.core_client:BackgroundResources": "engine_manager has the core's processes",
    "vllm.v1.engine:EngineCoreRequestType.UTILITY": "message type of a call",
    "vllm.v1.engine.exceptions:EngineDeadError": "vLLM's error for a dead core",
    "vllm.distributed.parallel_state:destroy_distributed_environment": "replaced: it ends the trainer's process group",
    "vllm.envs:disable_envs_cache": "an earlier engine froze the environment variables",
    "vllm.platforms:current_platform": "simple_compile_backend: compiling the CPU sampler takes 12 s",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": "single-process CPU engine",
    "vllm.distributed.weight_transfer.nccl_common:trainer_init": "the trainer's side of a server's weight transfer",
}
"""Private and undocumented names of vLLM ("module:attribute"), and what they are used for."""

TRAINER_PID = "LIGHTRL_TRAINER_PID"
"""Environment variable with the trainer's process ID. Engine processes exit when that process does."""

POLL_SECONDS = 0.5
"""Interval of checks whether the engine is alive."""
_CLOSE_SECONDS = 4.0
_KILL_SECONDS = 2.0


class LostEngineError(Exception):
    """An engine process has died or doesn't respond."""


def shared_path(descriptor: int) -> str:
    """Returns the path through which another process of the same user can open this process's file descriptor."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def map_shared(descriptor: int, nbytes: int) -> Tensor:
    """Maps the file's memory as bytes, page-locked while the tensor exists if this process uses CUDA."""
    memory = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
    page_lock(memory)
    return memory


def transfer_group(host: str, port: int, size: int) -> Any:
    """Returns rank 0 of a group with a server's workers, an object with `broadcast(tensor, src)`."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init({"master_address": host, "master_port": port, "world_size": size})


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


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Blocks SIGINT in processes started within: a terminal sends it to all, and the trainer handles it.

    A blocked signal stays blocked in child processes, regardless of vLLM's handlers. This process receives it later.
    """
    resource_tracker.ensure_running()  # it would unblock the signal if it started within
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _deaths_translated() -> Iterator[None]:
    """Converts vLLM's error for a dead engine to `LostEngineError`."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise LostEngineError(
            "A vLLM engine process has died (killed, out of memory, or crashed). Sampling needs a restarted engine "
            "with synchronized weights. See its error above, or set VLLM_LOGGING_LEVEL=INFO."
        ) from error


def _no_life(seconds: float) -> str:
    return (
        f"VLLMEngine.progress_timeout={seconds:g}: vLLM's engine did not respond for that many seconds and was killed. "
        "Check its log (VLLM_LOGGING_LEVEL=INFO) and the node's memory, or raise progress_timeout if a step may take "
        "longer."
    )


class _GaveUpError(Exception):
    """The caller stopped waiting for the engine's output."""


class VLLMAdapter:
    """A running `vllm.LLM`.

    Args:
        arguments: Arguments of `vllm.LLM`.
        in_process: Run the engine in this process instead of separate ones.
        forced: Environment variables to set while the engine starts.
        defaults: Environment variables to set unless the user has set them.
        progress_timeout: Seconds without a response, while waiting for one, after which engine processes count as lost.
            None waits forever.
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
        self._sockets = None if in_process else tempfile.mkdtemp(prefix="vllm-")  # killed processes leave sockets
        if self._sockets is not None:
            forced["VLLM_RPC_BASE_PATH"] = self._sockets
        defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **defaults}
        try:
            with isolated_rng(), scoped_environment(forced, defaults):
                from vllm import LLM, envs
                from vllm.platforms import current_platform

                envs.disable_envs_cache()  # an earlier engine cached the environment variables
                if current_platform.is_cpu():
                    # Inductor would compile the sampler's rank count even with enforce_eager, which takes 12 s.
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
            # Lightning mistakes vLLM's single-process group for a distributed run, ignores `sync_dist=True` because its
            # own strategy is not distributed, and then recommends it.
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
        """Returns a function to call periodically while waiting.

        It raises `LostEngineError` if an engine process has died, or after `seconds`. Defaults to the engine's
        `progress_timeout`.
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
        """Makes vLLM's client check twice a second for a dead or hanging core instead of waiting forever."""
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
        """Starts a worker method. The returned function waits for the results, at most the given seconds."""
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
                except Exception as error:  # our worker methods don't raise, so a failed call has lost its worker
                    raise EngineDeadError from error

        return answer

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a worker method; returns one result per worker."""
        return self.submit(method, *args)()

    def add(self, request_id: str, prompt: Mapping[str, Any], params: Any) -> None:
        """Queues a request; its output has this ID."""
        with _deaths_translated():
            self.engine.add_request(request_id, prompt, params, lora_request=self._lora)

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars of constrained requests."""
        from lightrl.compat.vllm_grammars import Grammars

        return Grammars(self.engine)

    def step(self, give_up: Callable[[], bool] = lambda: False) -> list[Any]:
        """Runs the engine for one step; returns finished requests.

        Args:
            give_up: Function called periodically while waiting for a separate engine process. Returning True ends the
                wait.
        """
        self._give_up = give_up
        # A separate engine process draws no random numbers here, and this may not be the trainer's thread.
        with _deaths_translated(), isolated_rng() if self.in_process else nullcontext():
            try:
                return [output for output in self.engine.step() if output.finished]
            except _GaveUpError:
                return []

    def load_lora(self, path: str) -> None:
        """Replaces the adapter used by all requests with the one in a directory."""
        from vllm.lora.request import LoRARequest

        with _deaths_translated():
            self.engine.add_lora(LoRARequest("policy", 1, path, load_inplace=True))
        self._lora = LoRARequest("policy", 1, path)

    def abort(self, request_ids: list[str]) -> None:
        """Cancels requests."""
        with _deaths_translated():
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
        """Pauses a separate engine process between two steps, keeping its requests; returns finished ones."""
        finished: list[Any] = []
        if not self.in_process:
            with _deaths_translated():
                self._submit_utility("pause_scheduler", "keep", False)()
            while not self.client.outputs_queue.empty():  # outputs of earlier steps
                finished += self.step()
        return finished

    def resume(self) -> None:
        """Continues after `pause`."""
        if not self.in_process:
            with _deaths_translated():
                self._submit_utility("resume_scheduler")()

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
        with _deaths_translated():
            if self.llm.model_config.is_multimodal_model:
                self.llm.reset_mm_cache()
                self.engine.reset_encoder_cache()
            if not self.engine.reset_prefix_cache(reset_running_requests=self.busy):
                raise RuntimeError("vLLM did not drop its prefix cache; log-probs would mix old and new weights.")

    def sleep(self, level: int) -> None:
        """Enters vLLM's sleep mode (CUDA): 1 moves weights to host memory, 2 drops them. Both drop the KV cache."""
        with _deaths_translated():
            self.llm.sleep(level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        """Leaves sleep mode, for everything or only for "weights" or "kv_cache"."""
        with _deaths_translated():
            self.llm.wake_up(tags=tags)

    def close(self, *, dead: bool = False) -> None:
        """Ends the engine and waits up to 6 s for its processes to exit, then kills them.

        With `dead`, the engine is already lost; remaining processes, including stopped ones, are killed at once.
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
            if self.in_process:  # it used this process's memory; garbage collection takes seconds on a busy node
                gc.collect()

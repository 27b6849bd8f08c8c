"""vLLM in separate processes: calls that don't wait forever, weight pushes through shared memory, and the end of every
process. Written for vLLM 0.32.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from lightrl.compat.torch import map_shared
from lightrl.compat.vllm import LostEngineError, VLLMAdapter, isolated_rng

TRAINER_PID = "LIGHTRL_TRAINER_PID"
"""Environment variable with the trainer's process ID. Engine processes exit when that process does."""

_POLL_SECONDS = 0.5  # interval of checks whether the engine is alive
_CLOSE_SECONDS = 4.0
_KILL_SECONDS = 2.0
_BUCKET_BYTES = 32 << 20
_ALIGNMENT = 64


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


class _Bucket:
    """A block of memory shared by trainer and workers."""

    def __init__(self, adapter: SeparateAdapter, slot: int) -> None:
        self.adapter = adapter
        self.slot = slot
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._answers: Callable[[], list[Any]] | None = None
        self.clear()

    def clear(self) -> list[str]:
        """Waits until the workers have copied the tensors, and clears the bucket. Returns errors."""
        answers, self._answers = self._answers, None
        self.layout: list[tuple[str, str, list[int], int, int]] = []  # name, dtype, shape, offset, and size in bytes
        self.used = 0
        self.filled_by: set[torch.device] = set()
        return [] if answers is None else [error for error in answers() if error]

    def allocate(self, nbytes: int) -> None:
        """Allocates `nbytes` of shared memory and maps it into all workers."""
        # An anonymous file is not limited by /dev/shm and disappears with its last user.
        descriptor = os.memfd_create(f"lightrl-weights-{self.slot}")
        try:
            os.ftruncate(descriptor, nbytes)
            self.memory = map_shared(descriptor, nbytes)
            self.adapter.rpc("lightrl_attach", self.slot, f"/proc/{os.getpid()}/fd/{descriptor}", nbytes)
        finally:
            os.close(descriptor)

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, nbytes: int) -> None:
        """Appends a copy of a tensor."""
        view = self.memory[self.used : self.used + nbytes].view(dtype).view(tensor.shape)
        # Copies from a GPU are asynchronous, with the cast on the GPU; `send` waits for them.
        view.copy_(tensor, non_blocking=tensor.is_cuda)
        self.filled_by.add(tensor.device)
        self.layout.append((name, str(dtype).removeprefix("torch."), list(tensor.shape), self.used, nbytes))
        self.used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def send(self) -> None:
        """Tells the workers to copy the tensors, without waiting for them."""
        for device in self.filled_by:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        if self.layout:
            self._answers = self.adapter.submit("lightrl_load_bucket", self.slot, self.layout)


class SeparateAdapter(VLLMAdapter):
    """A running `vllm.LLM` whose engine has separate processes. See `VLLMAdapter` for the other arguments.

    A weight push fills two buckets of shared, pinned host memory in turn: the workers copy one while the trainer fills
    the other. Each has 32 MiB or the size of the largest tensor. Engine processes count as lost `progress_timeout`
    seconds after their last response, while waiting for one. None waits forever.
    """

    in_process = False

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        forced: Mapping[str, str],
        defaults: Mapping[str, str],
        progress_timeout: float | None,
    ) -> None:
        self.progress_timeout = progress_timeout
        self._sockets = tempfile.mkdtemp(prefix="vllm-")  # killed processes leave sockets
        own = {"VLLM_RPC_BASE_PATH": self._sockets, TRAINER_PID: str(os.getpid())}
        try:
            super().__init__(arguments, forced=own | dict(forced), defaults=defaults)
        except BaseException:
            shutil.rmtree(self._sockets, ignore_errors=True)
            raise
        self._buckets = [_Bucket(self, 0), _Bucket(self, 1)]
        self._bound_waits()
        self.pids = self._processes()

    def _make(self, arguments: Mapping[str, Any]) -> Any:
        with _ctrl_c_blocked():
            return super()._make(arguments)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            raise LostEngineError(
                "A vLLM engine process has died (killed, out of memory, or crashed). Sampling needs a restarted engine "
                "with synchronized weights. See its error above, or set VLLM_LOGGING_LEVEL=INFO."
            ) from error

    def _processes(self) -> list[int]:
        manager = self.client.resources.engine_manager
        cores = [process.pid for process in manager.processes] if manager is not None else []
        return sorted({*cores, *self.rpc("lightrl_pid")})

    def _watch(self) -> Callable[[], None]:
        """Returns a function to call periodically while waiting.

        It raises an error if an engine process has died, and `LostEngineError` after `progress_timeout`.
        """
        limit, begin = self.progress_timeout, time.monotonic()

        def look() -> None:
            self.client.ensure_alive()
            if limit is not None and time.monotonic() - begin > limit:
                raise LostEngineError(
                    f"VLLMEngine.progress_timeout={limit:g}: vLLM's engine did not respond for that many seconds and "
                    "was killed. Check its log (VLLM_LOGGING_LEVEL=INFO) and the node's memory, or raise "
                    "progress_timeout if a step may take longer."
                )

        return look

    def _bound_waits(self) -> None:
        """Makes vLLM's client check twice a second for a dead or hanging core instead of waiting forever."""
        client = self.client

        def get_output() -> Any:
            look = self._watch()
            while True:
                try:
                    output = client.outputs_queue.get(timeout=_POLL_SECONDS)
                    break
                except queue.Empty:
                    look()
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
            look = self._watch()
            while True:
                try:
                    return future.result(timeout=_POLL_SECONDS)
                except FutureTimeoutError:
                    if future.done():
                        raise
                    look()

        return wait

    def submit(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Starts a worker method. The returned function waits for the results."""
        wait = self._submit_utility("collective_rpc", method, None, args, None)

        def answer() -> list[Any]:
            from vllm.v1.engine.exceptions import EngineDeadError

            try:
                return list(wait())
            except LostEngineError:
                raise
            except Exception as error:  # our worker methods don't raise, so a failed call has lost its worker
                raise EngineDeadError from error

        return answer

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return self.submit(method, *args)()

    def push(self, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Streams tensors to the workers and returns their errors. Stops at the first one."""
        bucket, other = self._buckets
        for either in self._buckets:  # a failed push may have left tensors
            either.clear()
        for name, tensor in tensors:
            # Vectors keep their dtype, because some engine parameters are float32.
            dtype = self.dtype if tensor.is_floating_point() and tensor.ndim > 1 else tensor.dtype
            nbytes = tensor.numel() * dtype.itemsize
            if bucket.used + nbytes > bucket.memory.numel():
                bucket.send()
                bucket, other = other, bucket
                if errors := bucket.clear():
                    return errors
                if nbytes > bucket.memory.numel():
                    bucket.allocate(max(nbytes, other.memory.numel(), _BUCKET_BYTES))
            bucket.put(name, tensor, dtype, nbytes)
        bucket.send()
        return other.clear() + bucket.clear()

    def add(self, request_id: str, prompt: Mapping[str, Any], params: Any) -> None:
        try:
            super().add(request_id, prompt, params)
        except Exception:
            self.client.ensure_alive()  # vLLM closes the sockets of a dead core
            raise

    def pause(self) -> list[Any]:
        finished: list[Any] = []
        self._submit_utility("pause_scheduler", "keep", False)()
        while not self.client.outputs_queue.empty():  # outputs of earlier steps
            finished += self.step()
        return finished

    def resume(self) -> None:
        self._submit_utility("resume_scheduler")()

    def close(self, *, dead: bool = False) -> None:
        """Ends the engine and waits up to 6 s for its processes to exit, then kills them.

        With `dead`, the engine is already lost; remaining processes, including stopped ones, are killed immediately.
        """
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
            shutil.rmtree(self._sockets, ignore_errors=True)


def transfer_group(host: str, port: int, size: int) -> Any:
    """Returns rank 0 of a group with a server's workers, an object with `broadcast(tensor, src)`."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init({"master_address": host, "master_port": port, "world_size": size})

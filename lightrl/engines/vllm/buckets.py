"""Weight push to vLLM's workers in separate processes.

The trainer fills two buckets of shared memory, on the GPU if both use the same one and in pinned host memory otherwise.
The workers copy each part when it is complete. One call to the engine starts a push on all workers, which then
communicate with the trainer through pipes. A call per part would add about a millisecond of latency. Each bucket has 32
MiB or the size of the largest tensor.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from lightrl.compat.vllm import map_shared, shared_path
from lightrl.compat.vllm_process import POLL_SECONDS, LostEngineError, SeparateAdapter

_BUCKET_BYTES = 32 << 20
_PART_BYTES = 8 << 20  # part of a bucket that is sent while the rest is filled
_ALIGNMENT = 64
_GOODBYE_SECONDS = 3.0  # time limit for workers to notice a failed push


class ChannelClosedError(Exception):
    """Raised if a worker stopped the push or died."""


class Channel:
    """The trainer's side of two pipes per worker, for messages and acknowledgments.

    Args:
        adapter: The engine.
        num_workers: Number of workers.
        strict: Whether the workers check for missing parameters.
    """

    def __init__(self, adapter: SeparateAdapter, num_workers: int, strict: bool) -> None:
        self._adapter = adapter
        pipes = [(os.pipe(), os.pipe()) for _ in range(num_workers)]
        self._theirs = [descriptor for down, up in pipes for descriptor in (down[0], up[1])]
        self._down = [Connection(down[1], readable=False) for down, _ in pipes]
        self._up = [Connection(up[0], writable=False) for _, up in pipes]
        paths = [(shared_path(down[0]), shared_path(up[1])) for down, up in pipes]
        self._num_sent = 0
        self._num_done = -1
        self._answers: Callable[..., list[Any]] | None = adapter.submit("lightrl_receive", strict, paths)

    def send(self, *message: Any) -> int:
        """Sends a message to all workers and returns its number for `wait`.

        Raises:
            ChannelClosedError: If a worker closed its pipe.
        """
        if self._theirs:
            self.wait(0)
            self._close_theirs()
        for pipe in self._down:
            with _closing():
                pipe.send(message)
        self._num_sent += 1
        return self._num_sent

    def wait(self, number: int) -> None:
        """Waits until all workers have acknowledged message `number`. 0 acknowledges the start.

        Raises:
            ChannelClosedError: If a worker closed its pipe.
            LostEngineError: If the engine core died or hangs.
        """
        while self._num_done < number:
            look = self._adapter.watch()
            for pipe in self._up:
                with _closing():
                    while not pipe.poll(POLL_SECONDS):
                        look()
                    pipe.recv_bytes()
            self._num_done += 1

    def answers(self) -> list[Any]:
        """Closes the pipes and returns the results of the workers' call."""
        for pipe in self._down:  # so that workers don't wait if another one stopped
            pipe.close()
        assert self._answers is not None
        wait, self._answers = self._answers, None
        return wait()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error, waits briefly until the workers have stopped the push."""
        self._close()
        if self._answers is not None and not (kind is not None and issubclass(kind, LostEngineError)):
            with suppress(Exception):  # keeps the original error
                self._answers(_GOODBYE_SECONDS)

    def _close(self) -> None:
        self._close_theirs()
        for pipe in (*self._down, *self._up):
            pipe.close()

    def _close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())


class _closing:
    """Converts a broken pipe to `ChannelClosedError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, (EOFError, BrokenPipeError, ConnectionResetError)):
            raise ChannelClosedError


class _Bucket:
    """A block of memory shared by trainer and workers, and its tensors that have not been sent."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.clear()

    def clear(self) -> None:
        """Clears the bucket."""
        self.layout: list[tuple[str, str, list[int], int, int]] = []
        self.used = self.sent = self.last = 0
        self.filled_by: set[torch.device] = set()

    def allocate(self, channel: Channel, nbytes: int, device: torch.device | None) -> None:
        """Allocates `nbytes` of shared memory, on `device` or the host, and maps it into all workers."""
        if device is not None:
            from torch.multiprocessing.reductions import reduce_tensor

            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            channel.wait(channel.send("attach_cuda", self.slot, pickle.dumps(reduce_tensor(self.memory)[1])))
            return
        # An anonymous file is not limited by /dev/shm and disappears with its last user.
        descriptor = os.memfd_create(f"lightrl-weights-{self.slot}")
        try:
            os.ftruncate(descriptor, nbytes)
            self.memory = map_shared(descriptor, nbytes)
            channel.wait(channel.send("attach", self.slot, shared_path(descriptor), nbytes))
        finally:
            os.close(descriptor)

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, nbytes: int) -> None:
        """Appends a copy of a tensor."""
        view = self.memory[self.used : self.used + nbytes].view(dtype).view(tensor.shape)
        # Copies from a GPU are asynchronous, with the cast on the GPU; `send` waits for them.
        view.copy_(tensor, non_blocking=tensor.is_cuda)
        self.filled_by |= {tensor.device, self.memory.device}
        self.layout.append((name, str(dtype).removeprefix("torch."), list(tensor.shape), self.used, nbytes))
        self.used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def send(self, channel: Channel) -> None:
        """Tells the workers to copy the tensors added since the last call."""
        if self.layout:
            for device in self.filled_by:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
            self.filled_by.clear()
            self.last = channel.send("load", self.slot, self.layout)
            self.layout, self.sent = [], self.used


class BucketSender:
    """Pushes tensors to the workers of an engine in separate processes."""

    def __init__(self, adapter: SeparateAdapter) -> None:
        self.adapter = adapter
        self.buckets = [_Bucket(0), _Bucket(1)]
        self.devices: list[str] = adapter.rpc("lightrl_device")

    def push(self, tensors: Iterable[tuple[str, Tensor]], strict: bool) -> list[Any]:
        """Streams tensors to the workers and returns their results."""
        with Channel(self.adapter, len(self.devices), strict) as channel:
            with suppress(ChannelClosedError):  # the workers' result has the reason
                self._fill(channel, tensors)
            return channel.answers()

    def _fill(self, channel: Channel, tensors: Iterable[tuple[str, Tensor]]) -> None:
        bucket, other = self.buckets
        for either in self.buckets:  # a failed push may have left tensors
            either.clear()
        for name, tensor in tensors:
            # Vectors keep their dtype, because some engine parameters are float32.
            dtype = self.adapter.dtype if tensor.is_floating_point() and tensor.ndim > 1 else tensor.dtype
            nbytes = tensor.numel() * dtype.itemsize
            if bucket.used + nbytes > bucket.memory.numel():
                bucket.send(channel)
                if bucket.used:
                    bucket, other = other, bucket
                channel.wait(bucket.last)
                bucket.clear()
                if nbytes > bucket.memory.numel():
                    size = max(nbytes, other.memory.numel(), _BUCKET_BYTES)
                    bucket.allocate(channel, size, self._shared_gpu(tensor))
            bucket.put(name, tensor, dtype, nbytes)
            if bucket.used - bucket.sent >= _PART_BYTES:
                bucket.send(channel)
        bucket.send(channel)
        channel.send("end")

    def _shared_gpu(self, tensor: Tensor) -> torch.device | None:
        """Returns the tensor's GPU if all workers use it too, otherwise None for host memory."""
        if not tensor.is_cuda:
            return None
        return (
            tensor.device if set(self.devices) == {str(torch.cuda.get_device_properties(tensor.device).uuid)} else None
        )

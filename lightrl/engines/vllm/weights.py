"""How weights get from the trainer into vLLM's workers.

In one process the workers copy straight from the trainer's tensors. Into other processes they go through two buckets of
shared memory, of the GPU if both use the same one and else of the host, page-locked: the trainer fills one by one, and
the workers copy out what is complete. One call into the engine starts a push on every worker; from then on trainer and
workers talk through pipes, as a call for each piece would cost a millisecond in which the worker waits. Memory beyond
the model: two buckets, each of 32 MiB or of the largest tensor. A LoRA adapter goes through a small folder instead.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrl.compat.vllm import POLL_SECONDS, LostEngineError, VLLMAdapter, map_shared, shared_path

_BUCKET_BYTES = 32 << 20
_PART_BYTES = 8 << 20  # of a bucket, sent while the rest of it is filled
_ALIGNMENT = 64
_GOODBYE_SECONDS = 3.0  # for workers to notice that a push broke off


class ChannelClosedError(Exception):
    """A worker ended the sync, or died."""


class Channel:
    """The trainer's ends of two pipes per worker, one that brings messages and one that brings acknowledgements.

    Args:
        adapter: the engine.
        num_workers: how many workers it has.
        strict: whether the workers look for parameters that did not come.
    """

    def __init__(self, adapter: VLLMAdapter, num_workers: int, strict: bool) -> None:
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
        """Sends to all workers, once they are there; returns the message's number, for `wait`.

        Raises:
            ChannelClosedError: a worker reads no more.
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
        """Waits until every worker has acknowledged message `number`; 0 is their first acknowledgement.

        Raises:
            ChannelClosedError: a worker sends no more.
            LostEngineError: the engine's core is gone or hangs.
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
        """Closes the pipes and waits for what the workers' call returns."""
        for pipe in self._down:  # where one worker has stopped, the others must not wait on
            pipe.close()
        assert self._answers is not None
        wait, self._answers = self._answers, None
        return wait()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error, waits a little until the workers have noticed that nothing more comes."""
        self._close()
        if self._answers is not None and not (kind is not None and issubclass(kind, LostEngineError)):
            with suppress(Exception):  # there is an error already
                self._answers(_GOODBYE_SECONDS)

    def _close(self) -> None:
        self._close_theirs()
        for pipe in (*self._down, *self._up):
            pipe.close()

    def _close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())


class _closing:
    """Turns a broken pipe into `ChannelClosedError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, (EOFError, BrokenPipeError, ConnectionResetError)):
            raise ChannelClosedError


class _Bucket:
    """One piece of memory that trainer and workers see, and the tensors in it that were not sent yet."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.clear()

    def clear(self) -> None:
        """Drops its contents."""
        self.layout: list[tuple[str, str, list[int], int, int]] = []
        self.used = self.sent = self.last = 0
        self.filled_by: set[torch.device] = set()

    def allocate(self, channel: Channel, nbytes: int, device: torch.device | None) -> None:
        """Gets `nbytes` of shared memory, of `device` where given, and maps it into every worker."""
        if device is not None:
            from torch.multiprocessing.reductions import reduce_tensor

            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            channel.wait(channel.send("attach_cuda", self.slot, pickle.dumps(reduce_tensor(self.memory)[1])))
            return
        # An anonymous file: not bound by the size of /dev/shm, and gone with its last user whatever happens.
        descriptor = os.memfd_create(f"lightrl-weights-{self.slot}")
        try:
            os.ftruncate(descriptor, nbytes)
            self.memory = map_shared(descriptor, nbytes)
            channel.wait(channel.send("attach", self.slot, shared_path(descriptor), nbytes))
        finally:
            os.close(descriptor)

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, nbytes: int) -> None:
        """Copies a tensor behind the others."""
        view = self.memory[self.used : self.used + nbytes].view(dtype).view(tensor.shape)
        # From a GPU it only starts here, and `send` waits: copies queue, and the GPU casts rather than the host.
        view.copy_(tensor, non_blocking=tensor.is_cuda)
        self.filled_by |= {tensor.device, self.memory.device}
        self.layout.append((name, str(dtype).removeprefix("torch."), list(tensor.shape), self.used, nbytes))
        self.used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def send(self, channel: Channel) -> None:
        """Lets the workers copy what was put since the last time."""
        if self.layout:
            for device in self.filled_by:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
            self.filled_by.clear()
            self.last = channel.send("load", self.slot, self.layout)
            self.layout, self.sent = [], self.used


class WeightSender:
    """Pushes named tensors into the workers of one engine and checks that none is missing.

    The first push marks every engine parameter with NaN and looks for remains afterwards, which finds a part left out
    of a fused parameter too. Later pushes must bring the same names.
    """

    def __init__(self, adapter: VLLMAdapter) -> None:
        self.adapter = adapter
        self.names: frozenset[str] | None = None
        self.buckets = [_Bucket(0), _Bucket(1)]
        self.devices: list[str] = adapter.rpc("lightrl_device")
        self.takes_parts = not any(adapter.rpc("lightrl_rearranged"))

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], *, partial: bool = False) -> None:
        """Streams the tensors in; `partial` leaves those that do not come as they are.

        Raises:
            ValueError: names the engine does not know, or parameters that did not come; the message lists them.
        """
        strict, names = self.names is None, []
        if strict and partial:
            raise ValueError("partial=True: the engine has no weights yet, push all of them first.")

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named_tensors:
                names.append(name)
                yield name, tensor.detach()

        if self.adapter.in_process:
            self.adapter.rpc("lightrl_begin", strict)
            answers = [
                (self.adapter.rpc("lightrl_load", stream())[0], *self.adapter.rpc("lightrl_finish", strict, names))
            ]
        else:
            with Channel(self.adapter, len(self.devices), strict) as channel:
                with suppress(ChannelClosedError):  # the answer says why
                    self._push_buckets(channel, stream())
                answers = channel.answers()
        for error, _ in answers:
            if error:
                raise ValueError(f"vLLM could not take the weights: {error}")
        missing = sorted({name for _, part in answers for name in part})
        if self.names is not None and not partial:
            missing += sorted(self.names.difference(names))
        if missing:
            raise ValueError(
                f"Weight sync left {len(missing)} parameter(s) of the engine without new values (or brought NaN): "
                f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}. Push every parameter of the model, "
                "under its Hugging Face name, tied ones once."
            )
        self.names = self.names if partial else frozenset(names)

    def forget(self) -> None:
        """Makes the next push check everything again, after the engine dropped its weights."""
        self.names = None

    def _push_buckets(self, channel: Channel, tensors: Iterable[tuple[str, Tensor]]) -> None:
        bucket, other = self.buckets
        for either in self.buckets:  # a push that broke off may have left something behind
            either.clear()
        for name, tensor in tensors:
            # One-dimensional parameters keep their precision: there are few, and some engines hold them in float32.
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
        """The tensor's GPU where every worker sits on it too; else None, and the host's memory serves."""
        if not tensor.is_cuda:
            return None
        return (
            tensor.device if set(self.devices) == {str(torch.cuda.get_device_properties(tensor.device).uuid)} else None
        )


class AdapterFolder:
    """Writes adapters where the engine's workers on this machine read them: in memory, if there is /dev/shm."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self.path = tempfile.mkdtemp(prefix="lightrl-lora-", dir=shared if os.access(shared, os.W_OK) else None)

    def write(self, tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]) -> None:
        """Replaces the adapter in the folder.

        Args:
            tensors: (name in peft's format, full tensor).
            config: peft's `adapter_config.json`.
        """
        from safetensors.torch import save_file

        weights = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        save_file(weights, os.path.join(self.path, "adapter_model.safetensors"))
        Path(self.path, "adapter_config.json").write_text(json.dumps(dict(config)))

    def remove(self) -> None:
        """Deletes it."""
        with suppress(OSError):
            shutil.rmtree(self.path)

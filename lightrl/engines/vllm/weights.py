"""How weights get from the trainer into vLLM's workers.

In one process the workers copy straight from the trainer's tensors. Into other processes they go through two buckets
of shared memory, of the GPU where both sit on the same one and else of the host, page-locked: the trainer fills one by
one, and the workers copy out what is complete. Memory beyond the model: two buckets, each of 32 MiB or of the largest
tensor.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from lightrl.compat.vllm import VLLMAdapter, map_shared, shared_path
from lightrl.engines.vllm.channel import Channel, ChannelClosedError

_BUCKET_BYTES = 32 << 20
_PART_BYTES = 8 << 20  # of a bucket, sent while the rest of it is filled
_ALIGNMENT = 64


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

"""How weights get from the trainer into vLLM's workers.

In one process the workers copy straight from the trainer's tensors. Into other processes they go through two buckets
of shared memory, of the GPU where both sit on the same one and else of the host: while the workers copy out of one,
the trainer fills the other. Memory beyond the model: two buckets, each of 32 MiB or of the largest tensor.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightrl.engines._vllm_adapter import VLLMAdapter

__all__ = ["WeightSender"]

_BUCKET_BYTES = 32 << 20  # what the trainer writes is still in the cache when the workers read it
_ALIGNMENT = 64


class _Bucket:
    """One piece of memory that trainer and workers see, and the tensors that lie in it."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.layout: list[tuple[str, str, list[int], int, int]] = []
        self.used = 0
        self.wait: Callable[[], list[Any]] | None = None

    def allocate(self, adapter: VLLMAdapter, nbytes: int, device: torch.device | None) -> None:
        """Gets `nbytes` of shared memory, of `device` where given, and maps it into every worker."""
        if device is not None:
            from torch.multiprocessing.reductions import reduce_tensor

            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            adapter.rpc("lightrl_attach_cuda", self.slot, pickle.dumps(reduce_tensor(self.memory)[1]))
            return
        # An anonymous file: not bound by the size of /dev/shm, and gone with its last user whatever happens.
        descriptor = os.memfd_create(f"lightrl-weights-{self.slot}")
        try:
            os.ftruncate(descriptor, nbytes)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self.memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
            adapter.rpc("lightrl_attach", self.slot, path, nbytes)
        finally:
            os.close(descriptor)

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, nbytes: int) -> None:
        view = self.memory[self.used : self.used + nbytes].view(dtype).view(tensor.shape)
        view.copy_(tensor)
        self.layout.append((name, str(dtype).removeprefix("torch."), list(tensor.shape), self.used, nbytes))
        self.used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class WeightSender:
    """Pushes named tensors into the workers of one engine and checks that none is missing.

    The first push marks every engine parameter with NaN and looks for remains afterwards, which finds a part left out
    of a fused parameter too. Later pushes must bring the same names.
    """

    def __init__(self, adapter: VLLMAdapter) -> None:
        self.adapter = adapter
        self.names: frozenset[str] | None = None
        self.buckets = [_Bucket(0), _Bucket(1)]
        self.devices = set(adapter.rpc("lightrl_device"))

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

        self.adapter.rpc("lightrl_begin", strict)
        if self.adapter.in_process:
            self._raise(self.adapter.rpc("lightrl_load", stream()))
        else:
            self._push_buckets(stream())
        missing = sorted({name for part in self.adapter.rpc("lightrl_finish", strict, names) for name in part})
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
        """Makes the next push check everything again: the engine's weights were dropped."""
        self.names = None

    def _push_buckets(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        turn = 0
        for bucket in self.buckets:  # a push that broke off may have left something behind
            bucket.wait, bucket.layout, bucket.used = None, [], 0
        for name, tensor in tensors:
            # One-dimensional parameters keep their precision: there are few, and some engines hold them in float32.
            dtype = self.adapter.dtype if tensor.is_floating_point() and tensor.ndim > 1 else tensor.dtype
            nbytes = tensor.numel() * dtype.itemsize
            bucket = self.buckets[turn]
            if bucket.layout and bucket.used + nbytes > bucket.memory.numel():
                self._send(bucket)
                turn = 1 - turn
                bucket = self.buckets[turn]
            self._finish(bucket)
            if nbytes > bucket.memory.numel():
                bucket.allocate(self.adapter, max(nbytes, _BUCKET_BYTES), self._shared_gpu(tensor))
            bucket.put(name, tensor, dtype, nbytes)
        self._send(self.buckets[turn])
        for bucket in self.buckets:
            self._finish(bucket)

    def _shared_gpu(self, tensor: Tensor) -> torch.device | None:
        """The tensor's GPU where every worker sits on it too; else None, and the host's memory serves."""
        if not tensor.is_cuda:
            return None
        return tensor.device if self.devices == {str(torch.cuda.get_device_properties(tensor.device).uuid)} else None

    def _send(self, bucket: _Bucket) -> None:
        if bucket.layout:
            if bucket.memory.is_cuda:
                torch.cuda.current_stream(bucket.memory.device).synchronize()
            bucket.wait = self.adapter.submit("lightrl_load_bucket", bucket.slot, bucket.layout)

    def _finish(self, bucket: _Bucket) -> None:
        if bucket.wait is not None:
            wait, bucket.wait, bucket.layout, bucket.used = bucket.wait, None, [], 0
            self._raise(wait())

    @staticmethod
    def _raise(errors: Iterable[str | None]) -> None:
        found = [error for error in errors if error]
        if found:
            raise ValueError(f"vLLM could not take the weights: {found[0]}")

"""Weight push to vLLM's workers in separate processes, and LoRA adapters on disk.

The trainer fills two buckets of shared, pinned host memory in turn. The workers copy one bucket while the trainer fills
the other. Each has 32 MiB or the size of the largest tensor. `VLLMEngine` copies directly into in-process workers.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrl.compat.vllm import map_shared, shared_path
from lightrl.compat.vllm_process import SeparateAdapter

_BUCKET_BYTES = 32 << 20
_ALIGNMENT = 64


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
        self.layout: list[tuple[str, str, list[int], int, int]] = []
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
            self.adapter.rpc("lightrl_attach", self.slot, shared_path(descriptor), nbytes)
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


class BucketSender:
    """Pushes tensors to the workers of an engine in separate processes."""

    def __init__(self, adapter: SeparateAdapter) -> None:
        self.adapter = adapter
        self.buckets = [_Bucket(adapter, 0), _Bucket(adapter, 1)]

    def push(self, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Streams tensors to the workers and returns their errors. Stops at the first one."""
        bucket, other = self.buckets
        for either in self.buckets:  # a failed push may have left tensors
            either.clear()
        for name, tensor in tensors:
            # Vectors keep their dtype, because some engine parameters are float32.
            dtype = self.adapter.dtype if tensor.is_floating_point() and tensor.ndim > 1 else tensor.dtype
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


class AdapterFolder:
    """A temporary directory, in /dev/shm if possible, from which the engine's workers read adapters."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self.path = tempfile.mkdtemp(prefix="lightrl-lora-", dir=shared if os.access(shared, os.W_OK) else None)

    def write(self, tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]) -> None:
        """Replaces the adapter.

        Args:
            tensors: Iterator of (PEFT parameter name, full tensor).
            config: Contents of PEFT's `adapter_config.json`.
        """
        from safetensors.torch import save_file

        weights = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        save_file(weights, os.path.join(self.path, "adapter_model.safetensors"))
        Path(self.path, "adapter_config.json").write_text(json.dumps(dict(config)))

    def remove(self) -> None:
        """Deletes the directory."""
        shutil.rmtree(self.path, ignore_errors=True)

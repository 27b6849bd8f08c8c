"""The part of `VLLMEngine` that runs in vLLM's workers in separate processes, and in the workers of servers."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from lightrl.compat.vllm import TRAINER_PID, map_shared
from lightrl.compat.vllm_worker import WorkerExtension

BucketEntry = tuple[str, str, list[int], int, int]
"""(parameter name, torch dtype name, shape, offset in bytes, size in bytes) of a tensor in a bucket."""


def _die_with_trainer(trainer_pid: int) -> None:
    """Ends this process and its engine core once the trainer has exited, also after SIGKILL."""
    try:
        trainer: psutil.Process | None = psutil.Process(trainer_pid)
    except psutil.NoSuchProcess:
        trainer = None
    core = psutil.Process(os.getppid())

    def alive() -> bool:
        try:
            return trainer is not None and trainer.is_running() and trainer.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def watch() -> None:
        while alive():
            time.sleep(0.5)
        try:
            # Still our parent: if the core had died before us, our parent would be init or a subreaper.
            if core.pid not in (trainer_pid, 1) and core.pid == os.getppid() and core.is_running():
                core.kill()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="lightrl-trainer-watch", daemon=True).start()


if int(os.environ.get(TRAINER_PID, os.getpid())) != os.getpid():
    _die_with_trainer(int(os.environ[TRAINER_PID]))


class SeparateWorkerExtension(WorkerExtension):
    """Weight loading in a worker that runs outside the trainer's process."""

    def lightrl_pid(self) -> int:
        """Returns this worker's process ID."""
        return os.getpid()

    def lightrl_device(self) -> str:
        """Returns the GPU's UUID, or "cpu"."""
        device: torch.device = self.device  # type: ignore[attr-defined]
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"

    def lightrl_receive(self, strict: bool, pipes: Sequence[tuple[str, str]]) -> tuple[str | None, list[str]]:
        """Runs a sync with tensors announced by the trainer; returns an error text and the result of `finish`."""
        down, up = pipes[self.rank]  # type: ignore[attr-defined]
        with (
            Connection(os.open(down, os.O_RDONLY), writable=False) as messages,
            Connection(os.open(up, os.O_WRONLY), readable=False) as acknowledgements,
        ):
            acknowledgements.send_bytes(b"")  # the trainer may now close its own descriptors of these pipes
            self.lightrl_begin(strict)
            error = self.lightrl_load(self._lightrl_received(messages, acknowledgements))
            return error, [] if error else self.lightrl_finish(strict)

    def _lightrl_received(self, messages: Connection, acknowledgements: Connection) -> Iterator[tuple[str, Tensor]]:
        while (message := messages.recv())[0] != "end":
            kind, slot, *rest = message
            if kind == "attach":
                self._lightrl_attach(slot, *rest)
            elif kind == "attach_cuda":
                self._lightrl_attach_cuda(slot, *rest)
            else:
                bucket = self._lightrl_slots()[slot]
                for name, dtype, shape, offset, nbytes in rest[0]:
                    yield name, bucket[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)
                if self.device.type == "cuda":  # type: ignore[attr-defined]
                    torch.cuda.synchronize(self.device)  # type: ignore[attr-defined]
            acknowledgements.send_bytes(b"")

    def _lightrl_attach(self, slot: int, path: str, nbytes: int) -> None:
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._lightrl_slots()[slot] = map_shared(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def _lightrl_attach_cuda(self, slot: int, handle: bytes) -> None:
        """Maps the trainer's bucket `slot` on the same GPU (CUDA IPC). Not tested on a GPU."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(pickle.loads(handle))
        arguments[6] = self.device.index  # type: ignore[attr-defined]  # the GPU's index may differ between processes
        self._lightrl_slots()[slot] = rebuild_cuda_tensor(*arguments)

    def _lightrl_slots(self) -> dict[int, Tensor]:
        slots: dict[int, Tensor] = vars(self).setdefault("_lightrl_buckets", {})
        return slots

"""The part of `VLLMEngine` that runs in vLLM's workers in separate processes, and in the workers of servers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from lightrl.compat.torch import map_shared
from lightrl.compat.vllm_process import TRAINER_PID
from lightrl.compat.vllm_worker import WorkerExtension


def _die_with_trainer(trainer_pid: int) -> None:
    """Ends this process and its engine core once the trainer has exited, also after SIGKILL."""
    trainer, core = psutil.Process(trainer_pid), psutil.Process(os.getppid())

    def watch() -> None:
        try:
            with suppress(psutil.NoSuchProcess):
                while trainer.is_running() and trainer.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.5)
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

    def lightrl_attach(self, slot: int, path: str, nbytes: int) -> None:
        """Maps the trainer's bucket `slot` in host memory."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._lightrl_slots()[slot] = map_shared(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def lightrl_load_bucket(self, slot: int, layout: Sequence[tuple[str, str, list[int], int, int]]) -> str | None:
        """Copies the tensors of a bucket (see `vllm_process`) into the model; returns an error text."""
        bucket = self._lightrl_slots()[slot]
        return self.lightrl_load(
            (name, bucket[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape))
            for name, dtype, shape, offset, nbytes in layout
        )

    def _lightrl_slots(self) -> dict[int, Tensor]:
        slots: dict[int, Tensor] = vars(self).setdefault("_lightrl_buckets", {})
        return slots

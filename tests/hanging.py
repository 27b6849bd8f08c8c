"""A process that hangs in C, deaf to the first Ctrl-C: while the command line loads, or with arguments in an update."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any


def hang() -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        os.getpid()  # Python calls the handler here at the latest
    except KeyboardInterrupt:
        pass
    print("hangs", flush=True)
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)


class Loading:
    def find_spec(self, name: str, *args: Any) -> None:
        if name == "lightrl.cli.config_files":
            hang()


def main(model: str, folder: str) -> None:
    from lightning.pytorch import Callback

    from lightrl.algorithms import GRPOLightningModule
    from lightrl.callbacks import RolloutCheckpoint, WeightSync
    from tests.toys import quiet_trainer, sums_data

    class During(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            hang()

    callbacks = [WeightSync(), During(), RolloutCheckpoint(dirpath=folder)]
    trainer = quiet_trainer(callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(GRPOLightningModule(model), sums_data())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in the background of a script
    if len(sys.argv) == 1:
        from lightrl.__main__ import command

        sys.meta_path.insert(0, Loading())  # type: ignore[arg-type]
        command()
    else:
        main(*sys.argv[1:])

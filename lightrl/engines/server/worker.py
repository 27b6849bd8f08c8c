"""Worker extension for vLLM servers used by `ServerEngine`.

Start the server with `--worker-extension-cls lightrl.engines.server.worker.ServerWorker`. vLLM then imports this module
before it creates the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightrl.compat.vllm_process_worker import SeparateWorkerExtension


class ServerWorker(SeparateWorkerExtension):
    """Loads weights from a shared directory. Methods return dictionaries, which `/collective_rpc` can serialize."""

    def lightrl_load_files(self, paths: Sequence[str], strict: bool) -> dict[str, Any]:
        """Loads safetensors files; returns "error", a message or None, and "missing", parameters not fully covered."""
        self.lightrl_begin(strict)
        error = self.lightrl_load(_tensors(paths))
        return {"error": error, "missing": [] if error else self.lightrl_finish(strict)}


def _tensors(paths: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, file.get_tensor(name)

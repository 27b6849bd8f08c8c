"""Worker extension for vLLM servers used by `ServerEngine`.

Start the server with `--worker-extension-cls lightrl.engines.server.worker.ServerWorker`. vLLM then imports this module
before it creates the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightrl.compat.vllm_worker import WorkerExtension


class ServerWorker(WorkerExtension):
    """Loads weights from a shared directory. Methods return dictionaries, which `/collective_rpc` can serialize."""

    def lightrl_facts(self, path: str | None) -> dict[str, Any]:
        """Returns config values that the trainer compares with its model, and whether `path` exists."""
        config = self.model_config.hf_text_config  # type: ignore[attr-defined]
        names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
        facts = {name: getattr(config, name, None) for name in names}
        return facts | {"sees": path is None or os.path.exists(path)}

    def lightrl_load_files(self, paths: Sequence[str], strict: bool) -> dict[str, Any]:
        """Replaces the weights with those of safetensors files.

        Returns:
            Dictionary with "error", a message or None, and "missing", the parameters that the files don't fully cover.
        """
        names: list[str] = []
        self.lightrl_begin(strict)
        error = self.lightrl_load(_tensors(paths, names))
        return {"error": error, "missing": [] if error else self.lightrl_finish(strict, names)}


def _tensors(paths: Sequence[str], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                names.append(name)
                yield name, file.get_tensor(name)

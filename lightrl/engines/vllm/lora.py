"""LoRA adapters in vLLM: what the engine is started with, and how a new adapter gets there.

The engine keeps the base weights that it read from the model's folder, and a push brings the adapter alone, as a small
folder in peft's format. Every request then uses the adapter: vLLM 0.32 gives base rows of a mixed batch the adapter's
output (https://github.com/vllm-project/vllm/pull/48421).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def lora_arguments(rank: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for one adapter of a rank.

    Raises:
        ValueError: vLLM holds no adapter of this rank.
    """
    fits = [size for size in _RANKS if size >= rank]
    if not fits:
        raise ValueError(
            f"lora.r={rank}: vLLM holds adapters of rank up to {_RANKS[-1]}; set VLLMEngine.lora_sync=merged."
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": fits[0]}


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

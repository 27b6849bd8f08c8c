"""Weight push from the trainer to vLLM's workers.

In-process workers copy directly from the trainer's tensors. Separate processes receive them through `buckets`. LoRA
adapters are written to a small directory instead.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from lightrl.compat.vllm import VLLMAdapter

if TYPE_CHECKING:
    from lightrl.compat.vllm_process import SeparateAdapter
    from lightrl.engines.vllm.buckets import BucketSender


class WeightSender:
    """Pushes named tensors to the workers of an engine and checks that none is missing.

    The first push fills all engine parameters with NaN and checks that none remains, which also detects missing parts
    of fused parameters. Later pushes must contain the same names.
    """

    def __init__(self, adapter: VLLMAdapter) -> None:
        self.adapter = adapter
        self.names: frozenset[str] | None = None
        self.buckets: BucketSender | None = None
        if not adapter.in_process:
            from lightrl.engines.vllm.buckets import BucketSender

            self.buckets = BucketSender(cast("SeparateAdapter", adapter))
        self.takes_parts = not any(adapter.rpc("lightrl_rearranged"))

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], *, partial: bool = False) -> None:
        """Streams tensors to the engine. With `partial`, missing parameters keep their values.

        Raises:
            ValueError: If names are unknown or missing. The message lists them.
        """
        strict, names = self.names is None, []

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named_tensors:
                names.append(name)
                yield name, tensor.detach()

        if self.buckets is not None:
            answers = self.buckets.push(stream(), strict)
        else:
            self.adapter.rpc("lightrl_begin", strict)
            answers = [(self.adapter.rpc("lightrl_load", stream())[0], *self.adapter.rpc("lightrl_finish", strict))]
        for error, _ in answers:
            if error:
                raise ValueError(f"vLLM could not load the weights: {error}")
        missing = sorted({name for _, part in answers for name in part})
        if self.names is not None and not partial:
            missing += sorted(self.names.difference(names))
        if missing:
            raise ValueError(
                f"Weight sync left {len(missing)} parameter(s) of the engine without new values (or with NaN): "
                f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}. Push every parameter under its "
                "Hugging Face name, and each tied parameter once."
            )
        self.names = self.names if partial else frozenset(names)

    def forget(self) -> None:
        """Makes the next push check all parameters again, after the engine dropped its weights."""
        self.names = None


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
        with suppress(OSError):
            shutil.rmtree(self.path)

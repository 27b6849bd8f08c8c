"""Checkpoint files of a single process: atomic, with a checksum, finite, and without secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from lightrl.checkpoints.files import atomic_write, remove, verify
from lightrl.checkpoints.reading import readable
from lightrl.checkpoints.redaction import redact


class CheckedCheckpointIO(TorchCheckpointIO):
    """Lightning plugin for checkpoint files that detects or survives crashes, full disks, and corruption.

    Writes a file next to its target and renames it, with its SHA-256 in `FILE.ckpt.sha256`, which is verified before
    loading. `RolloutCheckpoint` and the command line install it. Otherwise, pass it to
    `Trainer(plugins=[CheckedCheckpointIO()])`. Lightning handles URLs.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes the file.

        Raises:
            ValueError: Weights are not finite, or the optimizer state is NaN.
            StorageError: The disk is full or similar. The previous version is kept.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        states = [state.get("state", {}) for state in checkpoint.get("optimizer_states", ())]
        require_finite(first_nonfinite(checkpoint.get("state_dict", {}), states), path)
        with atomic_write(path, checksum=True) as file:
            torch.save(without_secrets(checkpoint), file)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads the file.

        Raises:
            ValueError: The path is not a checkpoint, or it is damaged.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, map_location or (lambda storage, loc: storage), weights_only)
        with readable(path):
            verify(path)
            loaded: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=weights_only)
            if not isinstance(loaded, Mapping) or "state_dict" not in loaded:
                raise KeyError("state_dict")
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the file and its checksum."""
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            remove(Path(path))


def require_finite(bad: str | None, path: Any) -> None:
    """Raises a ValueError with the name of what is not finite, before `path` is replaced."""
    if bad is not None:
        raise ValueError(
            f"{str(path)!r} is not written: the weights are not finite ({bad}). Lower the learning rate, or set "
            "max_grad_norm."
        )


def first_nonfinite(weights: Mapping[str, Any], states: Iterable[Mapping[Any, Any]] = ()) -> str | None:
    """Returns the name of the first non-finite weight or NaN optimizer state in this rank's part.

    Args:
        weights: Tensors by name.
        states: States of each optimizer: tensors by name, by parameter.
    """
    for name, tensor in weights.items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(_local(tensor).isfinite().all()):
            return name
    for number, of in enumerate(each for state in states for each in state.values()):
        for name, tensor in of.items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and bool(_local(tensor).isnan().any()):
                return f"the optimizer's {name} of parameter {number}"
    return None


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def without_secrets(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a checkpoint with redacted settings; other entries are shared."""
    hidden = {
        key: redact(dict(value))
        for key, value in checkpoint.items()
        if isinstance(value, Mapping) and (key.endswith("hyper_parameters") or key == "lightrl")
    }
    return {**checkpoint, **hidden}

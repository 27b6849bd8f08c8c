"""How one process writes and reads a checkpoint file: whole, with a checksum, finite, and without secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from lightrl.checkpoints.files import atomic_write, remove, verify
from lightrl.checkpoints.reading import checkpoint_kind, readable
from lightrl.checkpoints.redaction import redact


class CheckedCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin for checkpoint files, safe against a crash, a full disk, and flipped bits.

    A file is written next to its target and renamed, with its SHA-256 in `FILE.ckpt.sha256`, which is compared before
    anything is loaded. `RolloutCheckpoint` and the command line install it. Elsewhere pass it to
    `Trainer(plugins=[CheckedCheckpointIO()])`. URLs are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes the file.

        Raises:
            ValueError: Weights are not finite, or the optimizer's state is NaN.
            StorageError: The disk is full, or the like. The version before stays.
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
            ValueError: The path is not a checkpoint, or a damaged one.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, map_location or (lambda storage, loc: storage), weights_only)
        kind = checkpoint_kind(path)
        if kind != "plain":
            raise ValueError(
                f"checkpoint={str(path)!r} was written under {kind}. Resume with the same strategy, or convert it: "
                f"lightrl export --checkpoint {path} --what checkpoint --output plain.ckpt"
            )
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
    """Raises a ValueError that names what is not finite, before `path` is replaced."""
    if bad is not None:
        raise ValueError(
            f"The weights are not finite ({bad}), so {str(path)!r} is not written. Lower the learning rate, or set "
            "max_grad_norm."
        )


def first_nonfinite(weights: Mapping[str, Any], states: Iterable[Mapping[Any, Any]] = ()) -> str | None:
    """Name of the first weight with an infinite or NaN entry, or of an optimizer state with NaN, in this rank's part.

    Args:
        weights: Name -> tensor.
        states: Of each optimizer, parameter -> name -> tensor.
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
    """A checkpoint whose settings are redacted; everything else is the same objects."""
    hidden = {
        key: redact(dict(value))
        for key, value in checkpoint.items()
        if isinstance(value, Mapping) and (key.endswith("hyper_parameters") or key == "lightrl")
    }
    return {**checkpoint, **hidden}

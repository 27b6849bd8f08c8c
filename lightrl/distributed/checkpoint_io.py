"""How one process writes and reads a checkpoint file: whole, with a checksum, finite, and without secrets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from lightrl.distributed.consolidate import unreadable
from lightrl.redaction import redact
from lightrl.storage import atomic_write, checkpoint_kind, remove, require_entries, verify

__all__ = [
    "WRITTEN_BY_LIGHTNING",
    "CheckedCheckpointIO",
    "first_nan_state",
    "first_nonfinite",
    "refuse_nonfinite",
    "without_secrets",
]


WRITTEN_BY_LIGHTNING: dict[str, type] = {
    **{"pytorch-lightning_version": str, "state_dict": Mapping, "epoch": int, "global_step": int}
}
UNLESS_WEIGHTS_ONLY: dict[str, type] = {
    **{"loops": Mapping, "callbacks": Mapping, "optimizer_states": list, "lr_schedulers": list, "lightrl": Mapping}
}


class CheckedCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin for checkpoint files, safe against a crash, a full disk and flipped bits.

    A file is written beside its target and renamed, with its SHA-256 in `FILE.ckpt.sha256`, which is compared before
    anything is read. `RolloutCheckpoint` and the command line put it in; elsewhere give it to
    `Trainer(plugins=[CheckedCheckpointIO()])`. Paths that are no local files are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes the file.

        Raises:
            ValueError: weights are not finite, or the optimizer's state is NaN: going on from them would be of no use.
            StorageError: the disk is full, or the like; what stood there before stays.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        bad = first_nonfinite(checkpoint.get("state_dict", {}))
        for state in checkpoint.get("optimizer_states", ()):
            bad = bad or first_nan_state(state.get("state", {}) if isinstance(state, Mapping) else {})
        refuse_nonfinite(bad, path)
        with atomic_write(path, checksum=True) as file:
            torch.save(without_secrets(checkpoint), file)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads the file.

        Raises:
            ValueError: there is none, or not what was written.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, map_location or (lambda storage, loc: storage), weights_only)
        kind = checkpoint_kind(path)
        if kind != "plain":
            raise ValueError(
                f"checkpoint={str(path)!r} was written under {kind}: go on with the same strategy, or make it plain "
                f"first: lightrl export --checkpoint {path} --what checkpoint --output plain.ckpt"
            )
        with unreadable(path, "plain"):
            verify(path)
            loaded: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=weights_only)
            require_entries(loaded, WRITTEN_BY_LIGHTNING)
            there = {name: kind for name, kind in UNLESS_WEIGHTS_ONLY.items() if name in loaded}
            require_entries(loaded, there)
            if "loops" in there:
                require_entries(loaded["loops"], {"fit_loop": Mapping}, "loops")
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the file and its checksum."""
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            remove(Path(path))


def refuse_nonfinite(bad: str | None, path: Any) -> None:
    """Raises a `ValueError` where something is not finite; `bad` names it. What `path` held stays."""
    if bad is not None:
        raise ValueError(
            f"The weights are not finite ({bad}), so {str(path)!r} is not written: what it held before is the "
            "newest state to go on from. Lower the learning rate, or bound max_grad_norm."
        )


def first_nonfinite(tensors: Mapping[str, Any]) -> str | None:
    """Name of the first tensor with an infinite or NaN entry; of a sharded one this rank's part is looked at."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if local.numel() and not bool(torch.isfinite(local).all()):
                return name
    return None


def first_nan_state(state: Mapping[Any, Any]) -> str | None:
    """Which part of an optimizer's state, parameter -> name -> tensor, has a NaN entry, which its next steps spread."""
    for number, of_parameter in enumerate(state.values()):
        for name, tensor in of_parameter.items() if isinstance(of_parameter, Mapping) else ():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if isinstance(local, Tensor) and local.is_floating_point() and bool(torch.isnan(local).any()):
                return f"the optimizer's {name} of parameter {number}"
    return None


def without_secrets(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint whose settings are redacted; everything else is the same objects."""
    hidden = {key: redact(dict(value)) for key, value in checkpoint.items() if _holds_settings(key, value)}
    return {**checkpoint, **hidden}


def _holds_settings(key: str, value: Any) -> bool:
    return isinstance(value, Mapping) and (key.endswith("hyper_parameters") or key == "lightrl")

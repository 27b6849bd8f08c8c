"""Writes the checkpoint files of a process, and reads a checkpoint of any strategy and number of ranks in one process.

| strategy | on disk | read by |
|---|---|---|
| one process, DDP | a file | `torch.load` |
| FSDP2 | a directory of `torch.distributed.checkpoint` with `meta.pt` | Lightning |
| DeepSpeed ZeRO | a directory with `latest` and `checkpoint/` | DeepSpeed (without optimizer states) |

A plain checkpoint is what Lightning writes without sharding. It is read on the CPU and must fit in memory.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor

from lightrl.checkpoints.files import DamagedError, atomic_write, remove, verify
from lightrl.checkpoints.redaction import redact
from lightrl.compat.lightning_checkpoints import load_distributed_checkpoint

# Numbers and arrays of NumPy, such as a rate that a user's schedule computed. Reading them runs no other code.
_TYPES = {type(np.dtype(code)) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]}
_MAKERS: list[Any] = [np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]]
torch.serialization.add_safe_globals([np.dtype, np.ndarray, *_TYPES, *_MAKERS])


# ---- writing ---------------------------------------------------------------------------------------------------------


class CheckedCheckpointIO(TorchCheckpointIO):
    """Lightning plugin for checkpoint files that detects or survives crashes, full disks, and corruption.

    Writes a file next to its target and renames it, with its SHA-256 in `FILE.ckpt.sha256`, which is verified before
    loading. `RolloutCheckpoint` and the command line install it. Otherwise, pass it to
    `Trainer(plugins=[CheckedCheckpointIO()])`. Lightning handles URLs.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes the file. If it raises, the previous version is kept.

        Raises a ValueError for non-finite weights or a NaN in the optimizer's state, and a StorageError for a full
        disk.
        """
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        states = [state.get("state", {}) for state in checkpoint.get("optimizer_states", ())]
        require_finite(first_nonfinite(checkpoint.get("state_dict", {}), states), path)
        with atomic_write(path, checksum=True) as file:
            torch.save(without_secrets(checkpoint), file)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads the file. Raises a ValueError if the path is not a checkpoint, or if it is damaged."""
        if "://" in str(path):
            return super().load_checkpoint(path, map_location or (lambda storage, loc: storage), weights_only)
        with readable(path):
            verify(path)
            return _plain(torch.load(path, map_location=map_location or "cpu", weights_only=weights_only))

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
            f"{str(path)!r} was not written: the weights are not finite ({bad}). Lower the learning rate, or set "
            "max_grad_norm."
        )


def first_nonfinite(weights: Mapping[str, Any], states: Iterable[Mapping[Any, Any]] = ()) -> str | None:
    """Returns the name of the first non-finite weight or NaN optimizer state in this rank's part.

    `states` has each optimizer's tensors by name, by parameter.
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


# ---- reading ---------------------------------------------------------------------------------------------------------


def checkpoint_kind(path: str | Path) -> str:
    """Returns `plain`, `fsdp2`, or `zero`. Raises a ValueError if the path isn't a complete checkpoint."""
    path = Path(path)
    if path.is_file():
        return "plain"
    if (path / "checkpoint").is_dir():
        kind, last = "zero", ["latest"]
    elif list(path.glob("*.distcp")):
        kind, last = "fsdp2", [".metadata", "meta.pt"]
    else:
        wrong = "not a checkpoint" if path.is_dir() else "does not exist"
        raise ValueError(f"checkpoint={str(path)!r}: {wrong}. Pass the .ckpt file or directory that a run wrote.")
    missing = [name for name in last if not (path / name).is_file()]
    if missing:
        raise ValueError(f"checkpoint={str(path)!r}: incomplete ({', '.join(missing)} missing). Pass an earlier one.")
    return kind


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads the weights (`state_dict`) and what Lightning and callbacks added; of plain files also `optimizer_states`.

    ZeRO checkpoints hold pickled DeepSpeed objects, so they need the package and must come from a trusted source.
    Raises a ValueError if the path is not a checkpoint, or if it is incomplete or damaged.
    """
    path, kind = Path(path), checkpoint_kind(path)
    with readable(path):
        verify(path)
        if kind == "plain":
            return _plain(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        return load_distributed_checkpoint(path) if kind == "fsdp2" else _read_zero(path)


def read_header(path: Path) -> Mapping[str, Any]:
    """Reads the unsharded entries of a checkpoint; tensors stay on disk. Unpickling may raise any error."""
    kind = checkpoint_kind(path)
    file = {"plain": path, "fsdp2": path / "meta.pt"}.get(kind) or min(path.rglob("*_model_states.pt"))
    header: Mapping[str, Any] = torch.load(file, map_location="cpu", weights_only=kind != "zero", mmap=True)
    return header


@contextlib.contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Context manager that turns errors of reading a checkpoint into a ValueError with the first line of the cause."""
    try:
        yield
    except (DamagedError, RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError) as error:
        cause = (str(error).splitlines() or [""])[0]
        what = cause if isinstance(error, DamagedError) else f"it can't be read ({type(error).__name__}: {cause})"
        raise ValueError(
            f"checkpoint={str(path)!r}: {what}. Pass an earlier one, or --ckpt_path last for the newest intact one. If "
            "objects of your classes are in it, resume with weights_only=False."
        ) from error


def require_optimizer_states(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Raises a ValueError if a checkpoint has only weights, which can't resume training."""
    if not checkpoint.get("optimizer_states"):
        raise ValueError(
            f"ckpt_path={str(path)!r}: has no optimizer_states (save_weights_only). Start a new run from its weights "
            "(lightrl export)."
        )


def _plain(loaded: Any) -> dict[str, Any]:
    if not isinstance(loaded, dict) or "state_dict" not in loaded:
        raise KeyError("state_dict")
    return loaded


def by_name(states: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Keys an optimizer's state by parameter name instead of number; `names` has a list per parameter group."""
    flat = [name for group in names for name in group]
    groups = [{**group, "params": list(own)} for group, own in zip(states["param_groups"], names, strict=True)]
    return {"state": {flat[number]: state for number, state in states["state"].items()}, "param_groups": groups}


_DEEPSPEED = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "lr_scheduler"),
    *("frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("ds_config", "ds_version"),
}


def _read_zero(path: Path) -> dict[str, Any]:
    """Reads everything but the optimizer's states, for which DeepSpeed has no function."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = path / (path / "latest").read_text().strip()
    first = torch.load(min(folder.glob("*_model_states.pt")), map_location="cpu", weights_only=False)
    with contextlib.redirect_stdout(io.StringIO()):  # hides its printed messages
        weights = get_fp32_state_dict_from_zero_checkpoint(str(path))
    checkpoint = {name: value for name, value in first.items() if name not in _DEEPSPEED}
    return {**checkpoint, "state_dict": {name: value.clone() for name, value in weights.items()}}

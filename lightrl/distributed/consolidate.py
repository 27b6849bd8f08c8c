"""Reads a checkpoint of any strategy as one plain checkpoint, in one process, whatever the number of ranks was.

| strategy | what is on disk | what is read |
|---|---|---|
| one process, DDP | a file | it |
| FSDP2 | a folder of `torch.distributed.checkpoint` with `meta.pt` | weights and optimizer states, put together |
| DeepSpeed ZeRO | a folder with `latest` and `checkpoint/` | float32 weights and optimizer states, put together |

A plain checkpoint is what Lightning writes without sharding. It is read on the CPU, and has to fit there.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrl.compat.lightning import load_distributed_checkpoint
from lightrl.storage import DamagedError, checkpoint_kind, verify

__all__ = ["by_name", "read_checkpoint", "require_fitting_states", "require_optimizer_states", "unreadable"]


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The plain checkpoint: `state_dict`, `optimizer_states`, and what Lightning and callbacks added.

    ZeRO checkpoints hold pickled objects of DeepSpeed, so they need the package and must come from a source you trust.

    Args:
        path: of a checkpoint.

    Raises:
        ValueError: there is none, or it was not finished or is damaged.
    """
    path, kind = Path(path), checkpoint_kind(path)
    read = {"plain": _read_plain, "fsdp2": _read_fsdp2, "zero": _read_zero}[kind]
    with unreadable(path, kind):
        verify(path)
        return read(path)


def require_optimizer_states(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Refuses to go on from weights alone.

    Raises:
        ValueError: it is so.
    """
    if not checkpoint.get("optimizer_states"):
        raise ValueError(
            f"ckpt_path={str(path)!r}: the checkpoint holds no optimizer_states: it was saved with save_weights_only, "
            "or changed. Start over from its weights (lightrl export)."
        )


def require_fitting_states(optimizers: Sequence[Any], states: Sequence[Any], path: str | Path) -> None:
    """Looks whether optimizers can load their states of a plain checkpoint, and take their next step from them.

    Raises:
        ValueError: they cannot; the message names the file.
    """
    problem = None
    if len(states) != len(optimizers):
        problem = f"{len(states)} optimizer_states for this run's {len(optimizers)}"
    for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
        found = _misfit(optimizer, state)
        problem = problem or (found and f"optimizer_states.{number}{found}")
    if problem is not None:
        raise ValueError(
            f"ckpt_path={str(path)!r}: the checkpoint has {problem}: it was written with other settings of the models "
            "(lora, freeze), changed by hand, or is another run's. Take another one, or start over from its weights "
            "(lightrl export)."
        )


SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""What the optimizers of PyTorch keep in the shape of each parameter."""
NEEDED = dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("step", "exp_avg", "exp_avg_sq"))


def _misfit(optimizer: Any, state: Any) -> str | None:
    """What is wrong with an optimizer's state, for a message."""
    parts = state if isinstance(state, Mapping) else {}
    groups, of = parts.get("param_groups"), parts.get("state")
    if not isinstance(groups, list) or not isinstance(of, Mapping) or not all(isinstance(g, Mapping) for g in groups):
        return " without state and param_groups"
    sizes, own = ([len(group.get("params", ())) for group in each] for each in (groups, optimizer.param_groups))
    if sizes != own:
        return f".param_groups of {sizes} parameters, not {own}"
    for group in groups:
        rate = group.get("lr", 0.0)
        if not isinstance(rate, int | float | Tensor) or not math.isfinite(float(rate)):
            return f".param_groups with lr={str(rate)[:60]!r}"
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, (p for g in optimizer.param_groups for p in g["params"]), strict=True):
        kept = of.get(number)
        if kept is None:  # no step yet
            continue
        for name in NEEDED.get(type(optimizer).__name__, ()):
            if not isinstance(kept, Mapping) or name not in kept:
                return f".state.{number} without {name}"
        for name in SHAPED:
            value = kept.get(name)
            if isinstance(value, Tensor) and value.shape != parameter.shape:
                return f".state.{number}.{name} of shape {list(value.shape)}, not {list(parameter.shape)}"
    return None


@contextmanager
def unreadable(path: str | Path, kind: str) -> Iterator[None]:
    """One message where a checkpoint cannot be read, with the first line of the cause."""
    try:
        yield
    except DamagedError as error:
        raise ValueError(
            f"checkpoint={str(path)!r}: {error}. Take an earlier one; --ckpt_path last finds the newest that is whole."
        ) from error
    except (RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError) as error:
        cause = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"checkpoint={str(path)!r} cannot be read as a {kind} checkpoint: it is damaged, or not one of a Lightning "
            f"run ({type(error).__name__}: {cause})."
        ) from error


def _read_plain(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if "state_dict" not in checkpoint:
        raise KeyError("state_dict")
    return checkpoint


def by_name(states: dict[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """An optimizer's state with parameters named rather than numbered; `names` are those of each parameter group."""
    flat = [name for group in names for name in group]
    groups = [{**group, "params": list(own)} for group, own in zip(states["param_groups"], names, strict=True)]
    return {"state": {flat[number]: state for number, state in states["state"].items()}, "param_groups": groups}


def _by_number(states: dict[str, Any]) -> dict[str, Any]:
    """The reverse: how a plain optimizer stores its state."""
    numbers = count()
    number_of = {name: next(numbers) for group in states["param_groups"] for name in group["params"]}
    groups = [{**group, "params": [number_of[name] for name in group["params"]]} for group in states["param_groups"]]
    return {"state": {number_of[name]: state for name, state in states["state"].items()}, "param_groups": groups}


def _read_fsdp2(path: Path) -> dict[str, Any]:
    checkpoint = load_distributed_checkpoint(path)
    optimizers = sorted(name for name in checkpoint if re.fullmatch(r"optimizer_\d+", name))
    checkpoint["optimizer_states"] = [_by_number(checkpoint.pop(name)) for name in optimizers]
    return checkpoint


# ---- ZeRO ----------------------------------------------------------------------------------------------------------

DEEPSPEED_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version",
}  # fmt: skip


def _read_zero(path: Path) -> dict[str, Any]:
    folder = path / (path / "latest").read_text().strip()
    models, optimizers = (_rank_files(folder, what) for what in ("model", "optim"))
    if not models or not optimizers:
        raise ValueError(
            f"checkpoint={str(path)!r} lacks the model or optimizer states of DeepSpeed: it was not finished."
        )
    ranks = models[0]["dp_world_size"]
    if len(optimizers) != ranks:
        raise ValueError(
            f"checkpoint={str(path)!r} holds states of {len(optimizers)} of {ranks} ranks; copy all files."
        )
    parts = [rank["optimizer_state_dict"] for rank in optimizers]
    shapes, whole = models[0]["param_shapes"], parts[0]["zero_stage"] < 3
    inner, flat = ("base_optimizer_state", "single_partition_of_fp32_groups")
    if not whole:
        inner, flat = "optimizer_state_dict", "fp32_flat_groups"
    weights: dict[str, Tensor] = {}
    for number, group in enumerate(shapes):
        weights |= _join([part[flat][number] for part in parts], group, whole)
    names = [[n for i in group["params"] for n in shapes[i]] for group in parts[0][inner]["param_groups"]]
    states = _join_states([part[inner]["state"] for part in parts], shapes, whole)
    groups = [{**g, "params": own} for g, own in zip(parts[0][inner]["param_groups"], names, strict=True)]
    checkpoint = {name: value for name, value in models[0].items() if name not in DEEPSPEED_KEYS}
    checkpoint["state_dict"] = _untrained(models, whole) | weights
    for name, original in models[0]["shared_params"].items():
        if original in checkpoint["state_dict"]:
            checkpoint["state_dict"][name] = checkpoint["state_dict"][original]
    checkpoint["optimizer_states"] = [_by_number({"state": states, "param_groups": groups})]
    return checkpoint


def _rank_files(folder: Path, what: str) -> list[dict[str, Any]]:
    """Contents of the ranks' files, in the order of the ranks."""

    def rank(file: Path) -> int:
        found = re.search(r"zero_pp_rank_(\d+)_", file.name)
        return int(found[1]) if found else 0

    files = sorted(folder.glob(f"*_{what}_states.pt"), key=rank)
    return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


def _join(parts: Sequence[Tensor], shapes: dict[str, torch.Size], whole: bool) -> dict[str, Tensor]:
    """Parameters of one group from the ranks' flat parts.

    Args:
        parts: one vector per rank.
        shapes: of the group's parameters, in their order.
        whole: the parts are slices of one long vector (ZeRO-1 and 2); otherwise each rank has a slice of each
            parameter (ZeRO-3), the last padded.
    """
    joined, start, ranks = {}, 0, len(parts)
    line = torch.cat(list(parts)) if whole else None
    for name, shape in shapes.items():
        size = shape.numel()
        length = size if whole else -(-size // ranks)
        slices = [line] if line is not None else parts
        joined[name] = torch.cat([part[start : start + length] for part in slices])[:size].view(shape).detach().clone()
        start += length
    return joined


def _join_states(ranks: Sequence[dict[int, Any]], shapes: Sequence[Any], whole: bool) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name: vectors are joined, numbers such as the step are those of rank 0."""
    states: dict[str, dict[str, Any]] = {}
    for index, group in enumerate(shapes):
        for key, value in ranks[0].get(index, {}).items():
            vector = isinstance(value, Tensor) and value.dim() == 1
            joined = _join([rank[index][key] for rank in ranks], group, whole) if vector else {}
            for name in group:
                number = value.clone() if isinstance(value, Tensor) else value  # optimizers count in place
                states.setdefault(name, {})[key] = joined[name] if vector else number
    return states


def _untrained(models: Sequence[dict[str, Any]], whole: bool) -> dict[str, Tensor]:
    """Buffers and frozen parameters, so far as they were saved."""
    first = models[0]
    if whole:
        return {name: value for name, value in first["module"].items() if isinstance(value, Tensor)}
    own = {name: first["module"][name] for name in first["buffer_names"] if name in first["module"]}
    frozen: Iterable[tuple[str, Any]] = (first["frozen_param_shapes"] or {}).items()
    for name, shape in frozen:
        own |= _join([m["frozen_param_fragments"][name].flatten() for m in models], {name: shape}, False)
    return own

"""Descriptions of a run for loggers and checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import random
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightrl.checkpoints.redaction import redact, redact_arguments
from lightrl.distributed.strategies import gather_objects, has_process_group
from lightrl.models.spec import ModelSpec
from lightrl.ops.progress import count

FORMAT = 3
"""Version of the checkpoint format. Increased when older checkpoints can't be read anymore."""
SUFFIXES = ("_spec", "_factory", "_path", "")
"""Suffixes of attributes that keep a constructor argument. The one without suffix may hold the built object."""
KEPT_AS = {"rewards": "scorer", "functions": "names", "reward_models": "reward_model_specs"}
MAX_ROWS = 20
"""Longer lists are recorded by length."""


# ---- plain data ------------------------------------------------------------------------------------------------------


def hyperparameters(trainer: Any) -> dict[str, Any]:
    """Returns a run's module, data module, trainer, optimizers, versions, and command as plain data without secrets."""
    record = {
        "model": described(trainer.lightning_module),
        "data": described(trainer.datamodule),
        "trainer": {
            "max_epochs": trainer.max_epochs,
            "max_steps": trainer.max_steps,
            "precision": str(trainer.precision),
            "strategy": type(trainer.strategy).__name__,
            "processes": trainer.world_size,
        },
        "optimizers": [_optimizer(optimizer) for optimizer in trainer.optimizers],
    }
    command = shlex.join(redact_arguments(sys.argv))
    return {**redact(record), "versions": versions(), "hardware": hardware(), "command": command}


def versions() -> dict[str, str]:
    """Returns the versions of LightRL and its main dependencies."""
    own = import_module("lightrl").__version__  # works without installation
    return {"lightrl": own, **{name: version(name) for name in ("torch", "lightning", "transformers")}}


def hardware() -> str:
    """Describes the GPUs, or the CPU and the number of cores available to this process."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{count(cores or 1, 'core')} of {name}"


def described(value: Any) -> Any:
    """Converts a value to plain data. Objects become their class and constructor arguments."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)  # same order in every process
    if isinstance(value, partial):  # same form as in a config file
        name = getattr(value.func, "__qualname__", type(value.func).__name__)
        return {"class_path": f"{value.func.__module__}.{name}", "init_args": described(value.keywords)}
    if isinstance(value, list | tuple):
        return f"{len(value)} entries" if len(value) > MAX_ROWS else [described(inner) for inner in value]
    if isinstance(value, torch.dtype | torch.device | torch.Tensor | Path):
        return str(value)
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
    bases = {base.__module__.split(".")[0] for base in type(value).__mro__}
    if isinstance(value, nn.Module) and "lightning" not in bases:  # a loaded model
        return type(value).__name__
    return {"class_path": f"{type(value).__module__}.{type(value).__name__}", "init_args": _arguments(value)}


def _arguments(value: Any) -> dict[str, Any]:
    """Returns constructor arguments, including those passed to parent classes, if the object keeps them."""
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        init = cls.__dict__.get("__init__")
        if not inspect.isfunction(init):
            continue
        parameters = inspect.signature(init).parameters.values()
        for name in (p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)):
            kept = [KEPT_AS[name]] if name in KEPT_AS else [f"{name}{suffix}" for suffix in SUFFIXES] + [f"_{name}"]
            place = next((each for each in kept if each in vars(value)), None)
            if place is not None and name not in found:
                found[name] = described(vars(value)[place])
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def innermost(optimizer: Any) -> Any:
    """Returns an optimizer without the wrappers of strategies."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _optimizer(optimizer: Any) -> dict[str, Any]:
    optimizer = innermost(optimizer)
    settings = {name: described(value) for name, value in getattr(optimizer, "defaults", {}).items()}
    groups = {f"lr of {group['name']}": group["lr"] for group in optimizer.param_groups if "name" in group}
    return {"class_path": f"{type(optimizer).__module__}.{type(optimizer).__name__}", **settings, **groups}


# ---- checkpoint ------------------------------------------------------------------------------------------------------


def description(module_class: str, models: dict[str, ModelSpec], tokenizer: str | None) -> dict[str, Any]:
    """Returns the checkpoint format, module class, model specs by role, and tokenizer (None: the model's) for a file.

    Excludes secrets.
    """
    specs = {}
    for role, spec in models.items():
        plain = dataclasses.asdict(dataclasses.replace(spec))  # `replace` omits a loaded model
        specs[role] = {name: value for name, value in {**plain, "path": spec.name}.items() if name != "live"}
    return {"format": FORMAT, "class": module_class, "models": redact(specs), "tokenizer": tokenizer}


def require_own(stored: Mapping[str, Any], module_class: str) -> None:
    """Raises a ValueError if a checkpoint, described by `stored` (or {}), is of a different class or format."""
    if stored.get("class") != module_class:
        raise ValueError(
            f"The checkpoint was written by {stored.get('class', 'something other than LightRL')}, not by "
            f"{module_class}. Resume with the same class_path, or start a new run from its exported model directory."
        )
    if stored.get("format") != FORMAT:
        raise ValueError(
            f"The checkpoint has format {stored.get('format', 1)}, but this version of LightRL reads format {FORMAT}. "
            "Resume with the release that wrote it, or export its model with that release and start a new run."
        )


def require_weights(own: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raises a ValueError if the checkpoint lacks trained parameters (`own`, by name) or their shapes differ."""
    fix = "Resume with the model settings (lora, freeze, critic.shared) of the original run."
    missing = sorted(own.keys() - stored.keys())
    if missing:
        raise ValueError(
            f"The checkpoint lacks {len(missing)} trained parameters of this module, such as {missing[0]}. {fix}"
        )
    for name, tensor in own.items():
        if tensor.numel() and stored[name].shape != tensor.shape:  # ZeRO-3 leaves empty tensors here
            raise ValueError(
                f"The checkpoint's {name} has shape {list(stored[name].shape)}, not {list(tensor.shape)}. {fix}"
            )


def collect_random_states() -> list[dict[str, Any]]:
    """Returns the states of Python's, NumPy's, and torch's random generators, one entry per rank. Collective."""
    name, keys, *rest = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, numbers, gauss = random.getstate()
    own: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *map(float, rest)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    return gather_objects(own)


def restore_random_states(states: list[dict[str, Any]]) -> None:
    """Restores this rank's random states. A rank missing in the checkpoint keeps its current states."""
    rank = torch.distributed.get_rank() if has_process_group() else 0
    if rank >= len(states):
        return
    state = states[rank]
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def change_settings(trainer: Any, given: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Sets what a resumed run gives its optimizer's groups differently, instead of the checkpoint's values.

    The learning rate is multiplied by `given / saved`, which keeps the position in a schedule.
    """
    for number, (own, before) in enumerate(zip(given, saved, strict=False)):
        group = trainer.optimizers[0].param_groups[number]
        for name in sorted(name for name in own.keys() & before.keys() if own[name] != before[name]):
            rank_zero_info(f"Resuming with {name}={own[name]} instead of the checkpoint's {before[name]}.")
            if name != "lr" or not before["lr"]:
                group[name] = own[name]
                continue
            group["lr"] *= own["lr"] / before["lr"]
            for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
                for each in (scheduler, *getattr(scheduler, "_schedulers", ())):  # of SequentialLR
                    if hasattr(each, "base_lrs"):
                        each.base_lrs[number] = group["initial_lr"] = own["lr"]


# ---- settings --------------------------------------------------------------------------------------------------------


def run_settings(module: Any, data: Any) -> dict[str, Any]:
    """Returns the settings that must match for `--ckpt_path last` to use a run's checkpoint."""
    own = {"module": type(module).__name__}
    if not hasattr(data, "prompts_per_rollout"):
        return own
    numbers = {name: getattr(data, name) for name in ("group_size", "prompts_per_rollout", "seed")}
    plain = json.dumps(_described_source(data.prompts), sort_keys=True, default=lambda value: type(value).__qualname__)
    prompts = hashlib.sha256(plain.encode()).hexdigest()[:12]
    return {**own, **numbers, "actor": module.actor_spec.name, "prompts": prompts}


def _described_source(source: Any) -> Any:
    """Returns plain data that identify the prompts: files by name and size, lists by length and their ends."""
    if hasattr(source, "sources"):  # a mixture
        return [[_described_source(each) for each in source.sources], source.weights]
    if hasattr(source, "source"):  # a curriculum
        return _described_source(source.source)
    rows, path = source.rows, Path(str(source.path))
    if isinstance(rows, list):
        rows = [len(rows), rows[:1], rows[-1:]]
    elif rows is None:
        rows = [path.name, path.stat().st_size] if path.is_file() else str(path)
    else:
        rows = described(rows)
    return [rows, source.name, source.split, source.limit, source.prompt_column]

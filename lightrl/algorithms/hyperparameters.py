"""What loggers call hyperparameters, of a run that no configuration describes: one begun from Python."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightrl.checkpoints.redaction import redact, redact_arguments

SUFFIXES = ("_spec", "_factory", "_path", "")
"""Of the attributes that keep an argument; without one may stand what was built from it."""
KEPT_AS = {"rewards": "scorer", "functions": "names", "reward_models": "reward_model_specs"}
MOST_ROWS = 20
"""A longer list is rows, of which the number is said."""


def hyperparameters(trainer: Any) -> dict[str, Any]:
    """Module, data module, trainer, optimizers, versions and command as plain data without secrets.

    Args:
        trainer: whose fit begins.
    """
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
    return {**redact(record), "versions": versions(), "command": shlex.join(redact_arguments(sys.argv))}


def versions() -> dict[str, str]:
    """Of LightRL and of what its numbers depend on most."""
    own = import_module("lightrl").__version__  # of a folder that is not installed, too
    return {"lightrl": own, **{name: version(name) for name in ("torch", "lightning", "transformers")}}


def described(value: Any) -> Any:
    """Plain data: numbers and texts as they are, an object by its class and the arguments that it was made with."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)  # in the same order in each process
    if isinstance(value, partial):  # as a configuration gives what is called later
        name = getattr(value.func, "__qualname__", type(value.func).__name__)
        return {"class_path": f"{value.func.__module__}.{name}", "init_args": described(value.keywords)}
    if isinstance(value, list | tuple):
        return f"{len(value)} entries" if len(value) > MOST_ROWS else [described(inner) for inner in value]
    if isinstance(value, torch.dtype | torch.device | torch.Tensor | Path):
        return str(value)
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
    if isinstance(value, nn.Module) and "lightning" not in _bases(value):  # a live model
        return type(value).__name__
    return {"class_path": f"{type(value).__module__}.{type(value).__name__}", "init_args": _arguments(value)}


def _bases(value: Any) -> set[str]:
    return {base.__module__.split(".")[0] for base in type(value).__mro__}


def _arguments(value: Any) -> dict[str, Any]:
    """Constructor's arguments, those that it passes to its parents included, as far as the object keeps them."""
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


def _optimizer(optimizer: Any) -> dict[str, Any]:
    """Class and settings, with the rate of each group that has a name."""
    while hasattr(optimizer, "optimizer"):  # what Lightning and DeepSpeed wrap around it
        optimizer = optimizer.optimizer
    settings = {name: described(value) for name, value in getattr(optimizer, "defaults", {}).items()}
    groups = {f"lr of {group['name']}": group["lr"] for group in optimizer.param_groups if "name" in group}
    return {"class_path": f"{type(optimizer).__module__}.{type(optimizer).__name__}", **settings, **groups}

"""What a checkpoint records about its run, and how a resumed run is compared with it."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightrl.algorithms.hyperparameters import described
from lightrl.checkpoints.redaction import redact
from lightrl.data.curriculum import PromptCurriculum
from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.data.rows import RowSource
from lightrl.models.spec import ModelSpec
from lightrl.rollout.datamodule import RolloutDataModule

FORMAT = 2
"""Number of the layout of checkpoints; raised when older ones can no longer be read."""
NOT_COMPARED = {
    *("engine", "micro_batch_tokens", "stall_timeout", "max_concurrency", "eval_sampling"),  # don't change learning
    *("rows", "functions", "optimizer"),  # compared by contents, names, and what was built
}
COMPARED_CALLBACKS = {"AdaptiveEntropy", "AdaptiveKL", "LinearKL", "ReferenceSync", "RewardNormalization"}
EDGE = 1 << 16


def description(module_class: str, models: dict[str, ModelSpec], tokenizer: str | None) -> dict[str, Any]:
    """The format, the class that writes the checkpoint, and how its models are built, as plain data without secrets.

    Args:
        module_class: Name of the class.
        models: Role -> how the model is built.
        tokenizer: Folder or model ID. None if it is the model's.
    """
    specs = {}
    for role, spec in models.items():
        specs[role] = {**asdict(replace(spec)), "path": spec.name}  # without a live model, which `replace` leaves out
        del specs[role]["live"]
    return {"format": FORMAT, "class": module_class, "models": redact(specs), "tokenizer": tokenizer}


def require_own(stored: Mapping[str, Any], module_class: str) -> None:
    """Rejects a checkpoint that the module cannot continue from.

    Args:
        stored: The checkpoint's description, empty without one.
        module_class: Name of the class that reads it.

    Raises:
        ValueError: Another class or another format of LightRL wrote it.
    """
    if stored.get("class") != module_class:
        raise ValueError(
            f"The checkpoint was written by {stored.get('class', 'something other than LightRL')}, not by "
            f"{module_class}. Resume with the same class_path, or start over from its exported model folder."
        )
    if stored.get("format") != FORMAT:
        raise ValueError(
            f"The checkpoint has format {stored.get('format', 1)}, and this version of LightRL reads format {FORMAT}. "
            "Resume with the release that wrote it, or export its model there and start over from the folder."
        )


def require_weights(own: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Rejects weights that are not those of the module, which keeps others at their initial values.

    Args:
        own: Name -> tensor of what is trained here.
        stored: The checkpoint's.

    Raises:
        ValueError: Parameters are missing, or have another shape.
    """
    fix = "Resume with the settings of the models (lora, freeze, critic.shared) that it was written with."
    missing = sorted(own.keys() - stored.keys())
    if missing:
        raise ValueError(
            f"The checkpoint lacks {len(missing)} trained parameters of this module, such as {missing[0]}. {fix}"
        )
    for name, tensor in own.items():
        if tensor.numel() and stored[name].shape != tensor.shape:  # ZeRO-3 keeps its parts elsewhere
            raise ValueError(
                f"The checkpoint's {name} has shape {list(stored[name].shape)}, not {list(tensor.shape)}. {fix}"
            )


# ---- settings --------------------------------------------------------------------------------------------------------


def optimizers_of(trainer: Any) -> dict[str, Any]:
    """Classes and arguments of the run's optimizers, as plain data."""
    optimizers = [_innermost(each) for each in trainer.optimizers]
    return {
        "optimizers": [type(each).__name__ for each in optimizers],
        "optimizer_arguments": [_plain(getattr(each, "defaults", {})) for each in optimizers],
    }


def compare(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between a checkpoint's run and this one, as "name=value (the checkpoint's: value), ...".

    Args:
        stored: Description in the checkpoint.
        now: `optimizers_of`, `run_settings` as `settings`, and `given_arguments` as `arguments`, of this run.

    Raises:
        ValueError: The checkpoint was written with another optimizer, whose state this one cannot use.
    """
    for was, own in zip(stored.get("optimizers", ()), now["optimizers"], strict=False):
        if was != own:
            raise ValueError(
                f"optimizer={own}: the checkpoint's is {was}, whose state {own} cannot use. Resume with {was}, or "
                "start over from the checkpoint's weights (lightrl export)."
            )
    saved, settings = stored.get("settings", {}), now.get("settings", {})
    changed = [(name, saved[name], value) for name, value in settings.items() if saved.get(name, value) != value]
    named = tuple(f"{name}." for name in ("model.actor.path", *(f"data.{name}" for name in settings)))
    pairs = [(stored.get("arguments", {}), now.get("arguments", {}), "")]
    optimizers = zip(stored.get("optimizer_arguments", ()), now["optimizer_arguments"], strict=False)
    pairs += [(before, given, "optimizer") for before, given in optimizers]
    for before, given, part in pairs:
        changed += [each for each in _differences(before, given, part) if not f"{each[0]}.".startswith(named)]
    return ", ".join(f"{name}={now!s:.60} (the checkpoint's: {before!s:.60})" for name, before, now in changed)


def _innermost(optimizer: Any) -> Any:
    """The optimizer inside what Lightning and DeepSpeed wrap around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def given_arguments(trainer: Any) -> dict[str, Any]:
    """Arguments of the module, the data module, and callbacks, as far as they keep them, and a digest of the rows."""
    data: Any = trainer.datamodule
    rows, contents = getattr(data, "train", None), {}
    if isinstance(rows, RowSource) and isinstance(rows.rows, list | None):
        contents = {"train.rows": _digest(_rows_described(rows))}
    steps = {
        name: getattr(trainer, name, None) for name in ("precision", "accumulate_grad_batches", "gradient_clip_val")
    }
    callbacks = [
        each for each in trainer.callbacks if {cls.__name__ for cls in type(each).__mro__} & COMPARED_CALLBACKS
    ]
    parts = {"callbacks": sorted(callbacks, key=_class_name), **steps}
    return {**_plain({"model": trainer.lightning_module, "data": data, "trainer": parts}), **contents}


def _plain(value: Any) -> Any:
    """As it is read again from a checkpoint without code, and without secrets."""
    return json.loads(json.dumps(redact(described(value)), default=str))


def _differences(before: Any, now: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """(dotted name, before, now) of what differs. Arguments that only one has are skipped: versions add some."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        kind, other = before.get("class_path"), now.get("class_path")
        if kind != other:
            yield name, _shown(before), _shown(now)
            return
        if kind is not None:
            before, now = before.get("init_args", {}), now.get("init_args", {})
        for key in [key for key in now if key in before and key not in NOT_COMPARED]:
            yield from _differences(before[key], now[key], f"{name}.{key}".strip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, new, f"{name}.{number}")
    elif before != now:
        yield name, _shown(before), _shown(now)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    kind = value.get("class_path") if isinstance(value, Mapping) else None
    return str(value) if kind is None else str(kind).rpartition(".")[2]


def run_settings(module: Any, data: Any) -> dict[str, Any]:
    """What must be the same for `--ckpt_path last` to take a run's checkpoint."""
    own = {"module": type(module).__name__}
    if not isinstance(data, RolloutDataModule):
        return own
    numbers = {name: getattr(data, name) for name in ("group_size", "prompts_per_rollout", "seed")}
    return {**own, **numbers, "actor": module.actor_spec.name, "prompts": data_fingerprint(data.prompts)}


def data_fingerprint(source: PromptSource | PromptMixture | PromptCurriculum) -> str:
    """Twelve characters that change with the number of rows, the first or last row, or the source.

    A local file counts by its size and its first and last 64 KiB, a folder by the names and sizes of its files, a hub
    dataset by its name, and a list by its length and its first and last row.
    """
    return _digest(_described(source))


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=_class_name).encode()).hexdigest()[:12]


def _described(source: Any) -> Any:
    if isinstance(source, PromptCurriculum):
        return _described(source.source)
    if isinstance(source, PromptMixture):
        return [[_described(each) for each in source.sources], source.weights]
    return [_rows_described(source), source.name, source.split, source.limit, source.prompt_column]


def _rows_described(source: PromptSource | RowSource) -> Any:
    rows = source.rows
    if isinstance(rows, list):
        return [len(rows), rows[:1], rows[-1:]]
    if rows is not None:
        return rows.__qualname__ if inspect.isfunction(rows) else [_class_name(rows), vars(rows)]
    path = Path(str(source.path))
    if path.is_dir():
        return sorted([str(file.relative_to(path)), file.stat().st_size] for file in path.rglob("*") if file.is_file())
    if not path.is_file():
        return str(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(EDGE)
        file.seek(max(size - EDGE, 0))
        return [size, hashlib.sha256(start + file.read(EDGE)).hexdigest()]


def _class_name(value: Any) -> str:
    return type(value).__qualname__

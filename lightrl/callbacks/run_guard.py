"""Keeps a run's folder to one run, its checkpoints whole, and a resumed run to the settings it began with."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import inspect
import json
import secrets
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightrl.algorithms.hyperparameters import described
from lightrl.callbacks.entropy_control import AdaptiveEntropy
from lightrl.callbacks.kl_control import AdaptiveKL, LinearKL
from lightrl.callbacks.reference_sync import ReferenceSync
from lightrl.callbacks.reward_normalization import RewardNormalization
from lightrl.callbacks.run_folder import run_folder
from lightrl.data.curriculum import PromptCurriculum
from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.data.rows import RowSource
from lightrl.distributed.checkpoint_io import CheckedCheckpointIO
from lightrl.distributed.consolidate import require_fitting_states, require_optimizer_states
from lightrl.redaction import redact
from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.storage import FolderLock, atomic_write, checkpoint_kind, clean_leftovers, read_records

__all__ = ["RunGuard", "data_fingerprint", "is_of_another_run", "other_settings"]

RECORD = "lightrl_run"
EDGE = 1 << 16
SETTINGS = "run_settings.json"
"""In a run's folder: what `run_settings` gave."""
RUN = ".lightrl.run"
"""Beside checkpoints: the id of the run that began there last, since when those of others are not its own."""


class RunGuard(Callback):
    """Holds the folders a run writes to, writes its checkpoints whole, and compares a checkpoint with the run.

    The command line adds it to every run, `RolloutCheckpoint` does elsewhere. While a run trains or evaluates, another
    one in the same folder of the logger, or of checkpoints, is refused, naming this one; what a run that died left half
    written there is removed. While it trains:

    - checkpoint files are written by `CheckedCheckpointIO`, also those of Lightning's `ModelCheckpoint`, unless the
      Trainer was given another plugin for it;
    - a folder that has checkpoints of an earlier run gets `.lightrl.run`, the id that this run's own carry, by which
      `--ckpt_path last` leaves the others alone; a resumed run keeps the id of its checkpoint;
    - the folder gets `run_settings.json`, by which `--ckpt_path last` knows a run's own checkpoints from others';
    - a resumed run is refused another optimizer, and warned, once, of other prompts and rows, another group size, seed,
      batch size, and of each other argument of the module, the data module, the optimizer, and callbacks that learning
      depends on.
    """

    def __init__(self) -> None:
        self._locks: dict[Path, FolderLock] = {}
        self._run = ""
        self._settings: dict[str, Any] = {}
        self._arguments: dict[str, Any] = {}
        self._resumed: Mapping[str, Any] | None = None  # the checkpoint, until it has been compared

    def hold(self, folder: str | Path) -> None:
        """Locks a folder until the run ends, and removes leftovers of runs that died there.

        Raises:
            ValueError: another run holds it; the message names its process.
        """
        path = Path(folder).resolve()  # two names of one folder are one lock
        if path in self._locks and not self._locks[path].ended:
            return
        lock = self._locks[path] = FolderLock(path)
        cleaned = clean_leftovers(path, other_hosts=lock.sure)
        if cleaned:
            rank_zero_info(f"Removed what a run that died left half written: {', '.join(map(str, cleaned))}")

    def release(self) -> None:
        """Releases all folders."""
        while self._locks:
            self._locks.popitem()[1].release()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Installs the checkpoint plugin and locks the logger's folder."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = CheckedCheckpointIO()
        if stage != "fit":
            folder = trainer.log_dir
            if trainer.loggers and folder is not None:
                self._hold_for(trainer, folder)
            return
        self._run = trainer.strategy.broadcast(secrets.token_hex(8))
        self._settings = run_settings(trainer)  # before a checkpoint's seed takes the place of the given one
        self._arguments = given_arguments(trainer)
        folder = trainer.log_dir  # every rank asks, because Lightning answers with rank 0's
        if trainer.loggers and folder is not None:
            self._hold_for(trainer, folder)
            own = run_folder(trainer)  # where `--ckpt_path last` looks for it
            if Path(folder).resolve() in self._locks:
                own.mkdir(parents=True, exist_ok=True)
                with atomic_write(own / SETTINGS, "w") as file:
                    json.dump(self._settings, file)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Locks the checkpoints' folders; the optimizers exist, and are not yet restored from a checkpoint."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                self._hold_for(trainer, callback.dirpath)
        self._compare(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says whose the checkpoints are from now on, where there are others."""
        for folder in self._locks:
            resumed_here = trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve().parent == folder
            if (folder / RUN).is_file() or (not resumed_here and any(folder.glob("*.ckpt"))):
                with atomic_write(folder / RUN, "w") as file:
                    file.write(self._run)

    def _hold_for(self, trainer: Trainer, folder: str | Path) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run and "://" not in str(folder):  # type: ignore[attr-defined]
            self.hold(folder)

    # ---- what a resumed run was --------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the names of the optimizers and the settings that a resumed run is compared with."""
        names = [_optimizer_name(optimizer) for optimizer in trainer.optimizers]
        given = [_plain(getattr(_innermost(optimizer), "defaults", {})) for optimizer in trainer.optimizers]
        checkpoint[RECORD] = {
            **{"run": self._run, "optimizers": names, "settings": self._settings},
            **{"arguments": self._arguments, "optimizer_arguments": given},
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Compares the checkpoint with this run.

        Raises:
            ValueError: it was written with another optimizer.
        """
        if trainer.state.fn != "fit":
            return
        self._resumed = checkpoint
        self._run = _record(checkpoint, "run", str) or self._run
        none = checkpoint.get("optimizer_states") == [] == _record(checkpoint, "optimizers", list)
        if trainer.strategy.lightning_restore_optimizer and not none:  # else the strategy has loaded them from shards
            require_optimizer_states(checkpoint, str(trainer.ckpt_path))
        if trainer.optimizers:  # sharded strategies have theirs before the checkpoint
            self._compare(trainer)

    def _compare(self, trainer: Trainer) -> None:
        """With the checkpoint, once both it and the optimizers are there."""
        if self._resumed is None:
            return
        checkpoint, self._resumed = self._resumed, None
        states = checkpoint.get("optimizer_states", [])
        self._refuse_another_optimizer(trainer, checkpoint, states)
        if trainer.strategy.lightning_restore_optimizer:
            require_fitting_states(trainer.optimizers, states, str(trainer.ckpt_path))
        saved = _record(checkpoint, "settings", dict)
        changed = [
            f"{name}={self._settings[name]} (the checkpoint's: {saved[name]})"
            for name in self._settings
            if name in saved and saved[name] != self._settings[name]
        ]
        pairs = [(_record(checkpoint, "arguments", dict), self._arguments, "")]
        for optimizer, given in zip(trainer.optimizers, _record(checkpoint, "optimizer_arguments", list), strict=False):
            pairs.append((given, _plain(getattr(_innermost(optimizer), "defaults", {})), "optimizer"))
        own_names = {"prompts": "data.prompts.path", "actor": "model.actor.path"}
        said = tuple(own_names.get(name, f"data.{name}") for name in saved)
        changed += [
            f"{name}={now:.60} (the checkpoint's: {old:.60})"
            for before, given, part in pairs
            for name, old, now in _differences(before, given, part)
            if not f"{name}.".startswith(tuple(f"{each}." for each in said))
        ]
        if changed:
            rank_zero_warn(
                f"This run goes on with other settings than its checkpoint was written with: {', '.join(changed)}. The "
                "optimizer's (learning rate) and, with rollouts, the seed and place in the prompts are those of the "
                "checkpoint; the rest is as given now, so the run is no longer the one that began."
            )

    def _refuse_another_optimizer(self, trainer: Trainer, checkpoint: Mapping[str, Any], states: Any) -> None:
        recorded = _record(checkpoint, "optimizers", list)
        states = states or [{}] * len(recorded)
        names = recorded or [None] * len(states)
        for optimizer, name, state in zip(trainer.optimizers, names, states, strict=False):
            own, settings = _optimizer_name(optimizer), _settings_of(state)
            missing = sorted(getattr(optimizer, "defaults", {}).keys() - settings) if settings else []
            if (name is not None and name != own) or (name is None and missing):
                was = name or f"another one, without {', '.join(missing)}"
                raise ValueError(
                    f"optimizer={own}: the checkpoint's is {was}, whose state {own} cannot go on from. "
                    "Resume with the checkpoint's optimizer, or start over from its weights (lightrl export)."
                )

    # ---- the end; after an error the locks go with the process, since others may still save --------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lets the next run of this process have the folders, and has the ranks that it launched end with it.

        Lightning leaves them, and a stopped one would stay.
        """
        for lock in self._locks.values():
            lock.end_run()
        launcher = trainer.strategy.launcher
        if trainer.world_size > 1 and launcher is not None and isinstance(exception, Exception):
            atexit.register(launcher.kill, signal.SIGKILL)  # when others have saved and said what they have to

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Releases the folders."""
        self.release()


def is_of_another_run(path: Path) -> bool:
    """Whether a checkpoint that can be read was written before the run that began last in its folder began."""
    mark = path.parent / RUN
    if not mark.is_file():
        return False
    zero = path.is_dir() and checkpoint_kind(path) == "zero"  # with objects of DeepSpeed, also where it is resumed
    files = [path] if path.is_file() else sorted([*path.glob("meta.pt"), *path.rglob("*_model_states.pt")])
    for file in files[:1]:
        with contextlib.suppress(Exception):  # of a file that was not made by LightRL nearly anything
            stored = torch.load(file, map_location="cpu", weights_only=not zero, mmap=True)
            return bool(_record(stored, "run", str) != mark.read_text())
    return True


def _innermost(optimizer: Any) -> Any:
    """The optimizer itself, inside what Lightning and DeepSpeed wrap around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _optimizer_name(optimizer: Any) -> str:
    return type(_innermost(optimizer)).__name__


def _settings_of(state: Any) -> set[str]:
    groups = state.get("param_groups", []) if isinstance(state, Mapping) else []
    return set(groups[0]) if groups else set()


def _record(checkpoint: Mapping[str, Any], name: str, kind: type) -> Any:
    """What `RunGuard` put into a checkpoint, if it did; an empty one of its kind where not."""
    record = checkpoint.get(RECORD)
    found = record.get(name) if isinstance(record, Mapping) else None
    return found if isinstance(found, kind) else kind()


PASSED_OVER = {
    *(
        "engine",
        "micro_batch_tokens",
        "stall_timeout",
        "max_concurrency",
        "eval_sampling",
    ),  # nothing is learned by them
    *("rows", "functions", "optimizer"),  # compared by contents, names and what was built
}
"""Arguments of which a difference is not told."""
LEARNED_BY = (AdaptiveEntropy, AdaptiveKL, LinearKL, ReferenceSync, RewardNormalization)
"""Callbacks whose presence and arguments are compared."""


def given_arguments(trainer: Trainer) -> dict[str, Any]:
    """Those of the module, the data module and callbacks, as far as they keep them, and what tells the rows."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    rows, contents = getattr(data, "train", None), {}
    if isinstance(rows, RowSource) and isinstance(rows.rows, list | None):
        contents = {"train.rows": _digest(_rows_described(rows))}
    steps = {
        name: getattr(trainer, name, None) for name in ("precision", "accumulate_grad_batches", "gradient_clip_val")
    }
    callbacks = sorted((each for each in trainer.callbacks if isinstance(each, LEARNED_BY)), key=_class_name)  # type: ignore[attr-defined]
    parts = {"model": trainer.lightning_module, "data": data, "trainer": steps | {"callbacks": callbacks}}
    return _plain({**parts, **contents})


def _plain(value: Any) -> Any:
    """As it is read again from a checkpoint without code, and without secrets."""
    return json.loads(json.dumps(redact(described(value)), default=str))


def _differences(before: Any, now: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """(dotted name, before, now) of what differs. What only one of both has is passed over: versions add arguments."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        kind, other = before.get("class_path"), now.get("class_path")
        if kind != other:
            yield name, _shown(before), _shown(now)
            return
        if kind is not None:
            before, now = before.get("init_args", {}), now.get("init_args", {})
        for key in [key for key in now if key in before and key not in PASSED_OVER]:
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


def run_settings(trainer: Trainer) -> dict[str, Any]:
    """What must be the same for a resumed run to be the run that began."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, RolloutDataModule):
        return {"module": type(trainer.lightning_module).__name__}
    numbers = {name: getattr(data, name) for name in ("group_size", "prompts_per_rollout", "seed")}
    module = {"module": type(data.learner).__name__, "actor": data.learner.actor_spec.name}
    return {**numbers, **module, "prompts": data_fingerprint(data.prompts)}


def other_settings(trainer: Trainer, folder: Path) -> str:
    """What of the run in a folder differs from this one, as "name=value, ..."; "" where nothing does, or is known."""
    file = folder / SETTINGS
    if not file.is_file():
        return ""
    try:
        (theirs,), own = read_records(file), run_settings(trainer)
    except ValueError:  # it was not written to its end, or changed
        return ""
    return ", ".join(f"{name}={theirs[name]}" for name in own if name in theirs and theirs[name] != own[name])


def data_fingerprint(source: PromptSource | PromptMixture | PromptCurriculum) -> str:
    """Twelve characters that change when the prompts do: the number of rows, the first or last of them, or the source.

    Of a local file its size and its first and last 64 KiB count, not its name; of a folder the names and sizes of its
    files; of a hub data set its name; of a list the number of rows, the first and the last.
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

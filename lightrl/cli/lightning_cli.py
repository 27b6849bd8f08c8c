"""Lightning's command line for LightRL's modules: what it adds to `LightningCLI`, and which classes YAML may name."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from tempfile import mkdtemp
from typing import Any, Literal

from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

# All rooms whose classes YAML may name without a path.
import lightrl.algorithms
import lightrl.callbacks
import lightrl.data
import lightrl.distributed
import lightrl.engines
import lightrl.environments
import lightrl.objectives
import lightrl.rewards
import lightrl.rollout
from lightrl.algorithms.run_record import versions
from lightrl.algorithms.saving import SavesPretrained
from lightrl.algorithms.schedule import LRSchedule
from lightrl.callbacks import ThroughputMonitor
from lightrl.checkpoints.guard import RunGuard
from lightrl.checkpoints.last import take_whole_ones
from lightrl.checkpoints.lock import LOCK
from lightrl.checkpoints.redaction import plain_secrets, redact, redact_arguments, remember_secret, resolve_environment
from lightrl.checkpoints.rollout_checkpoint import RolloutCheckpoint, preempt, preemptions
from lightrl.compat.jsonargparse import keep_lists, start_from_own_defaults
from lightrl.compat.lightning import YamlCLI, begin_table
from lightrl.data import PromptSource
from lightrl.distributed.strategies import refuse_crowd
from lightrl.engines import Engine
from lightrl.objectives.aggregation import Aggregation
from lightrl.objectives.estimators import AdvantageEstimator
from lightrl.objectives.kl import KLPenalty
from lightrl.objectives.ppo_clip import PolicyLoss

# These packages load their modules lazily.
for package in (lightrl.algorithms, lightrl.distributed, lightrl.engines, lightrl.objectives):
    for name in package.__all__:
        getattr(package, name)
EVALUATIONS = ("validate", "test", "predict")
set_parsing_settings(subclasses_enabled=[PromptSource, LRSchedule])  # dataclasses whose class YAML may name, and keeps
keep_lists()
start_from_own_defaults(Engine, AdvantageEstimator, Aggregation, KLPenalty, PolicyLoss)


class LightRLCLI(YamlCLI):
    """`LightningCLI` in subclass mode, without a checkpoint's hyperparameters overriding YAML on resume.

    What stands in the configuration as `${env:NAME}` is taken from the environment when classes are built, and
    written to the run's folder as it stands. Other secrets are written as `***`.
    """

    config: Any

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Defaults that manual optimisation and generated batches need."""
        parser.set_defaults(
            {
                "trainer.num_sanity_val_steps": 0,
                "trainer.use_distributed_sampler": False,
                "trainer.log_every_n_steps": 1,
            }
        )
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="folder of all that the run writes: trainer.default_root_dir; logs there for `lightrl report` "
            "beside any loggers given, and for TensorBoard where none is. What validate, test and predict write goes "
            "to folders of these names below it.",
        )
        parser.add_argument(
            "--without",
            type=list[Literal["ThroughputMonitor"]],
            default=[],
            help="callbacks to leave out of those that every run gets unasked.",
        )
        parser.add_argument(
            "--base",
            type=str | list[str] | None,
            default=None,
            help="in a configuration file: files that it builds on, relative to itself; they are read before it.",
        )

    def before_instantiate_classes(self) -> None:
        """Looks whether the run can have its folder; the saved configuration is whole and builds on no other."""
        config = self._of_command(self.config)
        config.base = None
        name = "trainer.default_root_dir" if config.run_dir is None else "run_dir"
        if config.run_dir is not None:
            config.trainer.default_root_dir = config.run_dir
        _require_folder(config.trainer.default_root_dir, name)
        _require_remote(config.get("ckpt_path"))

    def _put_into_run_dir(self) -> None:
        """Has loggers write to `run_dir`, wherever the process goes later.

        These loggers are not written to `config.yaml`, which may be used again for another folder or command.
        """
        config = self._of_command(self.config)
        folder = config.run_dir
        if folder is None:
            return
        if "://" not in folder:
            folder = os.path.abspath(folder)
        config.trainer.default_root_dir = folder
        if self.subcommand in EVALUATIONS:  # below the run, whose table, samples and configuration stay as they are
            folder = os.path.join(folder, self.subcommand)
            warnings.filterwarnings("ignore", message="The dirpath has changed from")
        table, tensorboard = (
            Namespace(
                class_path=f"lightning.pytorch.loggers.{logger}",
                # Not as the version, of which Lightning's progress bar shows the end.
                init_args=Namespace(save_dir=os.path.join(folder, below), name="", version=""),
            )
            for logger, below in (("CSVLogger", ""), ("TensorBoardLogger", "tensorboard"))
        )
        given = config.trainer.logger
        if given in (None, True):
            config.trainer.logger = [table, tensorboard]
        elif given is not False:
            several = given if isinstance(given, list) else [given]
            has_csv = any(logger.class_path.endswith("CSVLogger") for logger in several)
            config.trainer.logger = several if has_csv else [table, *several]

    def instantiate_classes(self) -> None:
        """Builds everything with secrets, and keeps them out of what is written."""
        given = self.config
        self.config = self._written = redacted(given)
        self.record_hyperparameters()  # what checkpoints and loggers call hyperparameters
        self.config = from_environment(given)
        self._put_into_run_dir()
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer, guarded."""
        self.config = self._written  # which the trainer's callback writes to the run's folder
        trainer = super().instantiate_trainer(**kwargs)
        refuse_crowd(trainer.strategy)  # before ranks are started
        self.guard = RunGuard()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        config = self._of_command(self.config)
        wanted = "ThroughputMonitor" not in config.without and not trainer.barebones
        if wanted and not any(isinstance(callback, ThroughputMonitor) for callback in callbacks):
            callbacks.insert(0, ThroughputMonitor())
        callbacks.insert(0, self.guard)
        savers = trainer.checkpoint_callbacks
        if savers and not any(isinstance(saver, RolloutCheckpoint) for saver in savers):
            callbacks.append(RolloutCheckpoint(None, dirpath=getattr(savers[0], "dirpath", None), save_top_k=0))
        take_whole_ones(trainer)
        return trainer

    def before_fit(self) -> None:
        """Holds the run's folder before a logger begins a file in it; tells the loggers what the run is."""
        self._end_by_signals()
        if not self.trainer.is_global_zero or getattr(self.trainer, "fast_dev_run", False):
            return
        self._begin_loggers()
        self._hold_folders()
        for logger in self.trainer.loggers:
            if isinstance(logger, CSVLogger):
                begin_table(logger, self.trainer)
        if isinstance(self.model, SavesPretrained):
            self.model.leave_hyperparameters()
        for logger in self.trainer.loggers:
            logger.log_hyperparams(self._record())

    def before_validate(self) -> None:
        """Begins the loggers that record the command, and holds their folders."""
        self._end_by_signals()
        self._begin_loggers()
        if self.trainer.is_global_zero and not getattr(self.trainer, "fast_dev_run", False):
            self._hold_folders()

    before_test = before_predict = before_validate

    def _end_by_signals(self) -> None:
        """Has SIGTERM and its like end the command, at once until `RolloutCheckpoint` takes them for training."""
        if threading.current_thread() is threading.main_thread():
            for signum in preemptions(self.trainer):
                signal.signal(signum, preempt)

    def _hold_folders(self) -> None:
        """Before a logger begins a file in one, for which Lightning deletes another's."""
        for logger in self.trainer.loggers:
            folder = getattr(logger, "log_dir", None)
            if isinstance(folder, str) and "://" not in folder:
                used = os.path.isdir(folder) and any(name != LOCK for name in os.listdir(folder))
                self.guard.hold(folder)
                if not used:  # but for the lock, of which Lightning would warn
                    warnings.filterwarnings("ignore", message=f"Experiment logs directory {re.escape(folder)} exists")

    def _begin_loggers(self) -> None:
        """Begins those that record the command, as Weights & Biases and Comet do, while it shows no secrets.

        It is put back at once: Lightning starts further ranks by it.
        """
        given = sys.argv
        sys.argv = redact_arguments(given)
        try:
            for logger in self.trainer.loggers if self.trainer.is_global_zero else ():
                if sys.argv != given and not isinstance(logger, CSVLogger | TensorBoardLogger):
                    _ = logger.experiment  # type: ignore[attr-defined]
        finally:
            sys.argv = given

    def _of_command(self, config: Any) -> Any:
        """The part of a configuration that the command reads; all of it with `run=False`."""
        return config if self.subcommand is None else config[self.subcommand]

    def _record(self) -> dict[str, Any]:
        """What loggers call hyperparameters: the whole configuration, versions, the command."""
        written = self._of_command(self._written)
        command = shlex.join(["lightrl", *redact_arguments(sys.argv[1:])])
        given = {name: value for name, value in plain(written).items() if name != "config"}  # files, merged by now
        return {**given, "versions": versions(), "command": command}


def _require_remote(path: str | os.PathLike[str] | None) -> None:
    """Raises a ValueError where a checkpoint at scheme://... cannot be read; local ones are looked at when loaded."""
    if path is None or "://" not in str(path):
        return
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        files, place = url_to_fs(str(path))
        there, why = files.exists(place), "there is nothing"
    except Exception as error:  # whatever its service's package raises, and ImportError where that is missing
        there, why = False, f"{type(error).__name__}: {error}"
    if not there:
        raise ValueError(f"ckpt_path={path}: cannot be read: {why}. Copy it to a local disk and give its path.")


def _require_folder(path: str | os.PathLike[str] | None, name: str) -> None:
    """Raises a ValueError where a run could not make its folder; scheme://... is left to its service."""
    if path is None or "://" in str(path):
        return
    place = os.path.abspath(path)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    try:
        os.rmdir(mkdtemp(prefix=".lightrl-", dir=place))  # permissions do not tell of /proc and its like
    except OSError as error:
        raise ValueError(
            f"{name}={str(path)!r}: this folder cannot be made ({error.strerror}): give another."
        ) from error


def redacted(config: Any) -> Any:
    """A copy of a parsed configuration for files and loggers, with secrets as `***`."""
    places = []
    for place, secret in plain_secrets(plain(config)):
        remember_secret(secret)
        places.append(place)
    if places:
        print(
            f"warning: {', '.join(places)}: a secret in the configuration, saved as ***. Give it as ${{env:NAME}}.",
            file=sys.stderr,
        )
    return _mapped(config, lambda value, name, path: redact(value, name))


def from_environment(config: Any) -> Any:
    """A copy of a parsed configuration with each `${env:NAME}` replaced by that environment variable."""
    return _mapped(config, lambda value, name, path: resolve_environment(value, path) if type(value) is str else value)


def plain(config: Any) -> Any:
    """A parsed configuration as dictionaries and lists."""
    if isinstance(config, Namespace):
        config = vars(config)
    if isinstance(config, dict):
        return {key: plain(value) for key, value in config.items()}
    return [plain(value) for value in config] if isinstance(config, list | tuple) else config


def _mapped(config: Any, new: Callable[[Any, str, str], Any], path: str = "", name: str = "") -> Any:
    """A copy of a parsed configuration with each string and number replaced by new(value, name, dotted path)."""
    if isinstance(config, str | int | float):
        return new(config, name, path)
    if isinstance(config, Namespace | dict):
        entries = vars(config) if isinstance(config, Namespace) else config
        items = {k: _mapped(v, new, f"{path}.{k}" if path else str(k), str(k)) for k, v in entries.items()}
        return Namespace(**items) if isinstance(config, Namespace) else items
    return [_mapped(v, new, f"{path}.{i}", name) for i, v in enumerate(config)] if isinstance(config, list) else config

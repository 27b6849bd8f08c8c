"""LightRL's additions to `LightningCLI`, and the classes that YAML may name."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightrl.algorithms.module import SavesPretrained
from lightrl.algorithms.run_record import hardware, versions
from lightrl.algorithms.schedules import LRSchedule
from lightrl.callbacks import ThroughputMonitor
from lightrl.checkpoints.redaction import plain_secrets, redact, redact_arguments, remember_secret, resolve_environment
from lightrl.checkpoints.rollout_checkpoint import RolloutCheckpoint, preempt, preemptions
from lightrl.checkpoints.run_folder import LOCK, RunGuard
from lightrl.compat.jsonargparse import copy_tried_dictionaries, keep_lists, prefer_own_names, start_from_own_defaults
from lightrl.compat.lightning_cli import YamlCLI, begin_tables
from lightrl.data import PromptSource
from lightrl.engines import Engine
from lightrl.objectives.estimators import AdvantageEstimator
from lightrl.objectives.loss_terms import Aggregation, KLPenalty, PolicyLoss

ROOMS = (
    *("algorithms", "callbacks", "data", "distributed", "engines", "environments", "objectives", "rewards", "rollout"),
)
"""Packages whose classes YAML may name without a path."""
for room in ROOMS:
    package = import_module(f"lightrl.{room}")
    for name in package.__all__:  # some load their modules lazily
        getattr(package, name)
EVALUATIONS = ("validate", "test", "predict")
DESCRIPTIONS = {
    "fit": "Train a model.",
    "validate": "Evaluate on the evaluation prompts.",
    "test": "Evaluate on the test prompts.",
    "predict": "Write completions with their rewards.",
}
USAGE = """lightrl {command} --config FILE.yaml [--OPTION VALUE ...]

Common options, in the file or on the command line:
  --config FILE.yaml                   configuration file, can be repeated; `lightrl recipes` lists built-in ones
  --run_dir DIR                        directory for checkpoints, metrics, and samples
  --model.actor.path MODEL             model directory or model ID
  --model.optimizer.lr RATE            learning rate
  --data.prompts SOURCE                training prompts: a file, a Hugging Face dataset ID, or a prompt source
  --data.rewards [FUNCTION]            reward functions: package.module:function or file.py:function
  --data.group_size N                  completions per prompt
  --data.sampling.max_new_tokens N     maximum length of a completion in tokens
  --trainer.max_epochs N               number of epochs; each has data.rollouts_per_epoch rollouts
  --ckpt_path last                     resume from the last checkpoint

Run `lightrl {command} --model.help PPOLightningModule` for the arguments of a class. All options:"""
EVALUATE = """  --data.evaluation.prompts SOURCE     prompts: a file, a Hugging Face dataset ID, or a prompt source
  --data.evaluation.group_size N       completions per prompt; above 1, pass@k is logged
  --data.rewards [FUNCTION]            reward functions: package.module:function or file.py:function
  --ckpt_path FILE                     checkpoint to evaluate, such as outputs/run/checkpoints/last.ckpt"""
set_parsing_settings(subclasses_enabled=[PromptSource, LRSchedule])  # dataclasses whose class YAML may name, and keeps
copy_tried_dictionaries()
keep_lists()
prefer_own_names()
start_from_own_defaults(Engine, AdvantageEstimator, Aggregation, KLPenalty, PolicyLoss)


class LightRLCLI(YamlCLI):
    """`LightningCLI` in subclass mode. On resume, YAML takes precedence over a checkpoint's hyperparameters.

    `${env:NAME}` in a configuration is replaced by the environment variable when classes are built. The run directory
    keeps it unchanged. Other secrets are saved as `***`.
    """

    config: Any

    def help_of(self, subcommand: str) -> tuple[str, str]:
        """See `YamlCLI.help_of`."""
        usage = USAGE if subcommand == "fit" else re.sub(r"(?s)  --model.opt.*?(?=\n\n)", EVALUATE, USAGE)
        return DESCRIPTIONS[subcommand], usage.format(command=subcommand)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds LightRL's arguments, and defaults for manual optimization and generated batches."""
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
            help="Directory for everything the run writes. Sets trainer.default_root_dir and adds a CSV log for "
            "`lightrl report` (and a TensorBoard log if no logger is given). validate, test, and predict write to "
            "subdirectories of the same name.",
        )
        parser.add_argument(
            "--base",
            type=str | list[str] | None,
            default=None,
            help="Base configuration files, with paths relative to this file. They are read first, so this file "
            "overrides them. Only valid in a configuration file.",
        )

    def before_instantiate_classes(self) -> None:
        """Drops `base`: the saved configuration is complete."""
        self._of_command(self.config).base = None

    def instantiate_classes(self) -> None:
        """Builds all classes with secrets, and keeps secrets out of the saved configuration."""
        given = self.config
        self.config = self._written = redacted(given)
        self.record_hyperparameters()
        self.config = from_environment(given)
        self._put_into_run_dir()
        super().instantiate_classes()

    def _put_into_run_dir(self) -> None:
        """Points loggers to `run_dir`. They are not saved in `config.yaml`, so it can be reused for another run."""
        config = self._of_command(self.config)
        folder = config.run_dir
        if folder is None:
            return
        if "://" not in folder:
            folder = os.path.abspath(folder)
        config.trainer.default_root_dir = folder
        if self.subcommand in EVALUATIONS:
            folder = os.path.join(folder, self.subcommand)
            warnings.filterwarnings("ignore", message="The dirpath has changed from")
        table, tensorboard = (
            Namespace(
                class_path=f"lightning.pytorch.loggers.{logger}",
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

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the trainer with the default callbacks."""
        self.config = self._written  # Lightning saves it to the run directory
        trainer = super().instantiate_trainer(**kwargs)
        self.guard = RunGuard()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, ThroughputMonitor) for callback in callbacks):
            callbacks.insert(0, ThroughputMonitor())
        callbacks.insert(0, self.guard)
        savers = trainer.checkpoint_callbacks
        if savers and not any(isinstance(saver, RolloutCheckpoint) for saver in savers):
            callbacks.append(RolloutCheckpoint(None, dirpath=getattr(savers[0], "dirpath", None), save_top_k=0))
        return trainer

    def before_fit(self) -> None:
        """Locks the run directory before a logger opens a file in it, and logs the hyperparameters."""
        self.before_validate()
        if not self.trainer.is_global_zero:
            return
        begin_tables(self.trainer)
        if isinstance(self.model, SavesPretrained):
            self.model.logs_hyperparameters = False
        given = plain(self._of_command(self._written))
        del given["config"]  # already merged
        command = shlex.join(["lightrl", *redact_arguments(sys.argv[1:])])
        for logger in self.trainer.loggers:
            logger.log_hyperparams({**given, "versions": versions(), "hardware": hardware(), "command": command})

    def before_validate(self) -> None:
        """Installs handlers for SIGTERM and other preemption signals, and locks the loggers' directories."""
        if threading.current_thread() is threading.main_thread():
            for signum in preemptions(self.trainer):
                signal.signal(signum, preempt)  # until `RolloutCheckpoint` handles them in training
        if not self.trainer.is_global_zero:
            return
        self._begin_loggers()
        for logger in self.trainer.loggers:
            folder = getattr(logger, "log_dir", None)
            if isinstance(folder, str) and "://" not in folder:
                used = os.path.isdir(folder) and any(name != LOCK for name in os.listdir(folder))
                self.guard.hold(folder)
                if not used:  # Lightning would warn about the lock file
                    warnings.filterwarnings("ignore", message=f"Experiment logs directory {re.escape(folder)} exists")

    before_test = before_predict = before_validate

    def _begin_loggers(self) -> None:
        """Starts loggers that record the command, such as Weights & Biases, while `sys.argv` shows no secrets."""
        given = sys.argv
        sys.argv = redact_arguments(given)
        try:
            for logger in self.trainer.loggers if sys.argv != given else ():
                if not isinstance(logger, CSVLogger | TensorBoardLogger):
                    _ = logger.experiment  # type: ignore[attr-defined]
        finally:
            sys.argv = given  # Lightning starts other ranks with it

    def _of_command(self, config: Any) -> Any:
        """The part of a configuration that the command reads; all of it with `run=False`."""
        return config if self.subcommand is None else config[self.subcommand]


def redacted(config: Any) -> Any:
    """A copy of a parsed configuration for files and loggers, with secrets as `***`."""
    places = []
    for place, secret in plain_secrets(plain(config)):
        remember_secret(secret)
        places.append(place)
    if places:
        text = f"warning: {', '.join(places)}: contains a secret; saved as ***. Use ${{env:NAME}} instead."
        print(text, file=sys.stderr)
    return _mapped(config, lambda value, name, path: redact(value, name))


def from_environment(config: Any) -> Any:
    """A copy of a parsed configuration with each `${env:NAME}` replaced by that environment variable."""
    return _mapped(config, lambda value, name, path: resolve_environment(value, path) if type(value) is str else value)


def plain(config: Any) -> Any:
    """A parsed configuration as dictionaries and lists."""
    if isinstance(config, Namespace | dict):
        entries = vars(config) if isinstance(config, Namespace) else config
        return {key: plain(value) for key, value in entries.items()}
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

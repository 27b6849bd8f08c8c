"""The `lightrl` command. Each command has its own file; `lightning_cli.py` builds runs."""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import lightrl
from lightrl.checkpoints.redaction import redact_text
from lightrl.cli.config_files import expand_configs
from lightrl.cli.console import die_with_parent, quiet
from lightrl.cli.errors import one_line, parser_message

__all__ = ["main", "run"]

USAGE = """LightRL: reinforcement learning for LLMs and VLMs, built on PyTorch Lightning.

  lightrl fit --config x.yaml        train (PPO, GRPO, SFT, ...)
  lightrl validate --config x.yaml   evaluate on the evaluation prompts
  lightrl test --config x.yaml       evaluate on test prompts
  lightrl predict --config x.yaml    write completions with their rewards
  lightrl report RUN_DIR             plot a run, with sample completions, as an HTML page
  lightrl view RUN_DIR               show saved trajectories token by token as an HTML page
  lightrl serve-reward ...           serve a reward function over HTTP
  lightrl check-env --config x.yaml  test an environment or agent program without training
  lightrl plan --model MODEL         estimate the memory per GPU under each strategy
  lightrl quickstart                 train a small model on a CPU and write a report
  lightrl init DIR                   create a project: configuration, reward function, training examples
  lightrl recipes                    list the configurations that ship with LightRL
  lightrl export --checkpoint C --output D   export a checkpoint as a Hugging Face model or an adapter
  lightrl doctor [--config x.yaml]   check the installation, or validate a config before training

Run `lightrl COMMAND --help` for a command's arguments, `lightrl fit --model.help PPOLightningModule` for a class's.
You can pass --config several times; later files override earlier ones.
Set LIGHTRL_DEBUG=1 to show the traceback of every error. Pass -v (--verbose) to also show the tips, progress bars, and
deprecation warnings of dependencies.
Write ${env:NAME} in a config to read an environment variable. Its value is never written to the run directory.
Exit codes: 0 success; 1 failure, or Ctrl-C during training; 2 invalid arguments or configuration, or an error in a
reward, an environment, or storage; 75 stopped by SIGTERM or SIGUSR1 after saving (resume with --ckpt_path last);
130 Ctrl-C otherwise.
"""

RUNS = ("fit", "validate", "test", "predict")
COMMANDS = {
    "report": "lightrl.cli.report:report",
    "view": "lightrl.cli.report.view:view",
    "check-env": "lightrl.cli.check_env:check_env",
    "serve-reward": "lightrl.rewards.server:serve_reward",
    "plan": "lightrl.cli.plan:plan",
    "export": "lightrl.cli.export:export",
    "init": "lightrl.cli.project:init",
    "quickstart": "lightrl.cli.quickstart:quickstart",
    "recipes": "lightrl.cli.config_files:recipes",
    "doctor": "lightrl.cli.doctor:doctor",
}
"""Command -> module and function, imported on demand."""
QUIETED = (*RUNS, "check-env", "doctor", "export", "serve-reward")
"""Commands that load models or build runs."""
STEP_OF = "LIGHTRL_QUICKSTART_PID"
"""Environment variable with the ID of the quickstart process; its steps exit when it does."""
INTERRUPTED = 130
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: a scheduler requeues the job


def run(args: Sequence[str] | None = None, **kwargs: Any) -> Any:
    """Run fit, validate, test, or predict.

    Args:
        args: Command line without the program's name. Defaults to `sys.argv`.
        kwargs: Additional arguments of `LightningCLI`, such as `run=False` to build without running.

    Returns:
        The CLI object with `trainer`, `model`, and `datamodule`.
    """
    from lightning.pytorch import LightningDataModule, LightningModule

    from lightrl.cli.lightning_cli import LightRLCLI

    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    try:
        return LightRLCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_kwargs={"exit_on_error": False},  # `main` shows errors without a page of usage
            auto_configure_optimizers=False,  # modules have their own; `--optimizer` would have no effect
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            args=expand_configs(sys.argv[1:] if args is None else args),
            **kwargs,
        )
    finally:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in handlers.items():
                signal.signal(signum, handler)


def main(args: Sequence[str] | None = None) -> None:
    """Run the `lightrl` command. Prints one message and exits with code 2 if the input is invalid.

    Args:
        args: Command line without the program's name. Defaults to `sys.argv`.
    """
    args = sys.argv[1:] if args is None else args
    debug = os.environ.get("LIGHTRL_DEBUG") == "1"
    try:
        arguments = [argument for argument in args if argument not in ("-v", "--verbose")]
        _main(arguments, verbose=len(arguments) < len(args))
    except KeyboardInterrupt as interrupt:
        if debug:
            raise
        fit = "fit" in args[:2]  # `-v` may come before it
        print(f"Interrupted{' before training started; nothing was saved' if fit else ''}.", file=sys.stderr)
        sys.exit(PREEMPTED if type(interrupt).__name__ == "Preempted" else INTERRUPTED)
    except SystemExit as stop:
        if type(stop.__context__).__name__ == "Preempted":  # Lightning exits with 1 after any interrupt
            sys.exit(PREEMPTED)
        raise
    except Exception as error:
        told = None if debug else one_line(error)
        if told is None:
            raise
        print(f"error: {redact_text(told[0])}", file=sys.stderr)
        sys.exit(told[1])


def _main(arguments: list[str], verbose: bool) -> None:
    # Spinning threads slow down two busy processes on shared cores tenfold compared with sleeping ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.path.insert(0, os.getcwd())  # YAML may name classes and functions in the working directory
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    command, *options = arguments
    if command == "--version":
        print(f"lightrl {lightrl.__version__}")
        return
    if not command.startswith("-") and command not in (*COMMANDS, *RUNS):
        raise ValueError(f"Unknown command {command!r}. Run `lightrl --help` to list the commands.")
    if command in RUNS:  # before anything heavy loads
        if not options:
            raise ValueError(
                f"lightrl {command} requires --config FILE.yaml. Create one with `lightrl init DIR`, or pick one from "
                "`lightrl recipes` (--config lightrl:NAME)."
            )
        expand_configs(arguments)
    if command in QUIETED and not verbose:
        quiet(resumes=any(option.startswith("--ckpt_path") for option in options))
    if STEP_OF in os.environ:  # not passed on to child processes
        die_with_parent(int(os.environ.pop(STEP_OF)))
    if command in COMMANDS:
        module, _, function = COMMANDS[command].partition(":")
        _call(getattr(import_module(module), function), command, options)
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        die_with_parent(os.getppid())
    run(arguments)


def _call(function: Callable[..., Any], command: str, options: list[str]) -> None:
    """Calls a command's function with its options: jsonargparse's syntax plus a few conveniences."""
    from jsonargparse import ArgumentError, auto_parser

    if command == "check-env":  # `--config FILE` as in runs
        options = [option.removeprefix("--config=") for option in options if option != "--config"]
    # Options may contain dashes; a flag needs no value.
    options = [re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), o) for o in options]
    parameters = inspect.signature(function).parameters
    flags = {f"--{name}" for name, parameter in parameters.items() if parameter.default is False}
    following = zip(options, [*options[1:], "--"], strict=False)
    options = [f"{this}=true" if this in flags and after.startswith("-") else this for this, after in following]
    parser = auto_parser(function, as_positional=True, prog=f"lightrl {command}", exit_on_error=False)
    try:
        given = parser.instantiate(parser.parse_args(options))
    except ArgumentError as error:
        raise ValueError(f"{parser_message(str(error))} Run `lightrl {command} --help` for help.") from error
    function(**{name: given[name] for name in parameters})

"""`lightrl`: its commands, and error messages. `lightning_cli.py` builds runs; each other command has a file."""

from __future__ import annotations

import difflib
import errno
import inspect
import json
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import lightrl
from lightrl.checkpoints.redaction import redact_text
from lightrl.cli.config_files import expand_configs
from lightrl.cli.console import die_with_parent, quiet

__all__ = ["main", "run"]

USAGE = """LightRL: reinforcement learning for LLMs and VLMs, built on PyTorch Lightning.

  lightrl fit --config x.yaml        train (PPO, GRPO, SFT, ...)
  lightrl validate --config x.yaml   evaluate on the evaluation prompts
  lightrl test --config x.yaml       evaluate on test prompts
  lightrl predict --config x.yaml    write completions with their rewards
  lightrl report RUN_DIR             plots and samples of a run as an HTML page; several runs: a comparison
  lightrl view RUN_DIR               saved trajectories, token by token, as an HTML page
  lightrl serve-reward ...           serve a reward function over HTTP
  lightrl check-env --config x.yaml  run a config's environment with scripted replies, without a model
  lightrl plan --model MODEL         memory per GPU under each strategy
  lightrl quickstart                 run a first training on a CPU, from nothing to a report
  lightrl init DIR                   create a small project: configuration, rewards, rows
  lightrl recipes                    list the configurations that come with LightRL
  lightrl from-trl SCRIPT.yaml       convert the arguments of a TRL script to a configuration
  lightrl export --checkpoint C --output D   export a checkpoint to a Hugging Face folder, or to a plain checkpoint
  lightrl doctor [--config x.yaml]   check the installation, or validate a config before training

`lightrl COMMAND --help` explains every argument; `lightrl fit --model.help PPOLightningModule` those of a class.
Several --config are merged, later ones win. LIGHTRL_DEBUG=1 shows the traceback of every error. -v (--verbose) also
shows tips, progress bars, and deprecation notes of the packages below.
Strings of a config may name environment variables as ${env:NAME}, which keeps secrets out of what a run writes.
Exit codes: 0 success, 1 failure or Ctrl-C, 2 invalid arguments or configuration, 75 SIGTERM or SIGUSR1 (saved; run it
again).
"""


RUNS = ("fit", "validate", "test", "predict")
COMMANDS = {
    "report": "lightrl.cli.report:report",
    "view": "lightrl.cli.report.view:view",
    "check-env": "lightrl.cli.check_env:check_env",
    "serve-reward": "lightrl.rewards.server.serve:serve_reward",
    "plan": "lightrl.cli.plan:plan",
    "export": "lightrl.cli.export:export",
    "from-trl": "lightrl.cli.from_trl:from_trl",
    "init": "lightrl.cli.project:init",
    "quickstart": "lightrl.cli.project:quickstart",
    "recipes": "lightrl.cli.config_files:recipes",
    "doctor": "lightrl.cli.doctor:doctor",
}
"""Command -> module and function, imported when asked for."""
SPEAKING = ("check-env", "doctor", "export", "serve-reward")
"""Commands that load models or build runs."""


def run(args: Sequence[str] | None = None, **kwargs: Any) -> Any:
    """Runs fit, validate, test or predict.

    Args:
        args: command line without the program's name; `sys.argv` where None.
        kwargs: further arguments of `LightningCLI`, e.g. `run=False` to build without running.

    Returns:
        the CLI object with `trainer`, `model` and `datamodule`.
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
            # Errors are raised and shown by `main`, without the parser's page of usage before them.
            parser_kwargs={"exit_on_error": False},
            auto_configure_optimizers=False,  # modules take an optimizer of their own; `--optimizer` would do nothing
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            args=expand_configs(sys.argv[1:] if args is None else args),
            **kwargs,
        )
    finally:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in handlers.items():
                signal.signal(signum, handler)


def users_error(error: BaseException) -> str | None:
    """What to tell the user where the input is wrong; None for everything else, which keeps its traceback.

    That is what the parser refuses, what LightRL itself raises to say what is wrong with an argument, a file, a disk or
    a reward function, and what Lightning says of the trainer's arguments. A `ValueError` that comes out of another
    library or of the user's own code is none of it, nor is one that Lightning raises when the user's code calls it.
    """
    if isinstance(error, ValueError) and _raised_in(error, "lightrl"):
        return str(error)  # at once, without loading what the rest asks about

    from jsonargparse import ArgumentError
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lightrl.checkpoints.files import StorageError
    from lightrl.environments.base import EnvironmentFailedError
    from lightrl.rewards.base import RewardError

    if isinstance(error, ArgumentError):
        return f"{parser_message(str(error), _known_names())}\n`lightrl COMMAND --help` explains the arguments."
    outer = error
    while _raised_in(error, "jsonargparse") and error.__cause__ is not None:
        error = error.__cause__  # the parser wraps what a constructor raises
    wrong = isinstance(error, ValueError) or (error is not outer and isinstance(error, TypeError))
    if wrong and _raised_in(error, "jsonargparse"):
        # Of a union, the cause is that of one alternative only: perhaps of one that takes other arguments.
        return parser_message(str(outer), _known_names())
    if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        return f"{error}. Free what ran out (processes and threads, memory: ulimit -u, ulimit -v), then {AGAIN}."
    users = MisconfigurationException | ValueError | TypeError | RuntimeError  # the last: a metric to monitor
    if isinstance(error, users) and _raised_in(error, "lightning"):
        packages = _packages(error)
        inner = packages[packages.index("lightrl") :] if "lightrl" in packages else packages  # not who called LightRL
        own = {"lightrl", "lightning", "jsonargparse", "contextlib", "torch"}
        return f"Lightning: {' '.join(str(error).split())}" if own.issuperset(inner) else None
    shown = isinstance(error, ValueError | RewardError | EnvironmentFailedError) and _raised_in(error, "lightrl")
    if isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES:
        return f"{error}. Free what ran out (disk, quota, file size, open files: ulimit -a), then {AGAIN}."
    if isinstance(error, PermissionError) and _written_for_a_run(error):
        return f"{error}. Give the run a folder that it may write to (--run_dir)."
    return str(error) if shown or isinstance(error, StorageError) else None


def _written_for_a_run(error: BaseException) -> bool:
    """Whether it was LightRL, Lightning (by fsspec) or the parser that wanted the file, and not the user's own code."""
    outside = [package for package in _packages(error) if package not in sys.stdlib_module_names]
    return bool(outside) and outside[-1] in ("lightrl", "lightning", "fsspec", "jsonargparse")


def lost_part(error: BaseException) -> str | None:
    """What to tell where an engine or another rank is gone or hangs, which is not the user's mistake."""
    from torch.distributed import DistError

    from lightrl.engines.base import EngineDiedError
    from lightrl.rollout.collector import RolloutStalledError

    if isinstance(error, EngineDiedError | RolloutStalledError):
        return str(error)
    if isinstance(error, DistError) or (isinstance(error, RuntimeError) and LOST_RANK.search(str(error))):
        return (
            f"A rank does not hear from another any more: that one ended (its own message stands above), or hangs for "
            f"longer than the strategy's timeout. Resume from the last checkpoint. {str(error).splitlines()[0]}"
        )
    return None


def parser_message(text: str, known: Iterable[str] = ()) -> str:
    """jsonargparse's message in one line: without the types of unions, with the closest name to a misspelled one."""
    lines = [line.strip().removeprefix("- ") for line in text.splitlines() if not PARSER_NOISE.match(line)]
    misspelled = re.findall(r"(?:[Oo]ption '|arguments: --|import path string: )(?:\w+\.)*(\w+)", text)
    close = [difflib.get_close_matches(name, known, 1) for name in misspelled]
    hint = next((f" Did you mean {found[0]!r}?" for found in close if found), "")
    return redact_text(f"{' '.join(lines).rstrip('.')}.{hint}")


def _known_names() -> list[str]:
    """Candidates for a misspelled name: classes, their arguments, and the Trainer's arguments."""
    from lightning.pytorch import Trainer

    from lightrl import algorithms, callbacks, engines, objectives, rewards

    names = ["trainer", "model", "data", "ckpt_path", "seed_everything", "config", "run_dir", "without", "base"]
    classes = [
        getattr(room, name)
        for room in (lightrl, algorithms, callbacks, engines, objectives, rewards)
        for name in room.__all__
    ]
    for cls in [Trainer, *classes]:
        names.append(cls.__name__)
        if inspect.isclass(cls) and inspect.isfunction(cls.__init__):  # type: ignore[misc]
            names += inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    return names


def _packages(error: BaseException) -> list[str]:
    """The package of each frame, the one that raised last."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return [frame.f_globals.get("__name__", "").split(".")[0] for frame in frames]


def _imported_file(error: BaseException) -> str | None:
    """The file whose import an error came out of, the last of them; None where it came out of no import."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((code.co_filename for code in reversed(codes) if code.co_name == "<module>"), None)


def _raised_in(error: BaseException, package: str) -> bool:
    return _packages(error)[-1:] == [package]


PARSER_NOISE = re.compile(
    r"\s*(- )*(Does not validate against any|Subtypes: |Errors:|Given value type|Given value: .{80}"
    r"|Expected a <class 'NoneType'>|Expected a path but|$)"
)
OUT_OF_RESOURCES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE}
NO_THREAD = "can't start new thread"
"""Python's message where the system gives no more."""
AGAIN = "run the command again (a fit with --ckpt_path last goes on from its last save)"
LOST_RANK = re.compile(r"gloo/|Gloo|NCCL|ProcessGroup")
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
UNREAD = 141
"""Status where nobody reads the output any more: that of SIGPIPE."""
STEP_OF = "LIGHTRL_QUICKSTART_PID"
"""Environment variable that tells a step of the quickstart which process it ends with."""
PREEMPTED = 75
"""Status after SIGTERM or SIGUSR1: "try again" (EX_TEMPFAIL of sysexits.h), for a scheduler to requeue the job."""


def main(args: Sequence[str] | None = None) -> None:
    """The `lightrl` command: shows a user's error as one message and exits with status 2.

    Args:
        args: command line without the program's name; None takes `sys.argv`.
    """
    args = sys.argv[1:] if args is None else args
    debug = os.environ.get("LIGHTRL_DEBUG") == "1"
    try:
        _main(args)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written at exit
        sys.exit(UNREAD)
    except KeyboardInterrupt as interrupt:
        if debug:
            raise
        _say_interrupted(args)
        sys.exit(PREEMPTED if type(interrupt).__name__ == "Preempted" else INTERRUPTED)
    except SystemExit as stop:
        if type(stop.__context__).__name__ == "Preempted":  # Lightning exits with 1 after any interrupt
            sys.exit(PREEMPTED)
        if (file := _imported_file(stop)) is not None:
            said = f": {redact_text(stop.code)}" if isinstance(stop.code, str) else ""
            print(
                f"error: {file}, which the configuration names, ends the program when it is imported{said}. Put what "
                'is to run as a script below `if __name__ == "__main__":`.',
                file=sys.stderr,
            )
            sys.exit(2)
        raise
    except Exception as error:
        message, status = users_error(error), 2
        if message is None:
            message, status = lost_part(error), 1
        if message is None or debug:
            raise
        print(f"error: {redact_text(message)}", file=sys.stderr)
        sys.exit(status)


def _say_interrupted(args: Sequence[str]) -> None:
    fit = "fit" in args[:2]  # `-v` may stand before it
    print(f"Interrupted{' before training began; nothing was saved' if fit else ''}.", file=sys.stderr)


def _nobody_reads() -> bool:
    """Whether the reader of the output has gone, as `head` does when it has enough."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are told without being asked for
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _main(args: Sequence[str]) -> None:
    given = list(args)
    arguments = [argument for argument in given if argument not in ("-v", "--verbose")]
    # Threads that spin while they wait make two busy processes on shared cores ten times slower than sleeping ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.path.insert(0, os.getcwd())  # YAML may name classes and functions of the folder it is run in
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    if arguments[0] == "--version":
        print(f"lightrl {lightrl.__version__}")
        return
    if not arguments[0].startswith("-") and arguments[0] not in (*COMMANDS, *RUNS):
        close = difflib.get_close_matches(arguments[0], (*COMMANDS, *RUNS), 1)
        hint = f"; did you mean `lightrl {close[0]}`?" if close else "."
        print(f"error: lightrl has no command {arguments[0]!r}{hint} `lightrl --help` lists them.", file=sys.stderr)
        sys.exit(2)
    if arguments[0] in RUNS:  # before anything heavy loads
        if len(arguments) == 1:
            raise ValueError(
                f"lightrl {arguments[0]} needs --config FILE.yaml: `lightrl init DIR` writes one for a task of your "
                "own, `lightrl recipes` lists those that come with LightRL (--config lightrl:NAME)."
            )
        expand_configs(arguments)
    if arguments == given and arguments[0] in (*RUNS, *SPEAKING):
        quiet()
    if STEP_OF in os.environ:  # not handed down to what this process starts
        die_with_parent(int(os.environ.pop(STEP_OF)))
    if arguments[0] in COMMANDS:
        if (
            arguments[0] == "init"
            and (len(arguments) == 1 or arguments[1].startswith("--"))
            and "--help" not in arguments
        ):
            arguments.insert(1, ".")
        if arguments[0] == "check-env":  # it takes the file as the runs do
            arguments = [a.removeprefix("--config=") for a in arguments if a != "--config"]
        runs = next((i for i, a in enumerate(arguments) if a.startswith("-")), len(arguments))
        if arguments[0] == "report" and runs > 2:
            arguments[2:runs] = [f"--others={json.dumps(arguments[2:runs])}"]
        # Options may be written with dashes, too.
        options = [re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), a) for a in arguments[1:]]
        module, _, function = COMMANDS[arguments[0]].partition(":")
        _call(getattr(import_module(module), function), arguments[0], options)
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        die_with_parent(os.getppid())
    run(arguments)


def _call(function: Callable[..., Any], command: str, options: Sequence[str]) -> None:
    """Calls a command's function with what its options say.

    Raises:
        ValueError: they are none of the function's arguments, or not of their types; without the page of usage.
    """
    from jsonargparse import ArgumentError, auto_parser

    parameters = inspect.signature(function).parameters
    names, flags = list(parameters), {f"--{name}" for name, p in parameters.items() if p.default is False}
    following = zip(options, [*options[1:], "--"], strict=False)
    options = [f"{this}=true" if this in flags and after.startswith("-") else this for this, after in following]
    parser = auto_parser(function, as_positional=True, prog=f"lightrl {command}", exit_on_error=False)
    try:
        given = parser.instantiate(parser.parse_args(options))
    except ArgumentError as error:
        said = parser_message(str(error), names).rstrip(".")
        raise ValueError(f"{said}{'' if said[-1] == '?' else '.'} `lightrl {command} --help` explains more.") from error
    function(**{name: given[name] for name in names})

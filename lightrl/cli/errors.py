"""Decides which errors are shown as one line; all others keep their traceback."""

from __future__ import annotations

import difflib
import errno
import inspect
import re
import traceback
from collections.abc import Iterable

from lightrl.checkpoints.redaction import redact_text

OUT_OF_RESOURCES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE}
NO_THREAD = "can't start new thread"
"""Python's message when the system has no threads left."""
LOST_RANK = re.compile(r"gloo/|Gloo|NCCL|ProcessGroup")
PARSER_NOISE = re.compile(
    r"\s*(- )*(Does not validate against any|Subtypes: |Errors:|Given value type|Given value: .{80}"
    r"|Expected a <class 'NoneType'>|Expected a path but|$)"
)


def one_line(error: BaseException) -> tuple[str, int] | None:
    """(message, exit code) of an error caused by the input, the system, or another process.

    The code is 2 if the parser, LightRL, or Lightning rejects the input and 1 if an engine or a rank died. Returns None
    for all other errors, including a `ValueError` from another library or the user's own code.
    """
    if isinstance(error, ValueError) and _packages(error)[-1:] == ["lightrl"]:
        return str(error), 2  # avoids the imports of `_rejected`
    if str(error) == NO_THREAD or (isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES):
        again = "rerun the command (fit resumes with --ckpt_path last)"
        return f"{error}. Free the exhausted resource (disk, quota, open files, threads; see ulimit -a) and {again}.", 2
    if (message := _rejected(error)) is not None:
        return message, 2
    if (message := _lost(error)) is not None:
        return message, 1
    return None


def _rejected(error: BaseException) -> str | None:
    from jsonargparse import ArgumentError
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lightrl.checkpoints.files import StorageError
    from lightrl.environments.episodes import EnvironmentFailedError
    from lightrl.rewards.base import RewardError

    if isinstance(error, ArgumentError):
        return f"{parser_message(str(error), _known_names())} Run `lightrl COMMAND --help` for help."
    outer = error
    while _packages(error)[-1:] == ["jsonargparse"] and error.__cause__ is not None:
        error = error.__cause__  # the parser wraps errors of constructors
    packages = _packages(error)
    if packages[-1:] == ["jsonargparse"]:
        # Show the outer message: the cause concerns only one member of a union.
        wrong = isinstance(error, ValueError) or (error is not outer and isinstance(error, TypeError))
        return parser_message(str(outer), _known_names()) if wrong else None
    if packages[-1:] == ["lightning"] and isinstance(
        error, MisconfigurationException | ValueError | TypeError | RuntimeError
    ):
        inner = packages[packages.index("lightrl") :] if "lightrl" in packages else packages
        own = {"lightrl", "lightning", "jsonargparse", "contextlib", "torch"}  # not called by the user's code
        return f"Lightning: {' '.join(str(error).split())}" if own.issuperset(inner) else None
    told = isinstance(error, ValueError | RewardError | EnvironmentFailedError) and packages[-1:] == ["lightrl"]
    return str(error) if told or isinstance(error, StorageError) else None


def _lost(error: BaseException) -> str | None:
    from torch.distributed import DistError

    from lightrl.engines.base import EngineDiedError
    from lightrl.rollout.collector import RolloutStalledError

    if isinstance(error, EngineDiedError | RolloutStalledError):
        return str(error)
    if isinstance(error, DistError) or (isinstance(error, RuntimeError) and LOST_RANK.search(str(error))):
        return (
            f"A rank stopped responding. It either exited (see its message above) or hung for longer than the "
            f"strategy's timeout. Resume from the last checkpoint. {str(error).splitlines()[0]}"
        )
    return None


def parser_message(text: str, known: Iterable[str] = ()) -> str:
    """jsonargparse's message in one line, without the types of unions, and with a suggestion for a misspelled name."""
    lines = [line.strip().removeprefix("- ") for line in text.splitlines() if not PARSER_NOISE.match(line)]
    misspelled = re.findall(r"(?:[Oo]ption '|arguments: --|import path string: )(?:\w+\.)*(\w+)", text)
    close = [difflib.get_close_matches(name, known, 1) for name in misspelled]
    hint = next((f" Did you mean {found[0]!r}?" for found in close if found), "")
    return redact_text(f"{' '.join(lines).rstrip('.')}.{hint}")


def _known_names() -> list[str]:
    """Candidates for a misspelled name: classes, their arguments, and the Trainer's arguments."""
    from lightning.pytorch import Trainer

    import lightrl
    from lightrl import algorithms, callbacks, engines, objectives, rewards

    names = ["trainer", "model", "data", "ckpt_path", "seed_everything", "config", "run_dir", "without", "base"]
    rooms = (lightrl, algorithms, callbacks, engines, objectives, rewards)
    for cls in [Trainer, *(getattr(room, name) for room in rooms for name in room.__all__)]:
        names.append(cls.__name__)
        if inspect.isclass(cls) and inspect.isfunction(cls.__init__):  # type: ignore[misc]
            names += inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    return names


def _packages(error: BaseException) -> list[str]:
    """The package of each frame; the last one raised the error."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return [frame.f_globals.get("__name__", "").split(".")[0] for frame in frames]

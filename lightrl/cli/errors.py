"""Decides which errors are shown as one line; all others keep their traceback."""

from __future__ import annotations

import errno
import re
import traceback

from lightrl.checkpoints.redaction import redact_text

LIMITS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EROFS}
LOST_RANK = re.compile(r"gloo/|Gloo|NCCL|ProcessGroup")
PARSER_NOISE = re.compile(
    r"\s*(- )*(Does not validate against any|Subtypes: |Errors:|Given value type|Given value: .{80}"
    r"|Expected a <class 'NoneType'>|Expected a path but|Subclass types expect|a class path \(str\)|a dict with|$)"
)
PARSER_TYPES = re.compile(
    r"Type typing.Callable.* expects a function or a callable class: |\. Got value: Namespace\(.*"
)


def one_line(error: BaseException) -> tuple[str, int] | None:
    """(message, exit code) of an error caused by the input or by another process.

    The code is 2 if the parser, LightRL, or Lightning rejects the input, or a limit of the system is reached. It is 1
    if an engine or a rank died. Returns None for all other errors, including a `ValueError` from another library or the
    user's own code.
    """
    if isinstance(error, ValueError) and _packages(error)[-1:] == ["lightrl"]:
        return str(error), 2  # avoids the imports below
    from jsonargparse import ArgumentError
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from torch.distributed import DistError

    from lightrl.checkpoints.files import StorageError
    from lightrl.engines.base import EngineDiedError
    from lightrl.environments.episodes import EnvironmentFailedError
    from lightrl.rewards.base import RewardError
    from lightrl.rollout.collector import RolloutStalledError

    if isinstance(error, EngineDiedError | RolloutStalledError):
        return str(error), 1
    if isinstance(error, DistError) or (isinstance(error, RuntimeError) and LOST_RANK.search(str(error))):
        reason = "It exited (see its message above) or hung for longer than the strategy's timeout."
        return f"A rank stopped responding. {reason} Resume from the last checkpoint. {str(error).splitlines()[0]}", 1
    if isinstance(error, StorageError | RewardError | EnvironmentFailedError):
        return str(error), 2
    written = isinstance(error, PermissionError) and _packages(error)[-1:] == ["jsonargparse"]  # the run's config.yaml
    if isinstance(error, OSError) and (error.errno in LIMITS or written):
        return f"{error}. Free space, raise the limit, or make the path writable, then resume the run.", 2
    if isinstance(error, ArgumentError):
        return f"{parser_message(str(error))} Run `lightrl COMMAND --help` for help.", 2
    outer = error
    while _packages(error)[-1:] == ["jsonargparse"] and error.__cause__ is not None:
        error = error.__cause__  # the parser wraps errors of constructors
    room = _packages(error)[-1:]
    if room == ["jsonargparse"] and isinstance(error, ValueError | TypeError):
        return parser_message(str(outer)), 2  # the cause concerns only one member of a union
    if room == ["lightning"] and isinstance(error, MisconfigurationException | ValueError):
        return f"Lightning: {' '.join(str(error).split())}", 2
    return (str(error), 2) if room == ["lightrl"] and isinstance(error, ValueError) else None


def parser_message(text: str) -> str:
    """jsonargparse's message in one line, without the types of unions."""
    lines: list[str] = []
    for line in (part.strip().removeprefix("- ") for part in text.splitlines() if not PARSER_NOISE.match(part)):
        if line not in lines or line.endswith(":"):
            lines.append(line)
        while line in lines[:-1] and lines[-1].endswith(":"):  # the same reason for the next type of a union
            lines.pop()
    told = " ".join(line if line.endswith(":") else f"{line.rstrip('.')};" for line in lines)
    told = re.sub(r"a function that returns <class '(\w+)'>\.", r"a function with the return annotation `-> \1`", told)
    return redact_text(f"{PARSER_TYPES.sub('', told.rstrip(';'))}.")


def _packages(error: BaseException) -> list[str]:
    """The package of each frame; the last one raised the error."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return [frame.f_globals.get("__name__", "").split(".")[0] for frame in frames]

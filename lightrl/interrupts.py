"""Ctrl-C until a run handles it: a library that is being loaded may swallow it, or raise another error in its place."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from typing import Any

__all__ = ["came", "ends", "run_begins", "watch"]

GRACE_SECONDS = 10
"""How long a command may take to end."""
AFTERMATH_SECONDS = 60.0
"""For how long an error counts as what Ctrl-C broke."""
STATUS = 130
STDERR = 2

_at: float | None = None  # when it came
_running = False
_ending = False


def watch() -> None:
    """From now on Ctrl-C is remembered, and bounded: 10 seconds later, or with a second one, the process ends.

    Nothing changes where the process was started to ignore it (`nohup`, `&` in a script), or handles it otherwise.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        atexit.register(_leave)  # before all others, so that it comes last


def ends() -> None:
    """The command ends by it, and has said so: also in time where Python's own end, without handlers, takes long."""
    global _ending
    _ending = not _running


def came() -> bool:
    """Whether Ctrl-C came a short time ago, so that an error is probably its consequence."""
    return _at is not None and time.monotonic() - _at < AFTERMATH_SECONDS


def run_begins() -> None:
    """From now on the run answers for its end, which may take longer, as where it saves.

    Raises:
        KeyboardInterrupt: it came before, and somebody swallowed it.
    """
    global _running
    if came():
        raise KeyboardInterrupt
    _running = True


def _interrupt(signum: int, frame: Any) -> None:
    global _at
    again, _at = _at is not None, time.monotonic()
    if not _running:
        if again:
            _end()
        signal.signal(signal.SIGALRM, _end)
        signal.alarm(GRACE_SECONDS)
    raise KeyboardInterrupt


def _leave() -> None:
    if _ending:
        with contextlib.suppress(OSError):  # nobody reads it
            sys.stdout.flush()
        os._exit(STATUS)


def _end(*_: Any) -> None:
    os.write(STDERR, b"Interrupted.\n")
    os._exit(STATUS)

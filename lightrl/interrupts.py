"""Ctrl-C where nobody hears it: until a run handles it, and where the main thread does not come back from C."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["came", "ends", "heard", "listen", "run_begins", "watch"]

GRACE_SECONDS = 10
"""How long a command may take to end."""
UNHEARD_SECONDS = 5
"""How long Python may leave Ctrl-C in a run unanswered before that is said, or, of a second one, ends the process."""
AFTERMATH_SECONDS = 60.0
"""For how long an error counts as what Ctrl-C broke."""
STATUS = 130
STDERR = 2

_at: float | None = None  # when it came
_running = False
_ending = False
_heard = 0  # how often a handler came to its turn
_asked = 0  # how often Ctrl-C came since `listen`
_at_end: Callable[[], object] | None = None
_listens = False


def watch() -> None:
    """From now on Ctrl-C is remembered, and bounded: 10 seconds later, or with a second one, the process ends.

    Nothing changes where the process was started to ignore it (`nohup`, `&` in a script), or handles it otherwise.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        atexit.register(_leave)  # before all others, so that it comes last
        listen()


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


def heard(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of Ctrl-C, a function or a method, of which `listen` knows that Python has come to it."""

    @functools.wraps(handler)
    def told(*args: Any) -> Any:
        global _heard
        _heard += 1
        return handler(*args)

    told.is_heard = True  # type: ignore[attr-defined]
    return told


def listen(at_end: Callable[[], object] | None = None) -> None:
    """From now on Ctrl-C is bounded also where Python does not come to its handler, anew for each run.

    Python runs handlers in the main thread, between two of its own steps: never while that thread waits inside of C, as
    for a collective operation whose other rank is gone, or for an engine that hangs in this process. A thread that the
    signal itself wakes (`signal.set_wakeup_fd`) says so after `UNHEARD_SECONDS`, and ends the process so many seconds
    after a second Ctrl-C, or `GRACE_SECONDS` after the first where no run has begun. Only handlers that are `heard`
    count, and an interactive session is left alone: what it holds is worth more than its end.

    Args:
        at_end: called before the process is ended so.
    """
    global _asked, _at_end, _listens
    _asked, _at_end = 0, at_end
    if _listens or threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1"):
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if taken != -1:  # an event loop's
        signal.set_wakeup_fd(taken)
        os.close(reader)
        os.close(writer)
        return
    _listens = True
    os.register_at_fork(after_in_child=_in_child)
    threading.Thread(target=_listen, args=(reader,), daemon=True, name="lightrl-ctrl-c").start()


def _in_child() -> None:
    """A forked process has no such thread yet, and what comes to it is not for its parent."""
    global _listens
    _listens = False
    signal.set_wakeup_fd(-1)


@heard
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
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(STDERR, b"Interrupted.\n")
    os._exit(STATUS)


def _listen(reader: int) -> None:
    """The thread of `listen`."""
    global _asked
    while True:
        before, since, said = _heard, None, False
        while since is None or (_heard == before and getattr(signal.getsignal(signal.SIGINT), "is_heard", False)):
            came = os.read(reader, 256) if select.select([reader], [], [], None if since is None else 0.1)[0] else b""
            if signal.SIGALRM in came and signal.getsignal(signal.SIGALRM) is _end:
                time.sleep(1)
                _end(signal.SIGALRM, None)
            if (new := came.count(signal.SIGINT)) and (since is None or _asked == 1):
                since = time.monotonic()
            _asked += new
            run = _running or signal.getsignal(signal.SIGINT) is not _interrupt
            unheard = 0.0 if since is None else time.monotonic() - since
            if not run and unheard > (GRACE_SECONDS if _asked == 1 else 1):
                _end()
            if run and unheard > UNHEARD_SECONDS and _asked > 1:
                _end_run()
            if run and unheard > UNHEARD_SECONDS and not said:
                said = True
                _say(f"Ctrl-C waits for {_main_place()}. A second one ends the process, and saves nothing.")
        while select.select([reader], [], [], 0)[0]:  # of the same moment, which one call of the handler answers
            os.read(reader, 256)


def _end_run() -> None:
    _say(f"Interrupted. The process ends without a save: {_main_place()} did not come back.")
    if _at_end is not None:
        with contextlib.suppress(Exception):
            _at_end()
    os._exit(STATUS)


def _main_place() -> str:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(STDERR, f"\n{text}\n".encode())

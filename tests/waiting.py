"""Waiting for what comes in its own time: for as long as a busy machine may need, and no longer than it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def until(holds: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether it holds before so many seconds are over, which no machine should need."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def no_thread_left(*names: str) -> Iterator[None]:
    """Threads with these names that start in the block end soon after it. Those of earlier tests don't count."""
    before = set(threading.enumerate())
    yield
    assert until(lambda: not [one for one in set(threading.enumerate()) - before if one.name in names])


def gone(pid: int) -> bool:
    """Whether a process ends. A dead one that nobody has reaped yet is dead."""

    def ended() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    return until(ended)

"""What may become of a case; anything else is a failure."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

WORKS, DROPPED, ERROR = "works", "dropped and counted", "clear error"
VERDICTS = (WORKS, DROPPED, ERROR)


class Hangs(BaseException):
    """A case did not end in time."""


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raises `Hangs` in the main thread where the block takes longer."""

    def ring(*_: Any) -> None:
        raise Hangs(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

"""Which attempt opened a connection: attempts that share a process can mix up their keys, and would train each other.

Python's audit hook for `socket.connect` runs in the thread and context that connects, whatever the client library. The
endpoint closes a connection after each response, so that each request has a connection of its caller. Threads, and work
for a pool of threads, belong to the attempt that starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary


@dataclass(frozen=True)
class _Attempt:
    key: str
    blocks: Callable[[], object]


_attempt: ContextVar[_Attempt | None] = ContextVar("attempt", default=None)
_opened: WeakKeyDictionary[socket.socket, str] = WeakKeyDictionary()
_lock = threading.Lock()  # also held while the hook is added
_watches = False


def enter(key: str, blocks: Callable[[], object] = lambda: None) -> None:
    """Makes this context, and the tasks and contexts that come from it, an attempt's.

    Args:
        key: The attempt's key.
        blocks: Called when the attempt connects in a way that blocks the event loop of the thread it runs in.
    """
    global _watches
    with _lock:
        if not _watches:
            sys.addaudithook(_hook)  # stays for as long as the process: Python has no way to remove one
            _carry_into_threads()
            _watches = True
    _attempt.set(_Attempt(key, blocks))


def key_of(port: int) -> str | None:
    """The key of the attempt that opened the connection with this local port; None if that is unknown, as for other
    processes, and clients that don't use Python's sockets or threads."""
    with _lock:
        opened = list(_opened.items())
    for connection, key in opened:
        with contextlib.suppress(OSError):  # closed
            if connection.getsockname()[1] == port:
                return key
    return None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect" and (attempt := _attempt.get()) is not None:
        connection, address = arguments
        if isinstance(connection, socket.socket) and isinstance(address, tuple) and address[0] == "127.0.0.1":
            with _lock:
                _opened[connection] = attempt.key
            if connection.gettimeout() != 0:
                with contextlib.suppress(RuntimeError):  # no loop runs in this thread
                    asyncio.get_running_loop()
                    attempt.blocks()


def _carry_into_threads() -> None:
    """Makes a thread, and what a pool's thread is given to do, the attempt's that starts it."""
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def started(self: threading.Thread) -> None:
        if (attempt := _attempt.get()) is not None:
            self.run = partial(_in_thread, attempt, self.run)  # type: ignore[method-assign]
        start(self)

    def submitted(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if (attempt := _attempt.get()) is not None:
            function = partial(_in_thread, attempt, function)
        return submit(self, function, *args, **kwargs)

    threading.Thread.start = started  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submitted  # type: ignore[method-assign, assignment]


def _in_thread(attempt: _Attempt, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    token = _attempt.set(_Attempt(attempt.key, lambda: None))  # this thread blocks no loop of programs
    try:
        return function(*args, **kwargs)
    finally:
        _attempt.reset(token)

"""Which attempt opened a connection. Attempts that share a process can mix up keys, and would train each other's turns.

A context variable names the attempt of code. Tasks, `asyncio.to_thread`, and executors of event loops carry it on, and
from Python 3.12 a thread also belongs to the attempt that started it. The audit event of a connection comes from the
code that connects, whatever the client library. The endpoint closes a connection after each response, so each request
has a connection of its caller.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

UNKNOWN = ""
"""Key for code of this process in a thread that belongs to no attempt."""

_attempt: ContextVar[str] = ContextVar("attempt", default=UNKNOWN)
_threads: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()
_connections: WeakKeyDictionary[socket.socket, str] = WeakKeyDictionary()
_lock = threading.RLock()
_watches = False


def enter(key: str) -> None:
    """Makes this context, and what carries it on, an attempt's."""
    global _watches
    if not _watches:
        _watches = True
        sys.addaudithook(_hook)  # for as long as the process lives: Python can't remove one
    _attempt.set(key)


def key_of(port: int) -> str | None:
    """The key of the attempt that opened the connection with this local port; `UNKNOWN` for none.

    None if another process did, or a client without Python's sockets.
    """
    with _lock:
        opened = list(_connections.items())
    for connection, key in opened:
        with contextlib.suppress(OSError):  # closed
            if connection.getsockname()[1] == port:
                return key
    return None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        connection, address = arguments
        if isinstance(connection, socket.socket) and isinstance(address, tuple) and address[0] == "127.0.0.1":
            with _lock:
                _connections[connection] = _current()
    elif event in ("_thread.start_new_thread", "_thread.start_joinable_thread"):  # Python 3.12 and 3.13
        thread = getattr(arguments[0], "__self__", None)
        if isinstance(thread, threading.Thread):
            with _lock:
                _threads[thread] = _current()


def _current() -> str:
    """The key of the attempt that runs this code."""
    return _attempt.get() or _threads.get(threading.current_thread(), UNKNOWN)

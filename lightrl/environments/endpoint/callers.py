"""Which attempt opened a connection. Attempts that share a process can mix up keys, and would train each other's turns.

A context variable names the attempt of code. Tasks, `asyncio.to_thread`, and executors of event loops carry it on, and
from Python 3.12 a thread also belongs to the attempt that started it. The audit event of a connection comes from the
code that connects, whatever the client library. The endpoint closes a connection after each response, so each request
has a connection of its caller. A child process that inherits another attempt's key in its environment does not start.
"""

from __future__ import annotations

import contextlib
import os
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
_connections: WeakKeyDictionary[socket.socket, tuple[int, str]] = WeakKeyDictionary()  # port there, key
_keys: set[str] = set()  # of attempts that run
_lock = threading.RLock()
_watches = False


def enter(key: str) -> None:
    """Makes this context, and what carries it on, an attempt's."""
    global _watches
    if not _watches:
        _watches = True
        sys.addaudithook(_hook)  # for as long as the process lives: Python can't remove one
    _keys.add(key)
    _attempt.set(key)


def leave(key: str) -> None:
    """Forgets an attempt that ended."""
    _keys.discard(key)


def key_of(port: int, to: int) -> str | None:
    """The key of the attempt that opened a connection; `UNKNOWN` for none.

    None if another process did.

    Args:
        port: Local port of who connected.
        to: Port of the endpoint.
    """
    with _lock:
        opened = [(connection, key) for connection, (there, key) in _connections.items() if there == to]
    for connection, key in opened:
        with contextlib.suppress(OSError):  # closed
            if connection.getsockname()[1] == port:
                return key
    return UNKNOWN if _watches and _is_ours(port, to) else None


def _is_ours(port: int, to: int) -> bool:
    """Whether this process has such a connection, which a client without Python's sockets opened."""
    inodes = set()
    with contextlib.suppress(OSError):
        for table in ("tcp", "tcp6"):
            with open(f"/proc/self/net/{table}") as file:
                lines = [line.split() for line in file][1:]
            ports = (f":{port:04X}", f":{to:04X}")
            inodes |= {f"socket:[{f[9]}]" for f in lines if (f[1][-5:], f[2][-5:]) == ports}
    for name in os.listdir("/proc/self/fd") if inodes else ():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") in inodes:
                return True
    return False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        connection, address = arguments
        if isinstance(connection, socket.socket) and isinstance(address, tuple):
            with _lock:
                _connections[connection] = address[1], _current()
    elif event in ("_thread.start_new_thread", "_thread.start_joinable_thread"):  # Python 3.12 and 3.13
        thread = getattr(arguments[0], "__self__", None)
        if isinstance(thread, threading.Thread):
            with _lock:
                _threads[thread] = _current()
    elif event == "subprocess.Popen" and (mine := _current()):
        given = os.environ if arguments[3] is None else arguments[3]
        if any(value != mine and value in _keys for value in given.values()):
            raise RuntimeError(
                "run: a child process would get the key of another attempt, because os.environ belongs to all of them. "
                "Pass it the attempt's key in `env`, or set process=True."
            )


def _current() -> str:
    """The key of the attempt that runs this code."""
    return _attempt.get() or _threads.get(threading.current_thread(), UNKNOWN)

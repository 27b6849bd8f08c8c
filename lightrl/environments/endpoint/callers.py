"""Determines the trajectory of each connection, because programs in one process may mix up their keys.

A context variable identifies the trajectory of running code. Tasks, `asyncio.to_thread`, and executors of event loops
propagate it. Since Python 3.12, threads also belong to the trajectory that started them. An audit hook records the
trajectory of each connection, independent of the client library. The endpoint closes connections after each response,
so each request has a new connection. Child processes with another trajectory's key in their environment are rejected.
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
"""Key of threads in this process that belong to no trajectory."""

_attempt: ContextVar[str] = ContextVar("attempt", default=UNKNOWN)
_threads: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()
_connections: WeakKeyDictionary[socket.socket, tuple[int, str]] = WeakKeyDictionary()  # port there, key
_keys: set[str] = set()  # of active trajectories
_lock = threading.RLock()
_watches = False


def enter(key: str) -> None:
    """Assigns this context, and contexts derived from it, to a trajectory."""
    global _watches
    if not _watches:
        _watches = True
        sys.addaudithook(_hook)  # permanent: Python can't remove audit hooks
    _keys.add(key)
    _attempt.set(key)


def leave(key: str) -> None:
    """Removes a trajectory that ended."""
    _keys.discard(key)


def key_of(port: int, to: int) -> str | None:
    """The key of the trajectory that opened a connection from `port` to the endpoint's port `to`.

    `UNKNOWN` if no trajectory opened it, and None if another process did.
    """
    with _lock:
        opened = [(connection, key) for connection, (there, key) in _connections.items() if there == to]
    for connection, key in opened:
        with contextlib.suppress(OSError):  # the connection may be closed
            if connection.getsockname()[1] == port:
                return key
    return UNKNOWN if _watches and _is_ours(port, to) else None


def _is_ours(port: int, to: int) -> bool:
    """Whether this process has such a connection, opened by a client that doesn't use Python's sockets."""
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
                "run: a child process would inherit the key of another trajectory, because they share os.environ. Pass "
                "the key in `env`, or set process=True."
            )


def _current() -> str:
    return _attempt.get() or _threads.get(threading.current_thread(), UNKNOWN)

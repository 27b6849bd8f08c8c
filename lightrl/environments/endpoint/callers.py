"""Which attempt opened a connection: attempts that share a process can mix up their keys, and would train each other.

Python's audit hook for `socket.connect` runs in the thread and context that connects, whatever the client library. The
endpoint closes a connection after each response, so that each request has a connection of its caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
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
            _watches = True
    _attempt.set(_Attempt(key, blocks))


def key_of(port: int) -> str | None:
    """The key of the attempt that opened the connection with this local port; None if that is unknown, as for other
    processes, threads outside of the attempt's context, and clients that don't use Python's sockets."""
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

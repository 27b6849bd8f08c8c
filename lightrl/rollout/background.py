"""Threads beside the trainer's: one event loop for episodes, one per generation of an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["BackgroundLoop", "in_background"]

T = TypeVar("T")


def in_background(work: Callable[[], None]) -> threading.Thread:
    """Starts a thread that does not keep the process alive."""
    thread = threading.Thread(target=work, name="lightrl-sampling", daemon=True)
    thread.start()
    return thread


class BackgroundLoop:
    """An event loop in a thread of its own, which starts with the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine there and waits for its result.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self._start()).result(timeout)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Has the loop call a function soon; nothing happens where the loop was closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed between the two lines
                self._loop.call_soon_threadsafe(function, *args)

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(loop,), name="lightrl-episodes", daemon=True)
            self._thread.start()
        return self._loop

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], timeout: float) -> None:
        """Cancels what runs, runs `last`, and ends the thread, in at most about `timeout` seconds."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return

        async def shut_down() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await last()

        try:
            asyncio.run_coroutine_threadsafe(shut_down(), loop).result(timeout)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(min(timeout, 0.5))  # longer only where a coroutine blocks it


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()

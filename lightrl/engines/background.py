"""Daemon threads for event loops and for functions that may block."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")


def release_threads() -> None:
    """Ends the OpenMP threads of the calling thread, which the next parallel operation starts again in microseconds.

    GNU OpenMP keeps a team for each thread that computes. When all teams together have more threads than there are
    cores, it stops spinning at barriers, which makes small operations about 1.7 times slower. A thread therefore
    releases its team before it waits for another thread that computes. No effect with other OpenMP libraries.

    Source: https://gcc.gnu.org/onlinedocs/libgomp (`omp_pause_resource_all`, GOMP_SPINCOUNT).
    """
    with contextlib.suppress(OSError, AttributeError):  # another library, or one older than OpenMP 5.0
        ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY).omp_pause_resource_all(1)


def in_background(work: Callable[[], object], name: str) -> threading.Thread:
    """Starts a daemon thread."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


async def in_thread(work: Callable[[], T], name: str) -> tuple[T, None] | tuple[None, BaseException]:
    """Runs `work` in a new thread and returns (result, None) or (None, error), including SystemExit and StopIteration.

    A thread pool would lose a worker to each call that never returns, and would wait for it at exit. Canceling leaks
    the thread.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(outcome: Any) -> None:
        if not future.done():  # not canceled
            future.set_result(outcome)

    def run() -> None:
        outcome: Any
        try:
            outcome = work(), None
        except BaseException as error:  # SystemExit would end the thread without a result
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, outcome)

    in_background(run, name)
    return await future  # type: ignore[no-any-return]


async def outcome_of(call: Callable[[], Awaitable[T]]) -> tuple[T, None] | tuple[None, BaseException]:
    """Returns (result, None) or (None, error) of an async call. Catches SystemExit, which would end the event loop."""
    try:
        return await call(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of concurrent coroutines. If one fails, cancels the others and waits for them."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class FairLock(AbstractContextManager[None]):
    """A reentrant lock that prefers waiting threads over the one that releases it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held while waiting, so that waiting threads go first
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._holder != threading.get_ident():
            with self._turn:
                self._lock.acquire()
            self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._lock.release()


class BackgroundLoop:
    """An event loop in a daemon thread. Starts on first use, also after `close`.

    SystemExit and KeyboardInterrupt in a task are passed to its caller and don't stop the loop.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    @property
    def started(self) -> bool:
        """Whether the loop is running."""
        return self._loop is not None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop and returns its future."""
        if self._loop is None:
            self._loop, self._ends = loop, ends = asyncio.new_event_loop(), threading.Event()
            self._thread = in_background(lambda: _serve(loop, ends), self.name)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns its result. Cancels it if the wait is interrupted."""
        release_threads()
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None, timeout: float = 5.0) -> None:
        """Cancels all tasks, runs `last`, and stops the thread within about `timeout` seconds.

        Raises a `concurrent.futures.TimeoutError` if a coroutine blocks the loop. The thread is then leaked.
        """
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return

        async def shut_down() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if last is not None:
                await last()

        try:
            asyncio.run_coroutine_threadsafe(shut_down(), loop).result(timeout)
        finally:
            self._ends.set()
            with contextlib.suppress(RuntimeError):  # closed by another thread
                loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout)


def _serve(loop: asyncio.AbstractEventLoop, ends: threading.Event) -> None:
    """Runs the loop until `ends` is set."""
    asyncio.set_event_loop(loop)
    try:
        while not ends.is_set():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # passed to the task's caller
                loop.run_forever()
    finally:
        loop.close()

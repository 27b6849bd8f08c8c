"""Work beside the calling thread, in daemon threads: an event loop, or a function that may take long or for ever."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
_Jobs: TypeAlias = "queue.SimpleQueue[Callable[[Any], None]]"

IDLE_SECONDS = 5.0
"""How long a thread of `in_thread` waits for another call before it ends."""

WAIT_SECONDS = 0.5
"""Length of one wait of `patient_result`."""

_idle: list[_Jobs] = []  # of the threads that wait, which do not live on in a forked process
os.register_at_fork(after_in_child=_idle.clear)


def in_background(work: Callable[[], object], name: str) -> threading.Thread:
    """Starts a thread that does not keep the process alive."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


async def in_thread(work: Callable[[], T], name: str) -> tuple[T, None] | tuple[None, BaseException]:
    """What `work` returned in a thread of its own, or what it raised, SystemExit and StopIteration among it.

    A pool of so many workers would lose one to every call that never returns, and its threads would be waited for at
    exit. Here a thread that is done waits `IDLE_SECONDS` for the next call, which starts one where none waits.
    Cancelling leaves the thread behind.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(outcome: Any) -> None:
        if not future.done():  # else nobody waits any more
            future.set_result(outcome)

    def run(jobs: _Jobs) -> None:
        outcome: Any
        threading.current_thread().name = name
        try:
            outcome = contextvars.Context().run(work), None  # which a call before cannot have changed
        except BaseException as error:  # SystemExit in a thread would otherwise vanish and never answer
            outcome = None, error
        threading.current_thread().name = "lightrl-idle"
        _idle.append(jobs)  # before the answer, so that the next call finds it
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, outcome)

    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        in_background(lambda: _serve_jobs(jobs), name)
    jobs.put(run)
    return await future  # type: ignore[no-any-return]


async def outcome_of(call: Callable[[], Awaitable[T]]) -> tuple[T, None] | tuple[None, BaseException]:
    """What the awaited call returned, or what it raised, SystemExit among it, which would break off the event loop."""
    try:
        return await call(), None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of coroutines that run at the same time. Where one fails, the others are cancelled and have ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _serve_jobs(jobs: _Jobs) -> None:
    """A thread of `in_thread`."""
    while True:
        try:
            job = jobs.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            try:
                _idle.remove(jobs)
            except ValueError:  # taken at this moment
                continue
            return
        job(jobs)
        del job  # and what it holds


class FairLock(AbstractContextManager[None]):
    """A lock that a thread may take again while it has it, and cannot take again before another that waits for it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held while waiting, so that who lets go of the lock comes after who waits
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


def patient_result(future: Future[T], meanwhile: Callable[[], object] = lambda: None) -> T:
    """A future's result. A Ctrl-C that comes just before a wait does not end it, but the next short wait does.

    Args:
        future: what to wait for.
        meanwhile: called between two waits.
    """
    while True:
        try:
            return future.result(timeout=WAIT_SECONDS)
        except FutureTimeoutError:  # Python 3.10 has another TimeoutError
            if future.done():
                return future.result()
            meanwhile()


class BackgroundLoop:
    """An event loop in a thread of its own, which starts with the first call; also again after `close`.

    A task that raises SystemExit or KeyboardInterrupt ends like any other: who waits for it gets it, the loop goes on.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    @property
    def started(self) -> bool:
        """Whether it has been called, and not closed since."""
        return self._loop is not None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine there."""
        if self._loop is None:
            self._loop, self._ends = loop, ends = asyncio.new_event_loop(), threading.Event()
            self._thread = in_background(lambda: _serve(loop, ends), self.name)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for the result of a coroutine there; cancels it when the waiting is interrupted."""
        future = self.submit(coroutine)
        try:
            return patient_result(future)
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Has the loop call a function soon; nothing happens where the loop was closed."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed between the two lines
                self._loop.call_soon_threadsafe(function, *args)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None, timeout: float = 5.0) -> None:
        """Cancels what runs, runs `last`, and ends the thread, in at most about `timeout` seconds.

        Raises:
            concurrent.futures.TimeoutError: a coroutine blocks the loop, whose thread is left behind.
        """
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        if loop.is_closed():  # it broke off
            thread.join(timeout)
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
            with contextlib.suppress(RuntimeError):  # closed by someone else
                loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout)


def _serve(loop: asyncio.AbstractEventLoop, ends: threading.Event) -> None:
    """Runs the loop until it is to end, whatever breaks it off or stops it."""
    asyncio.set_event_loop(loop)
    try:
        while not ends.is_set():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # its task has it
                loop.run_forever()
    finally:
        loop.close()

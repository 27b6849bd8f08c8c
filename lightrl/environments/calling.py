"""Calls of users' code: what blocks holds up no other environment and outlives no time limit."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import functools
import inspect
import threading
import time
import types
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.engines.background import BackgroundLoop, in_background, in_thread

PATIENCE = 0.1
"""Seconds that async code may run without awaiting before it counts as blocking."""

MAKE = "__init__"
"""Name of the call that makes an object."""

CLOSE = "close"
"""Name of the call that ends an object. It runs even if whoever waits for it is cancelled."""

STUCK = 10.0
"""Seconds without awaiting after which the shared loop is given up for a new one."""

_shared = [BackgroundLoop("lightrl-environments")]
"""The loop of async functions; the last one is in use."""


@dataclass
class _Kind:
    """What is known about the functions of one kind of object.

    Attributes:
        name: Name for messages.
        ended: Names of the functions of which a call has ended, and of those without an `await`.
        waited: Names of those that have awaited something that was not ready, and may share it with other objects.
        blocks: Whether a call has held up its event loop.
        warned: Whether there was a warning.
    """

    name: str
    ended: set[str] = field(default_factory=set)
    waited: set[str] = field(default_factory=set)
    blocks: bool = False
    warned: bool = False

    def never_waits(self, function: str) -> bool:
        """Whether a function is known not to wait."""
        return function in self.ended and function not in self.waited

    def blocked(self, function: str) -> None:
        """Records that a call holds up its event loop. Warns once, unless it is the constructor."""
        self.blocks = True
        if function != MAKE:
            self.warn(
                f"its async `{function}` blocks: it ran for over {PATIENCE} s without awaiting, which can hold up "
                "other environments. Await in it, or make it a plain `def`, which runs in a thread."
            )

    def warn(self, text: str) -> None:
        """Warns, unless something was said about this kind before."""
        if not self.warned:
            self.warned = True
            rank_zero_warn(f"{self.name}: {text}")


_kinds: WeakKeyDictionary[Any, _Kind] = WeakKeyDictionary()


class UserCode:
    """Calls the functions of one object that a user wrote.

    A plain function runs in a thread. Async functions share one event loop, in a separate thread, so that objects may
    share clients and locks. If one of them blocks that loop, those that have never awaited anything run in a thread for
    their object, now and for all later objects of the kind.

    Args:
        kind: What the object is made by: a class or a function.
        threads: First word of the names of threads.
    """

    def __init__(self, kind: Any, threads: str = "environment") -> None:
        known = _Kind(getattr(kind, "__qualname__", type(kind).__qualname__))
        try:
            self._kind = _kinds.setdefault(kind, known)
        except TypeError:  # not hashable, or without weak references
            self._kind = known
        self._threads = threads
        self._own: BackgroundLoop | None = None
        self._left = False

    async def make(self, factory: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """The object that a plain function makes, in the thread of its async functions, or what was raised."""

        async def call() -> Any:
            return factory()

        value, error = await self._on_loop(_Call(call, MAKE, self._kind))
        if value is not None:
            self._kind.name = type(value).__qualname__
        return value, error

    async def call(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, BaseException | None]:
        """Result of a method, or what it raised, SystemExit and CancelledError included.

        Cancelling cancels an async function and waits for it for at most a second; a thread is left behind.
        """
        name = getattr(function, "__name__", type(function).__qualname__)
        work = partial(function, *args, **kwargs)
        if not inspect.iscoroutinefunction(function):
            try:
                value, error = await in_thread(work, f"{self._threads} {name}")
            except asyncio.CancelledError:
                self._kind.warn(
                    f"`{name}` was still running when its attempt or its time ended. Its thread can't be stopped: "
                    "give what it waits for a timeout."
                )
                raise
            if error is not None or not inspect.isawaitable(value):
                return value, error
            work = partial(_same, value)  # an async function in a plain wrapper
        elif not _may_wait(getattr(function, "__code__", None)):
            self._kind.ended.add(name)
        return await self._on_loop(_Call(work, name, self._kind))

    async def _on_loop(self, call: _Call) -> tuple[Any, BaseException | None]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        call.on_end = lambda: loop.call_soon_threadsafe(_settle, done)
        own = self._kind.blocks and self._kind.never_waits(call.name)
        shared, began = _shared[-1], time.monotonic()
        (self._own_loop() if own else shared).submit(call.run())
        try:
            while not call.begun and not done.done():
                await asyncio.wait([done], timeout=PATIENCE)
                _note_blocking()
                if (self._left or self._kind.never_waits(call.name)) and call.begin():
                    self._own_loop().submit(call.run(begun=True))
                elif time.monotonic() - began > STUCK and call.begin():
                    if shared is _shared[-1]:
                        _shared.append(BackgroundLoop("lightrl-environments"))
                    _shared[-1].submit(call.run(begun=True))
            while not done.done():
                await asyncio.wait([done], timeout=None if self._kind.warned else PATIENCE)
                _note_blocking()
        finally:
            if not done.done() and call.name != CLOSE:
                call.cancel()
                await asyncio.wait([done], timeout=0.0 if call in _running.values() else 1.0)
            if not done.done() and call.name != CLOSE:  # what blocks is left behind, with its loop
                self._left = True
                self.close()
        return call.value, call.error

    def _own_loop(self) -> BackgroundLoop:
        if self._own is None:
            self._own = BackgroundLoop(f"{self._threads} {self._kind.name}")
        return self._own

    def close(self) -> None:
        """Ends the object's thread, if it has one, without waiting."""
        own, self._own = self._own, None
        if own is not None:
            in_background(partial(_closed, own), "lightrl-environment-close")


@functools.cache
def _may_wait(code: types.CodeType | None) -> bool:
    """Whether the code of an async function has an `await`, `async for`, or `async with`."""
    return code is None or any(step.opname in ("GET_AWAITABLE", "GET_AITER") for step in dis.get_instructions(code))


async def _same(value: Any) -> Any:
    return await value


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _closed(loop: BackgroundLoop) -> None:
    with contextlib.suppress(Exception):  # a call that blocks is left behind
        loop.close()


_running: dict[int, _Call] = {}
"""Thread -> the call whose code runs there at this moment."""


def _note_blocking() -> None:
    """Records the calls that hold up a loop at this moment."""
    now = time.monotonic()
    for call in list(_running.values()):
        if now - call.since >= PATIENCE:
            call.kind.blocked(call.name)


@dataclass(eq=False)
class _Call:
    """One call on an event loop.

    Attributes:
        work: Makes the coroutine.
        name: Name of the function.
        kind: What is known about the object's functions.
        on_end: Called when it has ended.
        value: Result.
        error: What it raised.
        begun: Whether it was claimed by a loop.
        since: Time at which its code began to run without awaiting.
    """

    work: Callable[[], Awaitable[Any]]
    name: str
    kind: _Kind
    on_end: Callable[[], object] = lambda: None
    value: Any = None
    error: BaseException | None = None
    begun: bool = False
    since: float = 0.0
    _task: asyncio.Task[Any] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> bool:
        """Claims the call; False if it was claimed before."""
        with self._lock:
            before, self.begun = self.begun, True
            return not before

    async def run(self, begun: bool = False) -> None:
        """Runs the call, unless it was claimed."""
        if not begun and not self.begin():
            return
        self._task = asyncio.current_task()
        try:
            self.value = await _Watched(self)
        except BaseException as error:  # SystemExit included, which would end the loop
            self.error = error
        self.kind.ended.add(self.name)
        with contextlib.suppress(RuntimeError):  # the loop that waits is closed
            self.on_end()

    def cancel(self) -> None:
        """Cancels the call, from another thread."""
        if self.begin():  # no loop came to it
            self.on_end()
        elif self._task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


class _Watched:
    """Awaits a call's coroutine, and records whether it blocks and whether it waits."""

    def __init__(self, call: _Call) -> None:
        self.call = call

    def __await__(self) -> Generator[Any, Any, Any]:
        call, thread = self.call, threading.get_ident()
        go: Callable[[], Any] | None = None
        while True:
            call.since, _running[thread] = time.monotonic(), call
            try:
                if go is None:
                    steps = call.work().__await__()
                    go = partial(next, steps)
                awaited = go()
            except StopIteration as end:
                return end.value
            finally:
                del _running[thread]
                if time.monotonic() - call.since >= PATIENCE:
                    call.kind.blocked(call.name)
            if awaited is not None:
                call.kind.waited.add(call.name)
            try:
                go = partial(steps.send, (yield awaited))
            except BaseException as error:
                go = partial(steps.throw, error)

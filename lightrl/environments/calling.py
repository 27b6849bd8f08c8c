"""Calls user code so that blocking code affects neither the engine nor time limits."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dis
import inspect
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.engines.background import BackgroundLoop, in_background

GRACE = 1.0
"""Seconds that a canceled call has to end."""

Outcome: TypeAlias = tuple[Any, BaseException | None]
"""(Returned value, raised error including SystemExit) of a call."""


class LateError(TimeoutError):
    """Raised if a call exceeds its time limit."""


class LoopBlockedError(RuntimeError):
    """Raised if an async function blocks the shared event loop."""

    def __init__(self) -> None:
        super().__init__(
            "An async function of an environment or program blocks the event loop, which all of them share. Await slow "
            "operations, or make the function a plain `def`, which runs in a thread."
        )


class UserCode:
    """Calls the functions of a user's object.

    Async functions with `await` run on an event loop in a separate thread. All objects share the loop, so they can
    share clients and locks. Other functions run sequentially in the object's own thread. If a canceled call doesn't
    end, its thread or loop is abandoned, and later calls use a new one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocked = False  # whether a canceled call didn't end because the shared loop was blocked
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None

    async def call(self, work: partial[Any], limit: float | None = None, *, here: bool = False) -> Outcome:
        """Calls a function and returns its value or error, which may be a `LateError` or `LoopBlockedError`.

        `here` awaits it on the current event loop, for functions known not to block.
        """
        if here:
            task = asyncio.ensure_future(_awaited(work))
            return await _ended(task, limit, task.cancel)
        if may_await(work.func):
            return await self._on_loop(work, limit)
        name = getattr(work.func, "__name__", type(work.func).__name__)
        value, error = await _ended(self._in_thread(work), limit, partial(self._abandon, name), grace=0)
        if error is None and inspect.isawaitable(value):  # an async function in a sync wrapper
            return await self._on_loop(lambda: value, limit)
        return value, error

    async def result(self, work: partial[Any]) -> Any:
        """Calls a function and returns its value, or raises its error."""
        value, error = await self.call(work)
        if error is not None:
            raise error
        return value

    async def end(self, owner: Any) -> None:
        """Calls the object's `close` if it has one, and stops its thread."""
        try:
            if callable(getattr(owner, "close", None)):
                await self.result(partial(owner.close))
        finally:
            self.close()

    def _in_thread(self, work: partial[Any]) -> asyncio.Future[Outcome]:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            in_background(partial(_serve, self._jobs), self.name)
        context, call = contextvars.copy_context(), Future[Outcome]()

        def job() -> None:
            outcome = context.run(_outcome, partial(_driven, work))
            with contextlib.suppress(InvalidStateError):  # abandoned
                call.set_result(outcome)

        self._jobs.put(job)
        return asyncio.wrap_future(call)

    def _abandon(self, name: str) -> None:
        rank_zero_warn(
            f"{self.name}: `{name}` was still running after its trajectory or time limit ended. Its thread can't be "
            "stopped. Add timeouts to its blocking operations."
        )
        self.close()

    async def _on_loop(self, work: Callable[[], Any], limit: float | None) -> Outcome:
        shared = _shared[-1]
        call = shared.start(work)
        done = asyncio.wrap_future(call)
        try:
            outcome = await _ended(done, limit, partial(shared.cancel, call))
        finally:
            if done.cancelled():
                self.blocked = True
                shared.give_up()
        return (None, LoopBlockedError()) if self.blocked else outcome

    def close(self) -> None:
        """Stops the object's thread after its current call, without waiting."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def may_await(function: Any) -> bool:
    """Whether an async function contains `await`, `async for`, or `async with`, or uses asyncio."""
    if not inspect.iscoroutinefunction(function):
        return False
    code = getattr(function, "__code__", None)
    if code is None or "asyncio" in code.co_names:
        return True
    return any(step.opname in ("GET_AWAITABLE", "GET_AITER") for step in dis.get_instructions(code))


async def _ended(
    call: asyncio.Future[Outcome], limit: float | None, cancel: Callable[[], object], grace: float = GRACE
) -> Outcome:
    """The outcome of a call. Cancels it at the time limit, or if the caller is canceled.

    If it doesn't end within `grace` seconds after that, its future is canceled.
    """
    try:
        await asyncio.wait([call], timeout=limit)
        return call.result() if call.done() else (None, LateError())
    finally:
        if not call.done():
            cancel()
            await asyncio.wait([call], timeout=grace)
            call.cancel()


def _driven(work: partial[Any]) -> Any:
    """Result of a sync function, or of an async function without `await`."""
    if not inspect.iscoroutinefunction(work.func):
        return work()
    try:
        work().send(None)
    except StopIteration as end:
        return end.value


def _outcome(work: Callable[[], Any]) -> Outcome:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # releases its objects


class _SharedLoop:
    """The shared event loop of async functions."""

    def __init__(self) -> None:
        self._loop = BackgroundLoop("lightrl-users")
        self._executor = _ContextExecutor(thread_name_prefix="lightrl-users")
        self._tasks: dict[Future[Outcome], asyncio.Task[Outcome]] = {}

    def start(self, work: Callable[[], Any]) -> Future[Outcome]:
        done: Future[Outcome] = Future()

        def end(task: asyncio.Task[Outcome]) -> None:
            if self._tasks.pop(done, None) is not None:
                done.set_result((None, asyncio.CancelledError()) if task.cancelled() else task.result())

        async def begin() -> None:
            asyncio.get_running_loop().set_default_executor(self._executor)
            self._tasks[done] = task = asyncio.ensure_future(_awaited(work))
            task.add_done_callback(end)

        self._loop.submit(begin())
        return done

    def cancel(self, call: Future[Outcome]) -> None:
        async def cancel() -> None:
            if call in self._tasks:
                self._tasks[call].cancel()

        self._loop.submit(cancel())

    def give_up(self) -> None:
        """Abandons a blocked loop. Its calls fail, and later calls use a new loop."""
        if _shared[-1] is not self:
            return
        _shared[:] = [_SharedLoop()]
        rank_zero_warn(str(LoopBlockedError()))
        in_background(partial(self._loop.close, timeout=threading.TIMEOUT_MAX), "lightrl-users-close")
        for call in list(self._tasks):
            if self._tasks.pop(call, None) is not None:
                call.set_result((None, LoopBlockedError()))


async def _awaited(work: Callable[[], Any]) -> Outcome:
    try:
        return await work(), None
    except BaseException as error:
        return None, error


class _ContextExecutor(ThreadPoolExecutor):
    """Runs functions in the context of their caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(contextvars.copy_context().run, partial(fn, *args, **kwargs))


_shared = [_SharedLoop()]

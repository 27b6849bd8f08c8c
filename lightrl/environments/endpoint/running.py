"""Runs a program once: in a thread of this process, or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.engines.background import BackgroundLoop, in_background, in_thread
from lightrl.environments.endpoint.callers import enter
from lightrl.rewards.calls import message_of

CHILD = Path(__file__).with_name("child.py")
LEAVE_SECONDS = 1.0  # that a program has to end when its attempt does
BLOCKED_SECONDS = 10.0  # that an event loop may take to react
LOG_BYTES = 4000  # of a process's output that a message shows


class ProgramError(Exception):
    """The program raised, or its process ended without a result."""


class LoopBlockedError(ProgramError):
    """The event loop that async programs share is blocked, by this program or another."""

    def __init__(self) -> None:
        super().__init__(
            "an async program blocks the event loop that all attempts share. Use `await` for whatever takes long, or "
            "write a plain function"
        )


class Runner(ABC):
    """Runs a program once per `run`."""

    @abstractmethod
    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """What the program returns. Cancelling it ends the program.

        Raises:
            ProgramError: it raised, or its process ended.
        """

    async def close(self) -> None:  # noqa: B027 - only some hold anything
        """Ends what attempts share. Another `run` starts it again."""


class InProcess(Runner):
    """Calls a function in a thread. If it is async, it runs on one event loop that all attempts share until `close`, so
    that they can share a client.

    An async function is cancelled at its next `await`. A sync one cannot be ended: its key is void, and its thread is
    left behind with a warning. Once an async function has blocked the shared loop, each attempt gets a separate loop.

    Args:
        function: Takes row, base URL, and key.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._shared = BackgroundLoop("programs")
        self._blocks = False

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """See `Runner.run`.

        Raises:
            LoopBlockedError: an attempt blocks the loop that this one runs on.
        """
        arguments = (deepcopy(dict(row)), base_url, api_key)

        def call() -> Any:
            enter(api_key)
            return self.function(*arguments)

        calling = asyncio.ensure_future(in_thread(call, "program"))
        try:
            result = _result(*await asyncio.shield(calling))
        finally:
            if not calling.done():
                await asyncio.wait([calling], timeout=LEAVE_SECONDS)
                if not calling.done():
                    rank_zero_warn("A program did not end when its attempt did; its thread is left behind.")
                calling.cancel()
        return await self._awaited(result, api_key) if inspect.isawaitable(result) else result

    async def _awaited(self, awaitable: Awaitable[Any], api_key: str) -> Any:
        """The result of an awaitable on the shared loop, or on a separate one if programs block."""
        separate = self._blocks
        loop = BackgroundLoop("program") if separate else self._shared
        program = _OnLoop(awaitable, partial(enter, api_key, self._has_blocked))
        running = asyncio.wrap_future(loop.submit(program.run()))
        try:
            while not running.done():
                if not separate and loop is not self._shared:
                    raise LoopBlockedError
                await asyncio.wait([running], timeout=1.0)
            return _result(*running.result())
        finally:
            if not running.done():
                loop.call(program.cancel)
                await asyncio.wait([running], timeout=LEAVE_SECONDS)
                if not running.done() and not program.cancelled:
                    await asyncio.wait([running], timeout=BLOCKED_SECONDS)
                if not running.done() and (separate or program.cancelled):
                    rank_zero_warn("A program did not end when its attempt did; its task is left behind.")
                elif not running.done():
                    self._give_up(loop)
                    raise LoopBlockedError
            if separate:
                _end(loop)

    def _give_up(self, loop: BackgroundLoop) -> None:
        """Leaves a blocked loop behind, which ends when it can."""
        self._has_blocked()
        if loop is self._shared:
            self._shared = BackgroundLoop("programs")
            _end(loop)

    def _has_blocked(self) -> None:
        if not self._blocks:
            self._blocks = True
            rank_zero_warn(
                "run: an async program blocks the event loop that all attempts share. From now on each attempt has a "
                "separate loop, so a client cannot be shared. Use an async client with `await`, or write a plain "
                "function."
            )

    async def close(self) -> None:
        await in_thread(partial(self._shared.close, timeout=LEAVE_SECONDS), "programs' end")


def _end(loop: BackgroundLoop) -> None:
    """Ends an event loop as soon as nothing blocks it."""
    in_background(partial(loop.close, timeout=threading.TIMEOUT_MAX), "program's end")


class _OnLoop:
    """An awaitable that runs on another thread's event loop. `enter` is called in its context."""

    def __init__(self, awaitable: Awaitable[Any], enter: Callable[[], None]) -> None:
        self.awaitable = awaitable
        self.enter = enter
        self.cancelled = False
        self.task: asyncio.Task[Any] | None = None

    async def run(self) -> tuple[Any, BaseException | None]:
        """What it returned, or what it raised, SystemExit included, which would break off the loop."""
        self.task = asyncio.current_task()
        if self.cancelled and self.task is not None:
            self.task.cancel()
        self.enter()
        try:
            return await self.awaitable, None
        except BaseException as error:
            return None, error

    def cancel(self) -> None:
        """Cancels it, on the loop."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


def _result(result: Any, error: BaseException | None) -> Any:
    """The result, if there is no error.

    Raises:
        ProgramError: there is one.
    """
    if error is None:
        return result
    said = f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")  # SystemExit, or cancelled
    raise ProgramError(said) from error


class InSubprocess(Runner):
    """Calls a function in a Python process of its own.

    The process leads a group, which is killed as a whole, children of the program included, when the function has
    returned, when it is to end, and by the process itself when this one is no more.

    Args:
        run: "file.py:main" or "package.module:main".
        python: the interpreter; None takes this one.
        env: variables beside those of this process.

    Raises:
        ValueError: there is no such file.
    """

    def __init__(self, run: str, python: str | None = None, env: Mapping[str, str] | None = None) -> None:
        place = run.rpartition(":")[0]
        if not place or (place.endswith(".py") and not Path(place).exists()):
            raise ValueError(
                f'run: {run!r} names no program that is there. Write "file.py:function" or "package.module:function".'
            )
        self.program = run
        self.python = python or sys.executable
        self.env = dict(env or {})

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        try:
            call = json.dumps({"row": dict(row), "base_url": base_url, "api_key": api_key})
        except TypeError as error:
            raise ValueError(
                f"process: a row goes to a process as JSON, and this one cannot ({error}). Leave the column out, or "
                "use process=False."
            ) from error
        root = base_url.removesuffix("/v1")
        own = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": api_key,
        }
        with tempfile.TemporaryDirectory(prefix="program-") as folder, open(Path(folder) / "log", "w+b") as log:
            result = Path(folder) / "result.json"
            process = subprocess.Popen(
                [self.python, str(CHILD), self.program, str(result)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **self.env},
                start_new_session=True,
            )
            assert process.stdin is not None
            stdin = process.stdin

            def ended() -> None:
                with contextlib.suppress(BrokenPipeError):
                    stdin.write(call.encode() + b"\n")
                    stdin.flush()
                # Not reaped yet, so that nothing else can have its number when its group is killed.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

            waiting = asyncio.ensure_future(in_thread(ended, "program's process"))
            try:
                _, failed = await asyncio.shield(waiting)
                if failed is not None:
                    raise ProgramError(f"{type(failed).__name__}: {failed}")
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait([waiting])
                process.wait()
                with contextlib.suppress(OSError):
                    stdin.close()
            answer = json.loads(result.read_text()) if result.exists() else {}
            if "reward" not in answer:
                log.seek(max(log.seek(0, os.SEEK_END) - LOG_BYTES, 0))
                said = log.read().decode(errors="replace").strip()
                cause = answer.get("error") or f"its process ended with exit code {process.returncode}"
                raise ProgramError(f"{cause}\n{said}" if said else cause)
            return answer["reward"]

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
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.background import in_thread
from lightrl.rewards.calls import message_of

__all__ = ["InProcess", "InSubprocess", "ProgramError", "Runner"]

CHILD = Path(__file__).with_name("child.py")
LOG_BYTES = 4000  # of a process's output that a message shows


class ProgramError(Exception):
    """The program raised, or its process ended without a result."""


class Runner(ABC):
    """Runs a program once per `run`."""

    @abstractmethod
    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """What the program returns. Cancelling it ends the program.

        Raises:
            ProgramError: it raised, or its process ended.
        """


class InProcess(Runner):
    """Calls a function in a thread; an async one gets an event loop of its own there.

    An async function is cancelled at its next `await`. A sync one cannot be ended: its key is void, and a thread that
    goes on all the same is left behind, with a warning.

    Args:
        function: takes row, base URL and key.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """See `Runner.run`."""
        call = _Call(self.function, (deepcopy(dict(row)), base_url, api_key))
        task = asyncio.ensure_future(in_thread(call, "program"))
        try:
            result, error = await asyncio.shield(task)
            if error is None:
                return result
            said = f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")  # SystemExit, or cancelled
            raise ProgramError(said) from error
        finally:
            if not task.done():
                call.cancel()
                await asyncio.wait([task], timeout=1.0)
                if not task.done():
                    rank_zero_warn("A program did not end when its attempt did; its thread is left behind.")
                task.cancel()


class _Call:
    """One call of a function, sync or async, which can be cancelled from another thread if it is async."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self._lock = threading.Lock()
        self._cancelled = False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def __call__(self) -> Any:
        result = self.function(*self.arguments)
        return asyncio.run(self._awaited(result)) if inspect.isawaitable(result) else result

    async def _awaited(self, result: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            self._running = (asyncio.get_running_loop(), task)
            if self._cancelled:
                task.cancel()
        try:
            return await result
        finally:
            with self._lock:
                self._running = None

    def cancel(self) -> None:
        """Cancels an async function; a sync one runs on."""
        with self._lock:
            self._cancelled = True
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)


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
        """See `Runner.run`."""
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

"""Runs agent programs in this process or in worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import IO, Any

from lightrl.engines.background import in_thread
from lightrl.environments.calling import LoopBlockedError, UserCode
from lightrl.environments.endpoint.callers import enter, leave
from lightrl.rewards.base import message_of

CHILD = Path(__file__).with_name("child.py")
LOG_BYTES = 4000
"""Maximum bytes of a process's output in an error message."""

STOP_SECONDS = 2.0
"""Seconds that a process has to stop its children before it is killed."""


class ProgramError(Exception):
    """Raised if the program raises, or its process exits without a result."""


class ProgramBlockedError(ProgramError):
    """Raised if a program blocks the shared event loop of async programs."""


async def run_here(function: Callable[..., Any], row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    """Calls a function in a thread, or, if it contains `await`, on the shared event loop of user code.

    Raises a `ProgramError` if the function raises. If canceled, an async function is canceled at its next `await`. A
    sync function can't be stopped: its key is revoked, and its thread is abandoned with a warning.
    """
    enter(api_key)
    code = UserCode("program")
    try:
        value, error = await code.call(partial(function, deepcopy(dict(row)), base_url, api_key))
    except asyncio.CancelledError:
        if code.blocked:
            raise ProgramBlockedError(str(LoopBlockedError())) from None
        raise
    finally:
        code.close()
        leave(api_key)
    if error is None:
        return value
    kind = ProgramBlockedError if isinstance(error, LoopBlockedError) else ProgramError
    raise kind(f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")) from error


class Worker:
    """A Python process that imports a program once and runs one trajectory at a time, each in a fork.

    The process and its children exit on `stop`, and if this process exits.
    """

    def __init__(self, program: str, python: str | None, env: Mapping[str, str] | None, base_url: str) -> None:
        self.base_url = base_url
        self.key = f"sk-{secrets.token_urlsafe(32)}"  # of clients created during the import
        self.reusable = False  # whether the process can run another trajectory
        self._code: int | None = None
        self._stopping = threading.Lock()
        self._stopped = False
        self._env = dict(env or {})
        self._started = False
        self._log = tempfile.TemporaryFile(prefix="program-")  # noqa: SIM115  (open while the process runs)
        self._process = subprocess.Popen(
            [python or sys.executable, str(CHILD), program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **self._variables(self.key)},
            start_new_session=True,
        )

    def _variables(self, key: str) -> dict[str, str]:
        own = {"OPENAI_BASE_URL": self.base_url, "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1")}
        return {**own, "OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key, **self._env}

    def start(self) -> None:
        """Waits until the program is imported. Raises a ProgramError if that fails."""
        assert self._process.stdout is not None
        self._started = self._process.stdout.readline() == b"ready\n"
        if not self._started:
            self.stop()
            raise ProgramError(self._died(self._log, "the import failed"))

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        """Calls the function. Raises a ValueError if the row is not JSON."""
        call = {"row": dict(row), "base_url": base_url, "api_key": api_key, "env": self._variables(api_key)}
        try:
            written = json.dumps(call)
        except TypeError as error:  # such as dates and images
            raise ValueError(f"process=True: an example isn't JSON: {error}. Convert or remove the column.") from error
        self.reusable = False
        with tempfile.TemporaryDirectory(prefix="program-") as name:
            folder = Path(name)
            (folder / "call.json").write_text(written)
            (folder / "log").touch()
            playing = asyncio.ensure_future(in_thread(partial(self._ended, name), "program's process"))
            try:
                _, failed = await asyncio.shield(playing)
                if failed is not None:
                    raise ProgramError(f"{type(failed).__name__}: {failed}")
            finally:
                if not self.reusable:  # canceled, or the process died
                    await asyncio.wait([asyncio.ensure_future(in_thread(self.stop, "program's process"))])
                await asyncio.wait([playing])
            result = folder / "result.json"
            answer = json.loads(result.read_text()) if result.exists() else {}
            if "reward" not in answer:
                with open(folder / "log", "rb") as log:
                    raise ProgramError(self._died(log, answer.get("error")))
            return answer["reward"]

    def _ended(self, folder: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{folder}\n".encode())
            self._process.stdin.flush()
        code = self._process.stdout.readline()
        # A killed trajectory may have requests in flight, and the import's key would belong to the next one.
        self.reusable = code == b"0\n"
        self._code = int(code) if code else None

    def _died(self, log: IO[bytes], cause: str | None) -> str:
        """An error message with the cause and the end of a log."""
        log.seek(max(log.seek(0, os.SEEK_END) - LOG_BYTES, 0))
        said = log.read().decode(errors="replace").strip()
        code = self._process.returncode if self._code is None else self._code
        return f"{cause or f'its process exited with code {code}'}\n{said}".strip()

    @property
    def exited(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        self.reusable = False
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with self._stopping:
            if self._stopped:  # its ID may belong to another process by now
                return
            self._stopped = True
            with contextlib.suppress(subprocess.TimeoutExpired):  # doesn't react during the import
                self._process.wait(STOP_SECONDS * self._started)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

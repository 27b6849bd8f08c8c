"""Runs a program once, in this process or in another one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from lightrl.engines.background import in_thread
from lightrl.environments.calling import LoopBlockedError, UserCode
from lightrl.environments.endpoint.callers import enter
from lightrl.rewards.base import message_of

CHILD = Path(__file__).with_name("child.py")
LOG_BYTES = 4000
"""Bytes of a process's output that a message shows."""

Runner: TypeAlias = Callable[[Mapping[str, Any], str, str], Awaitable[Any]]
"""Runs a program with a row, a base URL, and a key, and returns what it returns. Cancelling it ends the program.

It raises a `ProgramError` if the program raised or its process died.
"""


class ProgramError(Exception):
    """The program raised, or its process ended without a result."""


class ProgramBlockedError(ProgramError):
    """The event loop that async programs share is blocked."""


async def run_here(function: Callable[..., Any], row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
    """Calls a function in a thread, or, if it awaits, on the event loop of all users' async code.

    An async function is cancelled at its next `await`. A sync one can't be ended: its key is void, and its thread is
    left behind with a warning.
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
    if error is None:
        return value
    kind = ProgramBlockedError if isinstance(error, LoopBlockedError) else ProgramError
    raise kind(f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")) from error


async def run_process(
    program: str, python: str | None, env: Mapping[str, str] | None, row: Mapping[str, Any], base_url: str, api_key: str
) -> Any:
    """Calls a function in another Python process.

    The process leads a group, which is killed as a whole, including the program's children, when the function has
    returned, when it is to end, and by the process itself when this one is gone.

    Args:
        program: "file.py:function" or "package.module:function".
        python: Interpreter; None for this one.
        env: Environment variables in addition to those of this process.
        row: Row, which must be JSON.
        base_url: Base URL of the endpoint.
        api_key: Key of the attempt.
    """
    try:
        call = json.dumps({"row": dict(row), "base_url": base_url, "api_key": api_key})
    except TypeError as error:
        raise ValueError(
            f"process=True: a row goes to a process as JSON, which can't hold it ({error}). Leave the column out, or "
            "use process=False."
        ) from error
    own = {"OPENAI_BASE_URL": base_url, "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1")}
    own |= {"OPENAI_API_KEY": api_key, "ANTHROPIC_API_KEY": api_key}
    with tempfile.TemporaryDirectory(prefix="program-") as folder, open(Path(folder) / "log", "w+b") as log:
        result = Path(folder) / "result.json"
        process = subprocess.Popen(
            [python or sys.executable, str(CHILD), program, str(result)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **own, **(env or {})},
            start_new_session=True,
        )
        assert process.stdin is not None
        stdin = process.stdin

        def ended() -> None:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(call.encode() + b"\n")
                stdin.flush()
            # Not reaped yet, so that no other process can have its number when its group is killed.
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

"""Child processes for scores that can take unlimited time or memory while holding the GIL, such as `9**9**9`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 120.0
_GRACE_SECONDS = 2.0


class Workers:
    """Child processes for a task of `worker.py`, "maths" or "gym", started on demand and replaced when killed."""

    def __init__(self, kind: str, num_workers: int) -> None:
        self.all = [_Worker(kind) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # LIFO, so that few processes start
        for worker in self.all:
            self._idle.put(worker)

    def ask(self, questions: Sequence[Mapping[str, Any] | None]) -> list[Any]:
        """Returns the answers of one process, "timeout" after a question's `timeout` in seconds. Keeps None."""
        worker = self._idle.get()
        try:
            return [None if question is None else worker.ask(question) for question in questions]
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        for worker in self.all:
            worker.stop()


class _Worker:
    """A child process, started on first use and after it was killed. Used by one thread at a time."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Mapping[str, Any]) -> Any:
        """The process's response, or "timeout" if there is none."""
        process = self._started()
        answer: bytes | None = None
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            answer = self._line(process, question["timeout"] + _GRACE_SECONDS)
        if answer:
            return json.loads(answer)
        self.stop()
        return "timeout"

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # ignores unsent requests
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), self._kind]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # the order of a set of strings is the same in each process
            start_new_session=True,
        )
        self._process = process
        if not self._line(process, START_SECONDS):
            self.stop()
            raise RuntimeError(f"A scoring process did not start ({' '.join(command)}). See its error above.")
        return process

    @staticmethod
    def _line(process: subprocess.Popen[bytes], timeout: float) -> bytes | None:
        """The next line; empty if the process exited, None after `timeout` seconds."""
        assert process.stdout is not None
        poll = select.poll()  # `select.select` doesn't support descriptors above 1023
        poll.register(process.stdout, select.POLLIN)
        return process.stdout.readline() if poll.poll(1000 * timeout) else None

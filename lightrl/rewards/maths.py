"""Checks mathematical equality with `math-verify` in child processes.

Comparing expressions can take unlimited time or memory (`9**9**9`) while holding the GIL, and math-verify's time limits
work only in the main thread. A child process can be killed.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightrl.compat.arguments import require_packages
from lightrl.rewards.base import Reward
from lightrl.rewards.rules import column_of

_START_SECONDS = 120.0
_GRACE_SECONDS = 2.0


class MathVerify(Reward):
    """1 if the final answer is mathematically equal to the reference (`1/2` = `0.5`), 0 otherwise.

    math-verify finds the answer: the last box, LaTeX formula, or number. A completion is unscored if the reference is
    None or not a formula, or if the comparison times out. Logs the fractions of `unparsable` references and
    `timeouts`, which include comparisons that ran out of memory.

    Args:
        column: Dataset column with the reference: LaTeX with or without dollar signs, or a number.
        timeout: Time limit per comparison in seconds. Excludes the startup of a process.
        num_workers: Maximum number of processes. Each uses about 80 MB and starts on demand.

    Raises:
        ValueError: math-verify is not installed.

    Source: https://github.com/huggingface/Math-Verify with its default settings.
    """

    def __init__(self, column: str = "answer", timeout: float = 5.0, num_workers: int = 1) -> None:
        require_packages("MathVerify", "math", "math_verify")
        self.column = column
        self.needed_columns = (column,)
        self.timeout = timeout
        self.max_concurrency = num_workers
        self._workers = [_Worker() for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # LIFO, so that few workers start
        for worker in self._workers:
            self._idle.put(worker)

    def __call__(
        self, completions: Sequence[str], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        pairs = list(zip(column_of(columns, self.column), completions, strict=True))
        worker = self._idle.get()
        try:
            verdicts = [
                "none" if gold is None else worker.ask({"gold": str(gold), "text": text, "timeout": self.timeout})
                for gold, text in pairs
            ]
        finally:
            self._idle.put(worker)
        if log_metric is not None:
            for name, verdict in (("unparsable", "unparsable"), ("timeouts", "timeout")):
                log_metric(name, verdicts.count(verdict) / max(1, len(verdicts)))
        return [{"equal": 1.0, "unequal": 0.0}.get(verdict) for verdict in verdicts]

    def extract_answer(self, completion: str) -> str | None:
        worker = self._idle.get()
        try:
            answer = worker.ask({"text": completion, "timeout": self.timeout})
        finally:
            self._idle.put(worker)
        return answer.removeprefix("=") if answer.startswith("=") else None

    def close(self) -> None:
        """Stops the worker processes."""
        for worker in self._workers:
            worker.stop()


class _Worker:
    """A child process, started on first use and after it was killed. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any]) -> str:
        """The process's response, or "timeout" if there is none."""
        process = self._started()
        answer: bytes | None = None
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            answer = self._line(process, question["timeout"] + _GRACE_SECONDS)
        if answer:
            return str(json.loads(answer))
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
        command = [sys.executable, str(Path(__file__).with_name("maths_worker.py"))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._process = process
        if not self._line(process, _START_SECONDS):
            self.stop()
            raise RuntimeError(f"MathVerify: its process did not start ({' '.join(command)}). See its error above.")
        return process

    @staticmethod
    def _line(process: subprocess.Popen[bytes], timeout: float) -> bytes | None:
        """The next line; empty if the process exited, None after `timeout` seconds."""
        assert process.stdout is not None
        poll = select.poll()  # `select.select` doesn't support descriptors above 1023
        poll.register(process.stdout, select.POLLIN)
        return process.stdout.readline() if poll.poll(1000 * timeout) else None

"""Mathematical equality by `math-verify`, in processes of its own.

Comparing expressions may take for ever or all memory (`9**9**9`), holds Python's lock while it does, and math-verify's
own time limits only work in a main thread. So the work is done by child processes that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from lightrl.compat.arguments import above, at_least, require_packages
from lightrl.rewards.base import Reward, RewardError

_START_SECONDS = 120.0
_GRACE_SECONDS = 2.0
_LONGEST_SECONDS = 1e6  # of one wait


class MathVerify(Reward):
    """1 where the completion's final answer equals the reference mathematically, else 0 (`1/2` = `0.5`).

    The answer is found by math-verify (the last box, LaTeX formula or number). A row is not applicable (None) where
    the reference is None or is no formula, or where the comparison exceeds `timeout`. Logged: `unparsable`, the
    fraction of references that are no formula, and `timeouts`, the fraction of comparisons given up.

    Args:
        column: data-set column with the reference: LaTeX with or without dollar signs, or a number.
        timeout: seconds for one comparison, above 0. The start of a process does not count: it has compared once
            before its first comparison here.
        num_workers: processes that compare; each takes about 80 MB and starts when first needed.
        timeout_value: reward of a comparison that was given up; None leaves the row unscored, 0 counts it as wrong.

    Raises:
        ValueError: math-verify is not installed, or a number is out of range.

    Source: https://github.com/huggingface/Math-Verify, its defaults.
    """

    def __init__(
        self,
        column: str = "answer",
        timeout: float = 5.0,
        num_workers: int = 1,
        timeout_value: float | None = None,
    ) -> None:
        require_packages("MathVerify", "math", "math_verify")
        self.column = column
        self.needed_columns = (column,)
        self.timeout = above("MathVerify.timeout", timeout, note=" seconds")
        self.timeout_value = timeout_value
        self.max_concurrency = at_least("MathVerify.num_workers", num_workers, 1)
        self._workers = [_Worker() for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()  # last in, first out: few workers are ever started
        for worker in self._workers:
            self._idle.put(worker)

    def __call__(
        self, completions: Sequence[str], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        if self.column not in columns:
            raise RewardError(f"column={self.column!r} is not in the data set; it has: {', '.join(sorted(columns))}.")
        worker = self._idle.get()
        try:
            verdicts = [
                "none" if gold is None else worker.compare(str(gold), text, self.timeout)
                for gold, text in zip(columns[self.column], completions, strict=True)
            ]
        finally:
            self._idle.put(worker)
        if log_metric is not None:
            log_metric("unparsable", verdicts.count("unparsable") / max(1, len(verdicts)))
            log_metric("timeouts", verdicts.count("timeout") / max(1, len(verdicts)))
            log_metric("crashes", verdicts.count("crashed") / max(1, len(verdicts)))
        values: dict[str, float | None] = {"equal": 1.0, "unequal": 0.0, "timeout": self.timeout_value}
        return [values.get(verdict) for verdict in verdicts]

    def extract_answer(self, completion: str) -> str | None:
        worker = self._idle.get()
        try:
            answer = worker.ask({"text": completion, "timeout": self.timeout})
        finally:
            self._idle.put(worker)
        return answer.removeprefix("=") if answer.startswith("=") else None

    def close(self) -> None:
        """Ends the worker processes."""
        for worker in self._workers:
            worker.stop()


class _Worker:
    """One child process, started at first use and again after it was killed. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def compare(self, gold: str, text: str, timeout: float) -> str:
        """ "equal", "unequal", "unparsable" (gold), "timeout", or "crashed" where the process died of it twice."""
        return self.ask({"gold": gold, "text": text, "timeout": timeout})

    def ask(self, question: dict[str, Any]) -> str:
        """The process's answer, "timeout", or "crashed".

        A process that dies is replaced and asked again, once: it may have been killed for what others did.
        """
        request, timeout = json.dumps(question).encode() + b"\n", question["timeout"]
        for _ in range(2):
            process = self._started()
            answer: bytes | None = b""
            with contextlib.suppress(BrokenPipeError):
                sent = self._send(process, request, timeout + _GRACE_SECONDS)
                answer = self._line(process, timeout + _GRACE_SECONDS) if sent else None
            if answer:
                return str(json.loads(answer))
            self.stop()
            if answer is None:
                return "timeout"
        return "crashed"

    def stop(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not flushed is of no use any more
                    assert pipe is not None
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = [sys.executable, str(Path(__file__).with_name("maths_worker.py"))]
        # Apart from Ctrl-C. Of a group in its parent's session Linux ends a stopped process, too, when the parent dies.
        apart: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **apart)
        with self._lock:
            self._process = process
        if not self._line(process, _START_SECONDS):
            self.stop()
            raise RuntimeError(f"the process for math-verify did not start ({' '.join(command)}); see its error above.")
        return process

    @staticmethod
    def _send(process: subprocess.Popen[bytes], request: bytes, timeout: float) -> bool:
        """Whether it took all of a request within `timeout` seconds: one that is stopped takes what its pipe holds."""
        assert process.stdin is not None
        end, left = time.monotonic() + timeout, memoryview(request)
        while left and _ready(process.stdin, select.POLLOUT, end - time.monotonic()):
            left = left[os.write(process.stdin.fileno(), left[: select.PIPE_BUF]) :]  # so much never blocks then
        return not left

    @staticmethod
    def _line(process: subprocess.Popen[bytes], timeout: float) -> bytes | None:
        """The next line; empty where the process ended, None where it says nothing within `timeout` seconds."""
        assert process.stdout is not None
        return process.stdout.readline() if _ready(process.stdout, select.POLLIN, timeout) else None


def _ready(pipe: IO[bytes], event: int, timeout: float) -> bool:
    """Whether a pipe can be read or written within some seconds, or was closed at its other end."""
    poll = select.poll()  # not `select.select`, which knows no descriptors above 1023
    poll.register(pipe, event)
    return bool(poll.poll(1000 * min(max(timeout, 0.0), _LONGEST_SECONDS)))

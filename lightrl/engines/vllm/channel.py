"""Shared memory and pipes between the trainer and vLLM's workers, for the time of one weight sync.

One call into the engine starts a sync on every worker; from then on trainer and workers talk through pipes of their
own. A call for each piece of the weights would cost a millisecond, in which the worker waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from lightrl.compat.vllm import POLL_SECONDS, LostEngineError, VLLMAdapter, shared_path

_GOODBYE_SECONDS = 3.0  # for workers to notice that a push broke off


class ChannelClosedError(Exception):
    """A worker ended the sync, or died."""


class Channel:
    """The trainer's ends of two pipes per worker, one that brings messages and one that brings acknowledgements.

    Args:
        adapter: the engine.
        num_workers: how many workers it has.
        strict: whether the workers look for parameters that did not come.
    """

    def __init__(self, adapter: VLLMAdapter, num_workers: int, strict: bool) -> None:
        self._adapter = adapter
        pipes = [(os.pipe(), os.pipe()) for _ in range(num_workers)]
        self._theirs = [descriptor for down, up in pipes for descriptor in (down[0], up[1])]
        self._down = [Connection(down[1], readable=False) for down, _ in pipes]
        self._up = [Connection(up[0], writable=False) for _, up in pipes]
        paths = [(shared_path(down[0]), shared_path(up[1])) for down, up in pipes]
        self._num_sent = 0
        self._num_done = -1
        self._answers: Callable[..., list[Any]] | None = adapter.submit("lightrl_receive", strict, paths)

    def send(self, *message: Any) -> int:
        """Sends to all workers, once they are there; returns the message's number, for `wait`.

        Raises:
            ChannelClosedError: a worker reads no more.
        """
        if self._theirs:
            self.wait(0)
            self._close_theirs()
        for pipe in self._down:
            with _closing():
                pipe.send(message)
        self._num_sent += 1
        return self._num_sent

    def wait(self, number: int) -> None:
        """Waits until every worker has acknowledged message `number`; 0 is their first acknowledgement.

        Raises:
            ChannelClosedError: a worker sends no more.
            LostEngineError: the engine's core is gone or hangs.
        """
        while self._num_done < number:
            look = self._adapter.watch()
            for pipe in self._up:
                with _closing():
                    while not pipe.poll(POLL_SECONDS):
                        look()
                    pipe.recv_bytes()
            self._num_done += 1

    def answers(self) -> list[Any]:
        """Closes the pipes and waits for what the workers' call returns."""
        for pipe in self._down:  # where one worker has stopped, the others must not wait on
            pipe.close()
        assert self._answers is not None
        wait, self._answers = self._answers, None
        return wait()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error, waits a little until the workers have noticed that nothing more comes."""
        self._close()
        if self._answers is not None and not (kind is not None and issubclass(kind, LostEngineError)):
            with suppress(Exception):  # there is an error already
                self._answers(_GOODBYE_SECONDS)

    def _close(self) -> None:
        self._close_theirs()
        for pipe in (*self._down, *self._up):
            pipe.close()

    def _close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())


class _closing:
    """Turns a broken pipe into `ChannelClosedError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, (EOFError, BrokenPipeError, ConnectionResetError)):
            raise ChannelClosedError

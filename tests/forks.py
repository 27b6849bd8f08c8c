"""Processes that begin with everything imported: forked from one that imported it once, which costs them no seconds."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (
    "pytest",
    "lightning.pytorch",
    "peft",
    "lightrl.algorithms",
    "lightrl.callbacks",
    "lightrl.engines",
    "tests.toys",
)


class Fork:
    """A running `python -m module *arguments` in a session of its own; the file `said` gets what it prints."""

    def __init__(self, module: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> None:
        self.said = tempfile.TemporaryFile()  # noqa: SIM115
        self.returncode: int | None = None
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([[module, *arguments], str(cwd), env]).encode()
            socket.send_fds(_origin(), [request], [self.said.fileno(), theirs.fileno()])
        self.pid = int(self._status.recv(32))

    def poll(self, timeout: float = 1e-3) -> int | None:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(32))
            except TimeoutError:
                return None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def printed(self) -> str:
        return os.pread(self.said.fileno(), 1 << 24, 0).decode(errors="replace")


def run(module: str, *arguments: str, timeout: float = 400, **environment: str) -> int:
    """The exit status of one process; negative for a signal."""
    return _together([Fork(module, *arguments, **environment)], timeout)


def ranks(module: str, *arguments: str, timeout: float = 400) -> None:
    """Two ranks of one run; both must end well."""
    _together(start_ranks(module, *arguments), timeout, check=True)


def start_ranks(module: str, *arguments: str) -> list[Fork]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
    return [Fork(module, *arguments, **world, LOCAL_RANK=rank) for rank in "01"]


def _together(forks: list[Fork], timeout: float, check: bool = False) -> int:
    """Waits for all; if one fails or the time is over, the others are killed."""
    end = time.monotonic() + timeout
    try:
        while any(fork.poll(0.05) is None for fork in forks):
            assert time.monotonic() < end, f"no end after {timeout} s: {forks[0].printed()[-3000:]}"
            if any(fork.returncode for fork in forks):
                break
    finally:
        for fork in forks:
            fork.kill()
    if check:
        for fork in forks:
            assert not fork.returncode, fork.printed()[-4000:]
    return forks[0].returncode or 0


@functools.cache
def _origin() -> socket.socket:
    """Connection to the process that forks; it ends with this one, which holds the other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with theirs:
        subprocess.Popen([sys.executable, "-m", "tests.forks"], cwd=ROOT, env=environment, stdin=theirs)
    return ours


def _serve(requests: socket.socket) -> None:
    """Forks a process for each request. Returns in that process alone, which is then to run what was asked for."""
    while True:
        request, (said, status), _, _ = socket.recv_fds(requests, 1 << 20, 2) if _more(requests) else sys.exit()
        if os.fork():  # the process that waits for the other, and tells how it ended
            os.close(said)
            os.close(status)
            continue
        requests.close()
        if pid := os.fork():
            os.write(status, str(pid).encode())
            _, how = os.waitpid(pid, 0)
            os.write(status, str(os.waitstatus_to_exitcode(how)).encode())
            os._exit(0)
        os.close(status)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.close(said)
        os.setsid()
        sys.argv, cwd, environment = json.loads(request)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        return


def _more(requests: socket.socket) -> bool:
    """Whether there is another request; meanwhile reaps processes that have ended."""
    requests.settimeout(1.0)
    while True:
        try:
            return bool(requests.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    _serve(socket.socket(fileno=0))
    import torch

    torch.set_num_threads(1)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

"""Runs generated programs without access to the network, other files, or the trainer's environment."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.compat.arguments import install_command

_GRACE_SECONDS = 15.0
_MIB = 1 << 20


class SandboxError(RuntimeError):
    """Raised if the sandbox fails, as opposed to the program in it."""


@dataclass(frozen=True)
class SandboxResult:
    """The result of a program.

    Attributes:
        stdout: Standard output, truncated at `output_kib`.
        stderr: Standard error, truncated at `output_kib`.
        exit_code: Exit code, negative for a signal.
        reason: "exit" if the program exited, otherwise the exceeded limit: "timeout", "memory", "processes", "disk", or
            "output".
    """

    stdout: str
    stderr: str
    exit_code: int
    reason: str

    def text(self) -> str:
        """Both streams, and the reason if the program failed, as a tool result."""
        parts = [self.stdout, self.stderr]
        if self.reason != "exit":
            parts.append(f"[stopped: {self.reason} limit]")
        elif self.exit_code:
            parts.append(f"[exit code {self.exit_code}]")
        return "\n".join(part.rstrip("\n") for part in parts if part) or "[no output]"


class Sandbox:
    """Runs untrusted programs without root privileges or containers.

    A program has read-only access to the system's programs and libraries and to a Python installation. Its working
    directory is an empty scratch directory, deleted afterwards. It has no access to the network, other files, other
    processes, or the trainer's environment variables. All its processes are killed when it exits.

    Uses bubblewrap if it is installed and works, otherwise sandlock (Landlock and seccomp). With sandlock, programs
    can't change the modes, owners, and times of files, and have no `/dev/shm`.

    Args:
        timeout: Time limit per run in seconds, including startup (0.1 to 0.3 s).
        memory_mib: Memory limit in MiB of all processes together, and address space limit of each.
        max_processes: Maximum number of concurrent processes.
        disk_mib: Maximum size of the scratch directory in MiB.
        output_kib: Maximum size of stdout and stderr together in KiB. Exceeding it stops the program.
        python: Python interpreter for Python programs, a path or a name on the `PATH`. Defaults to the trainer's,
            including its packages.
        readable: Additional files and directories that programs can read.

    Raises:
        ValueError: Neither mechanism works on this system. The message lists what to install.
    """

    def __init__(
        self,
        timeout: float = 10.0,
        memory_mib: int = 1024,
        max_processes: int = 32,
        disk_mib: int = 64,
        output_kib: int = 64,
        python: str | None = None,
        readable: Sequence[str] = (),
    ) -> None:
        self.timeout = timeout
        self.memory_mib = memory_mib
        self.max_processes = max_processes
        self.disk_mib = disk_mib
        self.output_kib = output_kib
        self.python = os.path.abspath(shutil.which(python or sys.executable) or python or sys.executable)
        roots = {sys.prefix, sys.base_prefix}
        if python is not None:  # also that of a virtual environment's base
            roots = {str(Path(path).parent.parent) for path in (self.python, os.path.realpath(self.python))}
        self._readable = [os.path.abspath(path) for path in (*sorted(roots - {"/"}), *readable)]
        self._mechanism = mechanism()

    def run_python(self, code: str, stdin: str = "") -> SandboxResult:
        """Runs a Python program with the given standard input."""
        return self.run([self.python, "-I", "../program/main.py"], stdin, {"main.py": code})

    def run_bash(self, script: str, stdin: str = "") -> SandboxResult:
        """Runs a bash script with the given standard input."""
        return self.run(["bash", "../program/main.sh"], stdin, {"main.sh": script})

    def run(self, command: Sequence[str], stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        """Runs a command.

        Args:
            command: Program and arguments.
            stdin: Standard input.
            files: Name -> text of files in the read-only directory `../program`.
        """
        with tempfile.TemporaryFile() as source:
            source.write(stdin.encode(errors="replace"))
            source.seek(0)
            with self.started(command, files or {}, source, subprocess.PIPE, subprocess.PIPE) as running:
                streams, cut = running.read(1024 * self.output_kib)
                ended = running.end()
        stdout, stderr = (bytes(stream).decode(errors="replace") for stream in streams)
        return SandboxResult(stdout, stderr, ended["code"], "output" if cut else ended["reason"])

    @contextlib.contextmanager
    def started(
        self, command: Sequence[str], files: Mapping[str, str], stdin: Any, stdout: Any, stderr: Any
    ) -> Iterator[Running]:
        """Starts a command with the given streams (see `subprocess.Popen`). Stops it when the block ends."""
        name, where = self._mechanism
        job = {
            **{"mechanism": name, name: where, "command": list(command), "files": dict(files)},
            **{"readable": self._readable, "timeout": self.timeout, "processes": self.max_processes},
            **{"memory": self.memory_mib * _MIB, "disk": self.disk_mib * _MIB},
        }
        running = Running(job, stdin, stdout, stderr)
        try:
            yield running
        finally:
            running.stop()


class Running:
    def __init__(self, job: Mapping[str, Any], stdin: Any, stdout: Any, stderr: Any) -> None:
        self._deadline = time.monotonic() + job["timeout"] + _GRACE_SECONDS
        self._control, theirs = socket.socketpair()
        with theirs:
            worker = str(Path(__file__).with_name("sandbox_worker.py"))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", worker, str(theirs.fileno())],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={"TMPDIR": tempfile.gettempdir(), "PATH": "/usr/bin:/bin"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control.settimeout(max(0.1, self._deadline - time.monotonic()))
        with contextlib.suppress(OSError):  # `end` reports what happened
            self._control.sendall(json.dumps(job).encode() + b"\n")

    def read(self, limit: int) -> tuple[list[bytearray], bool]:
        """The bytes of both streams up to a combined limit, and whether the limit was exceeded."""
        pipes = [self._process.stdout, self._process.stderr]
        streams = [bytearray(), bytearray()]
        with selectors.DefaultSelector() as selector:
            for pipe, stream in zip(pipes, streams, strict=True):
                if pipe is not None:
                    selector.register(pipe, selectors.EVENT_READ, stream)
            while selector.get_map() and (ready := selector.select(self._deadline - time.monotonic())):
                for key, _ in ready:
                    chunk = key.fileobj.read1(1 << 16)  # type: ignore[union-attr]
                    key.data.extend(chunk)
                    if not chunk:
                        selector.unregister(key.fileobj)
                if (over := sum(map(len, streams)) - limit) > 0:
                    longer = max(streams, key=len)
                    del longer[len(longer) - over :]
                    return streams, True
        return streams, False

    def end(self) -> dict[str, Any]:
        """Stops the program and returns its exit code and reason. Raises a SandboxError if the sandbox failed."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        try:
            ended = json.loads(self._control.makefile("r").readline() or "{}")
        except OSError as error:
            ended = {"error": str(error)}
        if "code" not in ended:
            raise SandboxError(f"sandbox: {ended.get('error', 'its process was killed')}.")
        return ended

    def stop(self) -> None:
        self._control.close()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


@functools.cache
def mechanism() -> tuple[str, str]:
    """Name and path of the sandbox mechanism. Raises a ValueError with reasons and fixes if none works."""
    reasons = []
    for name, place in mechanisms().items():
        if place is None:
            reasons.append(f"{name} is not installed")
        elif (reason := _trial(name, place)) is None:
            return name, place
        else:
            reasons.append(f"{name} does not work on this system ({reason})")
    raise ValueError(
        f"Sandbox: {'; '.join(reasons)}. Install bubblewrap (for example, apt install bubblewrap), or sandlock if the "
        f"kernel supports Landlock: {install_command('sandbox')}."
    )


def mechanisms() -> dict[str, str | None]:
    """Paths of the program bwrap and the package sandlock; None if not installed."""
    found = importlib.util.find_spec("sandlock")
    package = str(Path(found.origin).parent.parent) if found and found.origin else None
    return {"bubblewrap": shutil.which("bwrap"), "sandlock": package}


def _trial(name: str, place: str) -> str | None:
    """Why a mechanism can't run a program on this system; None if it can."""
    job = {"mechanism": name, name: place, "command": ["sh", "-c", "exit 7"], "files": {}, "readable": []}
    limits = {"timeout": 20.0, "processes": 8, "memory": 256 * _MIB, "disk": _MIB}
    running = Running({**job, **limits}, subprocess.DEVNULL, subprocess.DEVNULL, subprocess.PIPE)
    try:
        (_, said), _ = running.read(1000)
        ended = running.end()
    except SandboxError as error:
        return str(error)
    finally:
        running.stop()
    return None if ended["code"] == 7 else said.decode(errors="replace").strip() or str(ended)


class SandboxedPython(Sandbox):
    """Runs Python programs with the limits of `Sandbox`. A call returns the output and the reason of a failure."""

    def __call__(self, code: str) -> str:
        return self.run_python(code).text()


class SandboxedBash(Sandbox):
    """Runs bash scripts with the limits of `Sandbox`. A call returns the output and the reason of a failure."""

    def __call__(self, code: str) -> str:
        return self.run_bash(code).text()

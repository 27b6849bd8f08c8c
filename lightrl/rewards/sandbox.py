"""Programs that a policy writes, run without network, outside files, or the trainer's environment."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
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

from lightrl.compat.arguments import above, at_least, install_command

_GRACE_SECONDS = 15.0
_MIB = 1 << 20


class SandboxError(RuntimeError):
    """The sandbox itself failed, not the program in it."""


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended.

    Attributes:
        stdout: What it wrote, cut at `output_kib`.
        stderr: The same of its other stream.
        exit_code: Exit code, negative for a signal.
        reason: "exit" if the program ended; otherwise the limit that ended it: "timeout", "memory", "processes",
            "disk", or "output".
    """

    stdout: str
    stderr: str
    exit_code: int
    reason: str

    def text(self) -> str:
        """Both streams and how the program ended if it failed, as a tool's result."""
        parts = [self.stdout, self.stderr]
        if self.reason != "exit":
            parts.append(f"[stopped: {self.reason} limit]")
        elif self.exit_code:
            parts.append(f"[exit code {self.exit_code}]")
        return "\n".join(part.rstrip("\n") for part in parts if part) or "[no output]"


class Sandbox:
    """Runs untrusted programs without root or a container.

    A program sees the system's programs and libraries and a Python installation, all read-only. Its working directory
    is an empty scratch folder, deleted afterwards. It has no access to the network, other files, other processes, or
    the trainer's environment variables. Its processes end with it.

    bubblewrap is used if it is installed and works here; otherwise sandlock (Landlock and seccomp). Under sandlock a
    program can't change modes, owners, and times of files, and has no `/dev/shm`.

    Args:
        timeout: Seconds per run, including the start (0.1 to 0.3 s).
        memory_mib: Memory of all processes together, and address space of each.
        max_processes: Number of processes at a time.
        disk_mib: Size of the scratch folder.
        output_kib: Characters of stdout and stderr together; more ends the program.
        python: Python interpreter for Python programs. Defaults to the trainer's, with its packages.
        readable: Further files and folders that programs may read.

    Raises:
        ValueError: A limit is out of range, or no mechanism works here. The message tells what to install.
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
        self.timeout = above("Sandbox.timeout", timeout, note=" seconds")
        self.memory_mib = at_least("Sandbox.memory_mib", memory_mib, 64)
        self.max_processes = at_least("Sandbox.max_processes", max_processes, 1)
        self.disk_mib = at_least("Sandbox.disk_mib", disk_mib, 1)
        self.output_kib = at_least("Sandbox.output_kib", output_kib, 1)
        self.python = python or sys.executable
        roots = (sys.prefix, sys.base_prefix) if python is None else (Path(python).parent.parent,)
        self._readable = [str(path) for path in (*roots, *readable)]
        self._mechanism = mechanism()

    def run_python(self, code: str, stdin: str = "") -> SandboxResult:
        """Runs a Python program with a text on its standard input."""
        return self.run([self.python, "-I", "../program/main.py"], stdin, {"main.py": code})

    def run_bash(self, script: str, stdin: str = "") -> SandboxResult:
        """Runs a bash script with a text on its standard input."""
        return self.run(["bash", "../program/main.sh"], stdin, {"main.sh": script})

    def run(self, command: Sequence[str], stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        """Runs a command.

        Args:
            command: Program and arguments.
            stdin: Its standard input.
            files: Name -> text of files in `../program`, which is read-only.

        Raises:
            SandboxError: The sandbox failed.
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
        """Starts a command with the given streams, as `subprocess.Popen` takes them; ends it with the block."""
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
    """A program under way in its sandbox."""

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
        """The two streams' bytes up to a common limit, and whether there was more."""
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
        """How the program ended. One that runs is stopped.

        Raises:
            SandboxError: The sandbox failed.
        """
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
        """Ends the program and all its processes."""
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
    """Name and place of what isolates programs here.

    Raises:
        ValueError: Neither mechanism works. The message has both reasons and what to install.
    """
    reasons = []
    for name, place in mechanisms().items():
        if place is None:
            reasons.append(f"{name} is not installed")
        elif (reason := _trial(name, place)) is None:
            return name, place
        else:
            reasons.append(f"{name} does not work here ({reason})")
    raise ValueError(
        f"Sandbox: {'; '.join(reasons)}. Install bubblewrap (such as apt install bubblewrap), or on a kernel with "
        f"Landlock sandlock: {install_command('sandbox')}."
    )


def mechanisms() -> dict[str, str | None]:
    """Place of the program bwrap and of the package sandlock; None if it is not installed."""
    found = importlib.util.find_spec("sandlock")
    package = str(Path(found.origin).parent.parent) if found and found.origin else None
    return {"bubblewrap": shutil.which("bwrap"), "sandlock": package}


def _trial(name: str, place: str) -> str | None:
    """Why a mechanism can't run a program here; None if it can."""
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
    """Runs Python programs; limits as in `Sandbox`. A call returns what a program printed and how it failed."""

    def __call__(self, code: str) -> str:
        return self.run_python(code).text()


class SandboxedBash(Sandbox):
    """Runs bash scripts; limits as in `Sandbox`. A call returns what a script printed and how it failed."""

    def __call__(self, code: str) -> str:
        return self.run_bash(code).text()

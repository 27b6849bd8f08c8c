"""Supervisor process of a sandboxed program: starts it, enforces its limits, and cleans up.

Runs as a script that uses only the standard library and sandlock. Reads the program as a JSON line from a socket and
writes the result as a JSON line. Stops the program if the other side closes the socket or dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/group", "/etc/ld.so.cache"),
    *("/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Landlock doesn't cover metadata: with these, a program could change the mode of any file of its user.
_METADATA = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "file_setattr"),
    *("utime", "utimes", "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)
# Denied system calls with their numbers on x86-64 and 64-bit ARM. Namespaces and Landlock don't cover them: they access
# kernel keys, other processes of the user, file names, or memory that belongs to no process.
_KERNEL = {
    **{"ptrace": (101, 117), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "perf_event_open": (298, 241)},
    **{"setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setattr": (314, 274)},
    **{"sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "kcmp": (312, 272)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239), "process_madvise": (440, 440)},
    **{"bpf": (321, 280), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "memfd_create": (319, 279)},
    **{"memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190)},
    **{"mq_open": (240, 180), "mq_unlink": (241, 181), "inotify_add_watch": (254, 27), "fanotify_init": (300, 262)},
    **{"fallocate": (285, 47)},  # fills a disk before `_watch` can notice
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432)},
}
# Families for `socket`: AF_UNIX and AF_NETLINK, and with a separate network also AF_INET and AF_INET6. Landlock covers
# neither MPTCP, nor TCP Fast Open, nor sockets that listen without an address.
_LOCAL, _SEPARATE = (1, 16), (1, 2, 10, 16)
_EPERM, _ALLOW = (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)
_ENTRY_BYTES = 4096  # counted for each file, even if empty
_LONGEST_PATH = 1024
_REWRITES = 8  # bounds deleted files that are only mapped, or only sent to a socket


def main() -> None:
    """Runs the program received from the socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    job = json.loads(control.makefile("r").readline())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: adopts orphaned descendants
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python; programs would inherit that
        signal.signal(number, signal.SIG_DFL)
    root = Path(tempfile.mkdtemp(prefix="lightrl-sandbox-"))
    try:
        ended = _run(job, root, control, libc)
    except Exception as error:
        ended = {"error": f"{type(error).__name__}: {error}"}
    finally:
        _kill_all()
        _remove(root)
    with contextlib.suppress(OSError):
        control.send(json.dumps(ended).encode() + b"\n", socket.MSG_NOSIGNAL)
    os._exit(0)  # sandlock would wait for processes that have exited


def _run(job: dict[str, Any], root: Path, control: socket.socket, libc: Any) -> dict[str, Any]:
    for name in ("program", "scratch", "shm"):
        (root / name).mkdir()
    for name, text in job["files"].items():
        (root / "program" / name).write_bytes(text.encode(errors="surrogatepass"))
    cpu = int(job["timeout"] * (os.cpu_count() or 1)) + 10  # in case this process is killed
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: cpu, resource.RLIMIT_FSIZE: job["disk"]}
    for limit, value in {**limits, resource.RLIMIT_NOFILE: 256}.items():
        resource.setrlimit(limit, (value, value))
    # Set by the shell, because this process may need more address space than the program's limit.
    job["command"] = ["sh", "-c", f'ulimit -v {job["memory"] // 1024}; exec "$@"', "sh", *job["command"]]
    deadline = time.monotonic() + job["timeout"]
    pid, wait = _MECHANISMS[job["mechanism"]](job, root, libc)
    reason = _watch(job, root, pid, deadline, control)
    return {"reason": reason, "code": wait() if reason == "exit" else -signal.SIGKILL}


def _watch(job: dict[str, Any], root: Path, pid: int, deadline: float, control: socket.socket) -> str:
    """Waits until the program exits or exceeds a limit. Returns the reason."""
    poll = select.poll()
    try:
        program = os.pidfd_open(pid)
    except ProcessLookupError:
        return "exit"
    for descriptor in (program, control.fileno()):
        poll.register(descriptor, select.POLLIN)
    pause = 10.0
    while not (ready := dict(poll.poll(max(0.0, min(pause, 1000 * (deadline - time.monotonic())))))):
        pause = min(50.0, 1.5 * pause)
        if time.monotonic() >= deadline:
            return "timeout"
        pids = list(_descendants(os.getpid()))
        memory, deleted, written = map(sum, zip((0, 0, 0), *map(_usage, pids), strict=True))
        if memory > job["memory"]:
            return "memory"
        if len(pids) > job["processes"] + 2:  # the mechanism has up to two processes
            return "processes"
        if written > _REWRITES * job["disk"] or deleted + _size(root, job["disk"] - deleted) > job["disk"]:
            return "disk"
    return "exit" if program in ready else "stopped"


def _descendants(pid: int) -> Iterator[int]:
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
                waiting += map(int, children)
                yield from map(int, children)


def _usage(pid: int) -> tuple[int, int, int]:
    """A process's memory, the size of the deleted files that it has open, and its disk writes, all in bytes."""
    memory = deleted = written = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith((b"RssAnon", b"RssShmem")):
                memory += 1024 * int(line.split()[1])
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            found = os.stat(f"/proc/{pid}/fd/{descriptor}")
            if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                deleted += 512 * found.st_blocks
        counts = dict(line.split(b": ") for line in Path(f"/proc/{pid}/io").read_bytes().splitlines())
        written = int(counts[b"write_bytes"]) - int(counts[b"cancelled_write_bytes"])
    return memory, deleted, written


def _size(folder: Path, enough: int) -> int:
    """Bytes in a directory, counted up to `enough`. An unreadable directory counts as full."""
    size, waiting = 0, [str(folder)]
    while waiting and size <= enough:
        try:
            if len(path := waiting.pop()) > _LONGEST_PATH:
                return enough + 1
            with os.scandir(path) as entries:
                for entry in entries:
                    size += _ENTRY_BYTES + 512 * entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except FileNotFoundError:  # deleted in the meantime
            continue
        except OSError:  # unreadable, or too deep
            return enough + 1
    return size


def _kill_all() -> None:
    """Kills all descendants, including those forked in the meantime."""
    while pids := list(_descendants(os.getpid())):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _remove(root: Path) -> None:
    """Deletes a directory of any depth, which `shutil.rmtree` can't."""
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*command, str(root)], stderr=subprocess.DEVNULL, check=False)


def _environment(scratch: Path) -> dict[str, str]:
    paths = {"HOME": str(scratch), "TMPDIR": str(scratch), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return {**paths, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _filter(names: Iterable[str], families: tuple[int, ...]) -> bytes:
    """A seccomp filter that rejects system calls, sockets of other families, and limits of other processes."""
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    architecture = (0xC000003E, 0xC00000B7)[column]
    rules = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
    rules += [(0x35, 0, 1, 0x40000000), _EPERM]  # numbers of x32
    for name in names:
        rules += [(0x15, 0, 1, _KERNEL[name][column]), _EPERM]
    for numbers, allowed in (((302, 261), (0,)), ((41, 198), families)):  # first argument of `prlimit64` and `socket`
        rules += [(0x15, 0, len(allowed) + 3, numbers[column]), (0x20, 0, 0, 16)]
        rules += [(0x15, len(allowed) - i, 0, value) for i, value in enumerate(allowed)] + [_EPERM, _ALLOW]
    return b"".join(struct.pack("HBBI", *rule) for rule in [*rules, _ALLOW])


def _sandlock(job: dict[str, Any], root: Path, libc: Any) -> tuple[int, Callable[[], int]]:
    sys.path.append(job["sandlock"])
    import sandlock

    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: root's programs get no extra privileges
    rules = ctypes.create_string_buffer(code := _filter([], _LOCAL), len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(rules))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "seccomp")
    scratch = root / "scratch"
    readable = [*_SYSTEM, *_DEVICES, "/proc", *job["readable"], str(root / "program")]
    process = sandlock.Sandbox(
        fs_readable=[path for path in readable if os.path.exists(path)],
        fs_writable=[str(scratch), "/dev/null"],
        extra_deny_syscalls=[*_METADATA, *_KERNEL],
        max_memory=4 * job["memory"],  # kills the program without a message, so other limits apply first
        max_processes=job["processes"],
        no_coredump=True,
        clean_env=True,
        env=_environment(scratch),
        cwd=str(scratch),
    ).popen(job["command"])

    def wait() -> int:
        result = process.wait(timeout=5.0)
        killed = result.signal if result.signal > 0 else signal.SIGKILL
        return int(-killed if result.exit_code < 0 else result.exit_code)

    return process.pid, wait


def _bubblewrap(job: dict[str, Any], root: Path, libc: Any) -> tuple[int, Callable[[], int]]:
    scratch, program, shm = (str(root / name) for name in ("scratch", "program", "shm"))
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"]
    for path in (*_SYSTEM, *job["readable"], program):
        options += ["--ro-bind-try", path, path]
    options += ["--proc", "/proc", "--dev", "/dev", "--bind", scratch, scratch, "--bind", shm, "/dev/shm"]
    for path in ("/dev", "/proc", "/"):  # root could write to /proc/sys
        options += ["--remount-ro", path]
    for name, value in _environment(root / "scratch").items():
        options += ["--setenv", name, value]
    with tempfile.TemporaryFile(dir=root) as rules:
        rules.write(_filter(_KERNEL, _SEPARATE))
        rules.seek(0)
        options += ["--seccomp", str(rules.fileno()), "--chdir", scratch, "--"]
        command = [job["bubblewrap"], *options, *job["command"]]
        process = subprocess.Popen(command, pass_fds=[rules.fileno()], env={})
    return process.pid, process.wait


_MECHANISMS = {"sandlock": _sandlock, "bubblewrap": _bubblewrap}

if __name__ == "__main__":
    main()

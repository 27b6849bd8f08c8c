"""Programs that try to leave the sandbox, to outlive it, or to hang it: by each mechanism that works here."""

# ruff: noqa: E501 - a program per line

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.rewards import sandbox as module
from lightrl.rewards.sandbox import Sandbox, mechanism
from tests.rewards.conftest import need_sandbox

need_sandbox(allow_module_level=True)

WORKING = [name for name, place in module.mechanisms().items() if place and module._trial(name, place) is None]


@pytest.fixture(scope="module", params=WORKING)
def box(request: pytest.FixtureRequest) -> Sandbox:
    sandbox = Sandbox(timeout=8.0, memory_mib=256, max_processes=16, disk_mib=16, output_kib=8)
    sandbox._mechanism = (request.param, str(module.mechanisms()[request.param]))
    return sandbox


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a program must not reach: servers, a secret file, and this process."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text("the secret")
    reached: list[str] = []
    servers = []
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, str(folder / "server")),
        (socket.AF_UNIX, f"\0lightrl-{os.getpid()}"),
    ):
        server = socket.socket(family)
        server.bind(address)
        server.listen()
        servers.append(server)

        def serve(server: socket.socket = server) -> None:
            try:
                while True:
                    server.accept()
                    reached.append(str(server))
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    udp.setblocking(False)
    os.environ["WANDB_API_KEY"] = "the secret"
    yield {
        "folder": str(folder),
        "port": servers[0].getsockname()[1],
        "udp": udp.getsockname()[1],
        "abstract": servers[2].getsockname().decode(),
        "pid": os.getpid(),
    }
    del os.environ["WANDB_API_KEY"]
    assert not reached
    with pytest.raises(BlockingIOError):
        udp.recv(1)
    for server in (*servers, udp):
        server.shutdown(socket.SHUT_RDWR) if server is not udp else None
        server.close()
    assert sorted(os.listdir(folder)) == ["secret", "server"]
    status = (folder / "secret").stat()
    assert (status.st_mode & 0o777, (folder / "secret").read_text()) == (0o600, "the secret")
    assert status.st_mtime == 1.0 and not os.listxattr(folder / "secret")


ESCAPES = {
    "tcp": "socket.create_connection(('127.0.0.1', {port}), 1)",
    "tcp fast open": "print(socket.socket().sendto(b'x', 0x20000000, ('127.0.0.1', {port})))",
    "tcp fast open in a message": "print(socket.socket().sendmsg([b'x'], [], 0x20000000, ('127.0.0.1', {port})))",
    "multipath tcp": "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262).connect(('127.0.0.1', {port}))",
    "udp": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp})); raise OSError('see below')",
    "unix socket": "socket.socket(socket.AF_UNIX).connect('{folder}/server')",
    "abstract socket": "socket.socket(socket.AF_UNIX).connect({abstract!r})",
    "raw socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "hypervisor": "socket.socket(40).connect((2, 9999))",
    "listen": "s = socket.socket(); s.bind(('0.0.0.0', {port})); s.listen(); assert 0",
    "read": "open('{folder}/secret').read()",
    "write": "open('{folder}/new', 'w')",
    "write the installation": "open(os.path.join(sys.prefix, 'new'), 'w')",
    "write the system": "open('/usr/new', 'w')",
    "home": "assert os.listdir(os.path.expanduser('~root')) and os.listdir('/home')",
    "symlink": "os.symlink('{folder}/secret', 'link'); open('link').read()",
    "symlink of a folder": "os.symlink('{folder}', 'links'); open('links/new', 'w')",
    "hard link": "os.link('{folder}/secret', 'hard'); open('hard').read()",
    "descriptor of a folder": "os.open('secret', os.O_RDONLY, dir_fd=os.open('{folder}', os.O_PATH))",
    "up": "open('../../' * 20 + '{folder}/secret')",
    "root of a process": "open('/proc/self/root{folder}/secret')",
    "mode": "os.chmod('{folder}/secret', 0o777)",
    "mode by number": "assert ctypes.CDLL(None).syscall(452, -100, b'{folder}/secret', 0o777, 0) == 0",
    "owner": "os.chown('{folder}/secret', 1, 1)",
    "time": "os.utime('{folder}/secret')",
    "attribute": "os.setxattr('{folder}/secret', 'user.x', b'1')",
    "delete": "os.unlink('{folder}/secret')",
    "rename": "os.rename('{folder}/secret', '{folder}/new')",
    "device": "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0)); open('disk')",
    "memory device": "open('/dev/mem')",
    "kernel settings": "open('/proc/sys/kernel/core_pattern', 'w')",
    "environment of the trainer": "assert b'secret' in open('/proc/{pid}/environ', 'rb').read()",
    "memory of the trainer": "open('/proc/{pid}/mem', 'rb').read(0)",
    "descriptors of the trainer": "assert 'lightrl' in open('/proc/{pid}/cmdline').read() + str(os.listdir('/proc/{pid}/fd'))",
    "environment of the parent": "assert any(b'KEY' in open(f'/proc/{{n}}/environ', 'rb').read() for n in [os.environ['ABOVE'], 'self'])",
    "own environment": "assert any('KEY' in name for name in os.environ)",
    "inherited descriptors": "assert len(os.listdir('/proc/self/fd')) > 4",
    "signal": "os.kill({pid}, 0); os.kill({pid}, 9)",
    "signal by queue": "b = (ctypes.c_int * 32)(18, 0, -1); assert ctypes.CDLL(None).syscall(129, {pid}, 18, b) == 0",
    "signal by descriptor": "import signal; signal.pidfd_send_signal(os.pidfd_open({pid}), 18)",
    "descriptor of the trainer": "assert ctypes.CDLL(None).syscall(438, os.pidfd_open({pid}), 1, 0) >= 0",
    "ring": "assert ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(256)) >= 0",
    "unix socket by name": "os.symlink('{folder}/server', 'name'); socket.socket(socket.AF_UNIX).connect('name')",
    "unix socket from its folder": "os.chdir('{folder}'); socket.socket(socket.AF_UNIX).connect('server')",
    "signal to the parent": "above = int(os.environ['ABOVE']); os.kill(above, 9); os.kill(above, 0); raise SystemExit('it lives')",
    "ptrace": "assert ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0",
    "ptrace of the parent": "assert ctypes.CDLL(None).ptrace(16, int(os.environ['ABOVE']), 0, 0) == 0",
    "process memory": "assert ctypes.CDLL(None, use_errno=True).syscall(310, {pid}, 0, 0, 0, 0, 0) == 0",
    "keys of the kernel": "assert ctypes.CDLL(None).syscall(250, 0, -5, 0) > 0",
    "mount": "assert ctypes.CDLL(None).mount(b'x', os.getcwd().encode(), b'tmpfs', 0, None) == 0",
    "namespace": "assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "other root": "os.chroot('.')",
    "clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "priority": "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "limits of the trainer": "resource.prlimit({pid}, resource.RLIMIT_NOFILE, (0, 0))",
    "higher limits": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); assert resource.getrlimit(resource.RLIMIT_AS) == (-1, -1)",
    "memory file": "os.memfd_create('x')",
    "message queue": "assert ctypes.CDLL(None).syscall(240, b'lightrl', 0o102, 0o600, 0) >= 0",
    "names of files": "n = ctypes.CDLL(None); assert n.inotify_add_watch(n.inotify_init(), b'{folder}', 0x100) >= 0",
    "file by handle": "assert ctypes.CDLL(None, use_errno=True).syscall(304, -100, b'x' * 64, 0) >= 0",
    "accesses of files": "n = ctypes.CDLL(None); d = n.syscall(300, 0x200, 0); assert d >= 0 and n.syscall(301, d, 1, ctypes.c_ulong(0x8000020), -100, b'{folder}') == 0",
    "fast allocation": "os.posix_fallocate(os.open('allocated', os.O_CREAT | os.O_RDWR), 0, 4096)",
    "shared memory": "assert ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) >= 0",
}
HEAD = "import ctypes, os, resource, socket, stat, sys, time\ntry:\n    {}\nexcept BaseException as error:\n    print('held', repr(error))\nelse:\n    print('ESCAPED')\n"


def test_a_program_reaches_nothing_outside(box: Sandbox, outside: dict[str, Any]) -> None:
    secret = Path(outside["folder"], "secret")
    secret.chmod(0o600)
    os.utime(secret, (1.0, 1.0))
    programs = {name: HEAD.format(code.format(**outside)) for name, code in ESCAPES.items()}
    script = "import os, subprocess, sys\nos.environ['ABOVE'] = str(os.getppid())\nfor name, code in PROGRAMS.items():\n    r = subprocess.run([sys.executable, '-I', '-S', '-c', code], stdin=0, capture_output=True, text=True)\n    print(name, '|', r.stdout.strip(), r.stderr.strip()[-100:])\n"
    box.timeout = 60.0
    result = box.run_python(f"PROGRAMS = {programs!r}\n{script}")
    lines = result.stdout.splitlines()
    assert result.reason == "exit" and len(lines) == len(ESCAPES), result
    assert [line for line in lines if "| held" not in line] == []


WHILE = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        {}\n    os._exit(0)\n"
HIDDEN = """import ctypes, os, socket, time
L = ctypes.CDLL(None)
L.mmap.restype = ctypes.c_void_p
a, b = socket.socketpair()
for i in range(40):
    f = os.open('f', os.O_CREAT | os.O_RDWR)
    os.write(f, b'x' * (10 << 20))
    {}
    os.unlink('f')
    os.close(f)
time.sleep(60)
"""
ON_DISK = subprocess.run(["stat", "-fc", "%T", tempfile.gettempdir()], capture_output=True).stdout != b"tmpfs\n"
LIMITS = {
    "sleep": ("import time; time.sleep(100)", "timeout"),
    "memory": ("x = []\nwhile True: x.append(b'1' * (10 << 20))", "MemoryError"),
    "memory of many": ("import os, time\nfor i in range(6):\n    if os.fork() == 0:\n        x = b'1' * (60 << 20)\n        time.sleep(60)\ntime.sleep(60)", "memory"),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout processes memory"),  # whichever comes first
    "one file": ("open('x', 'wb').write(b'1' * (20 << 20))", "disk"),
    "files that only a socket has": (HIDDEN.format("socket.send_fds(a, [b'x'], [f])"), "disk"),
    "files that are only mapped": (HIDDEN.format("L.mmap(None, ctypes.c_size_t(4096), 1, 1, f, ctypes.c_long(0))"), "disk"),
    "deep folders": ("import os, time\nfor i in range(2000): os.mkdir('d'); os.chdir('d')\ntime.sleep(60)", "disk"),
    "output": ("while True: print('1' * 1000)", "output"),
    "10 GB of errors": ("import os\nx = b'1' * (1 << 20)\nfor i in range(10_000): os.write(2, x)", "output"),
    "daemon": (WHILE.format("time.sleep(77)") + "print('done')", "exit"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_a_program_ends_at_its_limits_and_leaves_nothing(box: Sandbox, name: str) -> None:
    code, reason = LIMITS[name]
    if not ON_DISK and "only" in name:
        pytest.skip("the kernel counts no writes to tmpfs")
    box.timeout = 1.0 if "timeout" in reason else 8.0
    start = time.monotonic()
    result = box.run_python(code)
    seconds = time.monotonic() - start
    assert {*reason.split()} & {result.reason, *result.stderr.split()} or (
        reason == "disk" and "too large" in result.stderr
    ), result
    assert seconds < box.timeout + 4.0
    assert len(result.stdout) + len(result.stderr) <= 8 * 1024
    assert name.startswith("daemon") == (result.stdout == "done\n")
    assert not _running()


def test_nothing_outlives_the_trainer() -> None:
    program = "from lightrl.rewards import Sandbox\nSandbox(timeout=300).run_python('print(end=chr(0)); import time; time.sleep(299)')"
    with subprocess.Popen([sys.executable, "-c", program]) as trainer:
        deadline = time.monotonic() + 60
        while not _running() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _running()
        trainer.kill()
    while _running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running()


def _running() -> bool:
    """Whether a program runs that is not that of another test process."""
    lines = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    table = {
        int(pid): (int(parent), args) for pid, parent, args in (line.split(None, 2) for line in lines.splitlines())
    }

    def ancestors(pid: int) -> Iterator[int]:
        while pid in table:
            yield pid
            pid = table[pid][0]

    programs = [set(ancestors(pid)) for pid, (_, args) in table.items() if "program/main.py" in args]
    return any(os.getpid() in above or os.getppid() not in above for above in programs)


def test_without_a_mechanism_it_refuses_and_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for places in ({"bubblewrap": None, "sandlock": None}, {"bubblewrap": "/bin/false", "sandlock": "/nowhere"}):
        monkeypatch.setattr(module, "mechanisms", lambda places=places: places)
        mechanism.cache_clear()
        with pytest.raises(ValueError, match=r"apt install bubblewrap.*lightrl-llm\[sandbox\]"):
            Sandbox()
    mechanism.cache_clear()


@pytest.mark.parametrize("python", ["/bin/sh", "sh", "python/bin/sh"])
def test_another_interpreter_opens_no_more_than_its_installation(
    box: Sandbox, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("the secret")
    (tmp_path / "data").write_text("some data")
    (tmp_path / "python" / "bin").mkdir(parents=True)
    (tmp_path / "python" / "bin" / "sh").symlink_to("/bin/sh")
    monkeypatch.chdir(tmp_path)
    sandbox = Sandbox(python=python, readable=["data"])
    sandbox._mechanism = box._mechanism
    result = sandbox.run_bash(f"cat {tmp_path}/data {tmp_path}/secret; {sandbox.python} -c 'echo; echo ran'")
    assert result.stdout == "some data\nran\n", result


def test_scripts_read_stdin_and_report_how_they_ended() -> None:
    result = Sandbox(timeout=10).run_bash("tr a-z A-Z; echo oops >&2; exit 3", "some text")
    assert (result.stdout, result.stderr, result.exit_code, result.reason) == ("SOME TEXT", "oops\n", 3, "exit")
    assert Sandbox().run_python("import os; os.kill(os.getpid(), 11)").exit_code in (-11, 139)

"""Worker process that runs trajectories with a program's function: `python child.py PROGRAM`.

Imports the program once. Each trajectory runs in a fork with the modules, environment variables, and working directory
after the import, and is killed with its children at the end. If the import started threads or uses a GPU, which forks
don't support, the process itself runs one trajectory and exits.

Reads a line per trajectory from stdin: the directory with its `call.json`. Writes `log` and `result.json` there. Writes
"ready" and then an exit code per trajectory to stdout. Exits when stdin ends. Runs as a script and imports nothing from
LightRL.
"""

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

sys.path.pop(0)  # the directory of this file
PR_SET_CHILD_SUBREAPER = 36


def _end_with(stream: IO[bytes]) -> None:
    """Kills this process and its children when the stream ends."""
    stream.read()
    _sweep()
    os.killpg(0, signal.SIGKILL)


def _load(run: str) -> Any:
    place, _, name = run.rpartition(":")
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return getattr(importlib.import_module(place), name)
    path = Path(place).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _play(function: Any, folder: Path, lifeline: IO[bytes]) -> None:
    """Calls the function, writes its result to the directory, and exits."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    for name in ("numpy.random", "torch"):  # forks would share their seeds; Python's `random` reseeds itself
        if name in sys.modules:
            sys.modules[name].seed()
    call = json.loads((folder / "call.json").read_text())
    os.environ.update(call["env"])

    async def awaited(reward: Any) -> Any:
        return await reward

    try:
        reward = function(call["row"], call["base_url"], call["api_key"])
        if inspect.isawaitable(reward):
            reward = asyncio.run(awaited(reward))
        written = json.dumps({"reward": reward}, default=float)  # NumPy's numbers and tensors
    except BaseException as error:  # including SystemExit
        traceback.print_exc()
        written = json.dumps({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / "part").write_text(written)
    (folder / "part").replace(folder / "result.json")
    _sweep()
    os._exit(0)  # skips the program's threads and exit handlers, because the run waits for this process


def _fork(function: Any, folder: Path, calls: IO[bytes], parent: int) -> int:
    """Runs a trajectory in a fork and returns its exit code. Kills it if `calls` ends or the parent exits."""
    before = _children()
    there, here = os.pipe()  # closed when this process exits
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        os.close(here)
        os.setpgid(0, 0)
        _play(function, folder, os.fdopen(there, "rb"))
    os.close(there)
    while os.getppid() == parent and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if select.select([calls], [], [], 0.02)[0]:
            break
    with contextlib.suppress(OSError):  # exited, or has no group yet
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(here)
    _sweep(before)  # kills adopted processes that left its group
    return code


def _children() -> set[int]:
    found = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= set(map(int, file.read_text().split()))
    return found


def _sweep(spared: Collection[int] = ()) -> None:
    """Kills child processes, and their children after adopting them."""
    for _ in range(200):  # gives up on processes that can't be killed
        left = _children() - {*spared}
        for one in left:
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)
                os.waitpid(one, os.WNOHANG)
        if not left:
            break
        time.sleep(0.005)


def _forks() -> bool:
    """Whether forking is safe: the import started no threads and no GPU context."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return threading.active_count() == 1 and not (cuda is not None and cuda.is_initialized())


def main(run: str) -> None:
    """Runs trajectories with `file.py:function` or `package.module:function` until the input ends."""
    parent = os.getppid()
    calls, answers = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "w")  # not inherited by programs
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    function = _load(run)
    print("ready", file=answers, flush=True)
    while os.getppid() == parent:
        if not select.select([calls], [], [], 5)[0]:
            continue
        if not (folder := calls.readline().decode().rstrip("\n")):
            break
        if not _forks():
            _play(function, Path(folder), calls)
        print(_fork(function, Path(folder), calls, parent), file=answers, flush=True)
    _sweep()  # processes started by the import
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])

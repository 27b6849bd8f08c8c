"""Runs a program's function in this process: `python child.py PROGRAM RESULT`.

The call is a line of JSON on standard input, which stays open as long as the run lives. The file is run by its path, so
it imports nothing of ours.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

sys.path.pop(0)  # the folder of this file


def _end_with(stream: IO[bytes]) -> None:
    """Kills this process and its children when the run that started them is gone."""
    stream.read()
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


def main(run: str, result_path: str) -> None:
    """Calls the function of `file.py:function` once, and writes its reward to a file."""
    lifeline = os.fdopen(os.dup(0), "rb")  # not inherited by the program's children
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    call = json.loads(lifeline.readline())
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()

    async def awaited(reward: Any) -> Any:
        return await reward

    try:
        reward = _load(run)(call["row"], call["base_url"], call["api_key"])
        if inspect.isawaitable(reward):
            reward = asyncio.run(awaited(reward))
        written = json.dumps({"reward": reward})
    except BaseException as error:  # SystemExit included: a program that leaves has not answered
        traceback.print_exc()
        written = json.dumps({"error": f"{type(error).__name__}: {error}"})
    sys.stdout.flush()
    sys.stderr.flush()
    part = Path(f"{result_path}.part")
    part.write_text(written)
    part.replace(result_path)
    os._exit(0)  # a program's threads and exit handlers would keep the process, and the run waits for its end


if __name__ == "__main__":
    main(*sys.argv[1:])

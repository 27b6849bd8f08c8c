"""A program in a process of its own that is killed at the phase that its row names, once."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def main(row: dict[str, Any], base_url: str, api_key: str) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # would live on
    folder = Path(os.environ["KILLED_FOLDER"])
    (folder / f"pids-{os.getpid()}").write_text(f"{os.getpid()} {child.pid}")

    def at(phase: str) -> None:
        try:
            if phase == row["word"]:
                (folder / phase).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass

    at("start")
    connection = http.client.HTTPConnection(urlsplit(base_url).netloc)
    said: list[Any] = [{"role": "user", "content": row["prompt"]}]
    reward = 0.0
    for _ in range(2):
        headers = {"authorization": f"Bearer {api_key}"}
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": said}), headers)
        at("asking")
        reply = json.load(connection.getresponse())["choices"][0]["message"]["content"]
        reward += len(reply) / 10
        said += [{"role": "assistant", "content": reply}, {"role": "user", "content": "again"}]
        at("between turns")
    at("end")
    return reward

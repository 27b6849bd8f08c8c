"""A program that takes notes of its imports, and leaves everything of its process changed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import openai

NOTES = Path(os.environ["NOTES"])
with NOTES.open("a") as file:
    file.write(f"import {os.getpid()}\n")
if os.environ.get("THREAD"):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
CLIENT = openai.OpenAI()  # by the environment of the import
SAID: list[Any] = []


def main(row: dict[str, Any], base_url: str, api_key: str) -> float:
    clean = not SAID and "LEFT" not in os.environ and os.getcwd() != "/" and os.environ["OPENAI_API_KEY"] == api_key
    for key in (None, api_key):
        client = CLIENT if key is None else openai.OpenAI(base_url=base_url, api_key=key)
        SAID.append({"role": "user", "content": f"Hello {len(SAID)}"})
        client.chat.completions.create(model="m", messages=SAID[-1:])
    with NOTES.open("a") as file:
        file.write(f"draw {numpy.random.randint(1 << 60)}\n")
    os.environ["LEFT"] = "1"
    os.chdir("/")
    if row.get("child"):  # in a session, and so a group, of its own
        code = "import time; time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        with NOTES.open("a") as file:
            file.write(f"attempt {os.getpid()}\nchild {child.pid}\n")
    if row.get("die"):
        os.kill(os.getpid(), 9)
    if row.get("sleep"):
        time.sleep(600)
    return float(clean)

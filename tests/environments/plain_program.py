"""A program that asks by the standard library alone, for one turn, and then does what the row says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


def once(row: dict[str, Any], base_url: str, api_key: str) -> float | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Add 1 and 2."}]}
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        json.load(answer)
    if row.get("raise"):
        raise RuntimeError("no such file")
    if row.get("children"):  # a child that would live on
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(row["children"]).write_text(f"{os.getpid()} {child.pid}")
    if row.get("die"):
        os.kill(os.getpid(), 9)
    if row.get("sleep"):
        time.sleep(row["sleep"])
    return 0.5

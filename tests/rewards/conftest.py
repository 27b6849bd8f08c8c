"""A scoring server in a process of its own, on a real loopback socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.ports import held_port

START = "import sys, json; from lightrl.rewards.server import serve_reward; serve_reward(**json.loads(sys.argv[1]))"


class Server:
    """Starts, kills and restarts `serve_reward` at one port."""

    def __init__(self, function: str, token: str | None = None, **arguments) -> None:
        self.holder = held_port()
        self.port = self.holder.getsockname()[1]
        self.arguments = {"reward": f"{Path(__file__).with_name('served.py')}:{function}", **arguments}
        self.token, self.process = token, None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/score"

    @property
    def health(self) -> dict:
        return httpx.get(self.url.replace("score", "health"), trust_env=False, timeout=60).json()

    def start(self) -> Server:
        environment = {key: value for key, value in os.environ.items() if key != "LIGHTRL_REWARD_TOKEN"}
        if self.token is not None:
            environment["LIGHTRL_REWARD_TOKEN"] = self.token
        command = [sys.executable, "-c", START, json.dumps({"port": self.port, **self.arguments})]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 200
        while time.monotonic() < end:
            assert self.process.poll() is None, "the server ended at its start"
            try:
                assert self.health["status"] == "ok"
                return self
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def serve():
    """`serve("function", token=...)` -> a started server; all are killed at the end of the file."""
    servers = []

    def start(function: str, token: str | None = None, **arguments) -> Server:
        servers.append(Server(function, token, **arguments))
        return servers[-1].start()

    yield start
    for server in servers:
        server.kill()
        server.holder.close()

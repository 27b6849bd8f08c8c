"""Servers on real loopback sockets, in this process and in one of their own, and what a scorer makes of completions."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from lightrl.rewards import RewardScorer
from lightrl.rewards.sandbox import mechanism
from tests.ports import held_port

START = "import sys, json; from lightrl.rewards.server import serve_reward; serve_reward(**json.loads(sys.argv[1]))"


def scored(reward, completions, group_ids=None, *, prompts=None, completion_ids=None, media=None, **columns):
    """What a scorer of one function makes of completions; without `group_ids`, each has a prompt of its own."""
    scorer, n = RewardScorer([reward]), len(completions)
    groups = list(range(n)) if group_ids is None else group_ids
    rows = {"prompts": prompts or ["pp"] * n, "completion_ids": completion_ids or [[1]] * n, "group_ids": groups}
    try:
        return scorer.submit(completions=completions, columns=columns, media=media, **rows).result(60)
    finally:
        scorer.close()


def need_sandbox(**where):
    """Skips the test, or with `allow_module_level` the file, where no code can be confined."""
    try:
        mechanism()
    except ValueError as error:
        pytest.skip(str(error), **where)


class Loopback:
    """A server in this process that keeps requests. `answer(body)`: a status with JSON or bytes, or None to hang up."""

    path = "/score"

    def __init__(self) -> None:
        self.bodies, self.headers = [], []
        self.sent = {}  # headers of answers
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.headers.append(dict(self.headers))
                if (answer := outer.answer(body)) is None:
                    self.close_connection = True
                    return
                status, said = answer
                data = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                for name, value in {**outer.sent, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}{self.path}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


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

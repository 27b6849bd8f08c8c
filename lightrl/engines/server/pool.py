"""Several inference servers: connections, checks before a model is loaded, and the choice of a server per request."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightrl.checkpoints.redaction import remember_secret
from lightrl.compat.arguments import bearer_token
from lightrl.engines.background import BackgroundLoop, all_of
from lightrl.engines.base import EngineDiedError, StaleWeightsError
from lightrl.engines.server.client import Server, ServerError, ServerLostError
from lightrl.engines.server.protocols import ServerProtocol

log = logging.getLogger(__name__)

API_KEY = "LIGHTRL_SERVER_API_KEY"
"""Environment variable of the servers' API key."""

RETRIES = 3
"""Maximum number of times a request is retried after an error from a healthy server."""

MAX_ABORTED = 100
"""Maximum number of times a request is retried because a server died, received new weights, or aborted it."""

_PROBES = ("12 + 34 = 46", "The quick brown fox.", "def f(x):\n    return x")  # distinguish tokenizers

T = TypeVar("T")


@dataclass(eq=False)
class ServerPool:
    """Servers, and the event loop that runs their requests. See `ServerEngine` for most arguments.

    Error messages name the class `owner`.
    """

    owner: str
    urls: list[str]
    protocol: ServerProtocol
    model: str | None
    api_key: str | None
    timeout: float
    progress_timeout: float | None
    start_timeout: float
    pushes: bool  # weights are pushed to the servers
    servers: list[Server] = field(default_factory=list, init=False)  # in order of preference; empty until `open`
    loop: BackgroundLoop = field(default_factory=lambda: BackgroundLoop("lightrl-servers"), init=False)
    token: str | None = field(default=None, init=False)  # name of the current weights; None for fixed ones
    _pushed: asyncio.Event = field(init=False)  # cleared during a push

    def __post_init__(self) -> None:
        self._key()

    def _key(self) -> str | None:
        key = self.api_key or os.environ.get(API_KEY)
        remember_secret(key or "")  # servers may include it in responses
        return bearer_token(f"The key in {self.owner}.api_key or ${API_KEY}", key)

    def open(self, tokenizer: str) -> None:
        """Waits for servers that are still starting, and checks each. Does nothing if called again.

        Raises a ValueError if a server is unreachable, incompatible, or has another tokenizer than this directory or
        ID.
        """
        if self.loop.started:
            return
        headers = {"Authorization": f"Bearer {key}"} if (key := self._key()) else {}
        self.token = "" if self.pushes else None
        self._pushed = asyncio.Event()
        self._pushed.set()
        try:
            self.loop.run(self._meet(headers, tokenizer))
        except BaseException:
            self.close()
            raise

    async def _meet(self, headers: dict[str, str], tokenizer: str) -> None:
        path = self.protocol.alive_path
        self.servers = [Server(url, headers, self.timeout, self.progress_timeout, path) for url in self.urls]
        deadline, told = time.monotonic() + self.start_timeout, False
        while missing := [server for server in self.servers if not await server.healthy()]:
            names = ", ".join(server.url for server in missing)
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{self.owner}.start_timeout={self.start_timeout:g}: no healthy server at {names} after that many "
                    f"seconds. Start it as in docs/generation.md, correct {self.owner}.urls, or check the server's log."
                )
            if not told:
                log.warning("Waiting for %s.", names)
                told = True
            await asyncio.sleep(min(1.0, self.start_timeout / 4))
        for server in self.servers:
            await server.revive()
            try:
                await self.protocol.look_at(server, self.model, pushes=self.pushes)
                await self._check_tokenizer(server, tokenizer)
            except ServerError as error:
                fix = f" Set {API_KEY} or {self.owner}.api_key to its key." if error.status == 401 else ""
                raise ValueError(
                    f"{error}.{fix} Check {self.owner}.kind. Start the server as in docs/generation.md."
                ) from error

    async def _check_tokenizer(self, server: Server, path: str) -> None:
        """Raises a ValueError if the server reports other token IDs than the tokenizer at `path`."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        for text in _PROBES:
            theirs = await self.protocol.tokenize(server, text)
            ours = tokenizer.encode(text, add_special_tokens=False)
            if theirs is not None and theirs != ours:
                raise ValueError(
                    f"{server.url} uses a different tokenizer than {path}: {text!r} is {theirs} there and {ours} here. "
                    "Start it with the policy's model and tokenizer."
                )

    def ready(self) -> list[Server]:
        """Returns the live servers that hold the current weights.

        Raises an EngineDiedError if all servers died, and a StaleWeightsError if no live one has the current weights.
        """
        ready = [server for server in self.servers if server.lost is None and server.loaded == self.token]
        if ready:
            return ready
        states = "; ".join(f"{s.url}: {s.lost or 'alive, with different weights'}" for s in self.servers)
        if all(server.lost is not None for server in self.servers):
            raise EngineDiedError(f"All servers are down. {states}. Restart them and resume the run.")
        raise StaleWeightsError(f"No live server has the policy's weights. {states}.")

    async def ask(self, name: str, work: Callable[[Server], Awaitable[T | None]]) -> T:
        """Runs `work` on the ready server with the fewest pending requests. Retries it after errors.

        It is also retried if it returns None. Messages call the request `name`.
        """
        refused: list[Server] = []
        for _ in range(MAX_ABORTED):
            await self._pushed.wait()
            server = min(self.ready(), key=lambda s: (s in refused, s.pending))
            try:
                if (answer := await work(server)) is not None:
                    return answer
            except ServerLostError:
                continue
            except ServerError as error:
                if error.status < 500:
                    raise ValueError(f"{error}. The server rejects {name} or its settings.") from error
                refused.append(server)
                if len(refused) > RETRIES:
                    raise
                log.warning("%s Retrying %s.", error, name)
        raise ServerError(server.url, "", 502, f"{MAX_ABORTED} attempts of {name} were aborted.")

    async def begin_push(self) -> None:
        """Holds back new requests and checks which servers are healthy."""
        self._pushed.clear()
        await all_of(server.revive() for server in self.servers)

    async def end_push(self, token: str, urls: Sequence[str]) -> None:
        """Marks the servers at `urls` as loaded with the weights `token` and resumes waiting requests."""
        self.token = token
        for server in self.servers:
            usable = server.url in urls and (server.lost is None or await server.revive())
            server.loaded = token if usable else None
        self._pushed.set()

    def close(self) -> None:
        """Disconnects from the servers, which keep running."""
        if self.loop.started:
            for server in self.servers:
                self.loop.run(server.close())
            self.loop.close()

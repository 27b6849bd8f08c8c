"""The connection of an engine or a teacher to its servers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from lightrl.checkpoints.redaction import remember_secret
from lightrl.compat.arguments import above, at_least, bearer_token, one_of
from lightrl.engines.background import BackgroundLoop
from lightrl.engines.server.http import Server, ServerError
from lightrl.engines.server.protocols import PROTOCOLS

log = logging.getLogger(__name__)

API_KEY = "LIGHTRL_SERVER_API_KEY"
"""Environment variable with the servers' key."""


@dataclass(eq=False)
class Connection:
    """The servers at some addresses, and the event loop in which they are asked.

    Args:
        owner: class whose arguments the others are (see `ServerEngine`), for messages.

    Attributes:
        servers: none until `open`.
        loop: where requests run; None while closed.

    Raises:
        ValueError: an argument is out of range.
    """

    owner: str
    urls: list[str]
    kind: str
    api_key: str | None
    timeout: float
    progress_timeout: float | None
    start_timeout: float
    servers: list[Server] = field(default_factory=list, init=False)
    loop: BackgroundLoop | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.urls or len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(f"{self.owner}.urls={self.urls}: name at least one server, each once.")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{self.owner}.urls={url!r}: must start with http:// or https://.")
        self.protocol = PROTOCOLS[one_of(f"{self.owner}.kind", self.kind, *PROTOCOLS)]()
        above(f"{self.owner}.timeout", self.timeout)
        at_least(f"{self.owner}.start_timeout", self.start_timeout, 0)
        above(f"{self.owner}.progress_timeout", self.progress_timeout, or_none="for no limit")
        self._key()

    def open(self, look_at: Callable[[Server], Awaitable[Any]]) -> None:
        """Waits for servers that are still starting, and looks at each.

        Args:
            look_at: fills in a server's `facts`, and refuses it with a ValueError.

        Raises:
            ValueError: a server cannot be reached, or is refused.
        """
        headers = {"Authorization": f"Bearer {key}"} if (key := self._key()) else {}
        self.servers = [Server(url, headers, self.timeout, self.progress_timeout) for url in self.urls]
        self.loop = BackgroundLoop("lightrl-servers")
        try:
            self.loop.run(self._meet(look_at))
        except BaseException:
            self.close()
            raise

    def _key(self) -> str | None:
        key = self.api_key or os.environ.get(API_KEY)
        remember_secret(key or "")  # a server may quote it
        return bearer_token(f"The key in {self.owner}.api_key or ${API_KEY}", key)

    async def _meet(self, look_at: Callable[[Server], Awaitable[Any]]) -> None:
        deadline, told = time.monotonic() + self.start_timeout, False
        while missing := [server for server in self.servers if not await server.healthy()]:
            names = ", ".join(server.url for server in missing)
            if time.monotonic() > deadline:
                raise ValueError(
                    f"No healthy server at {names} after {self.start_timeout:g} s ({self.owner}.start_timeout). Start "
                    f"it there, correct {self.owner}.urls, or look at its log; docs/scaling.md has the command line."
                )
            if not told:
                log.warning("Waiting for %s.", names)
                told = True
            await asyncio.sleep(min(1.0, self.start_timeout / 4))
        for server in self.servers:
            await server.revive()
            try:
                await look_at(server)
            except ServerError as error:
                way_out = f" Set {API_KEY} or {self.owner}.api_key to its key." if error.status == 401 else ""
                raise ValueError(f"{error}.{way_out} Is it a server of {self.owner}.kind={self.kind!r}?") from error

    def close(self) -> None:
        """Disconnects from the servers, which go on running."""
        loop, self.loop = self.loop, None
        if loop is not None:
            for server in self.servers:
                loop.run(server.close())
            loop.close()

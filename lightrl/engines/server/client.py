"""HTTP client of an inference server.

Requests have no time limit, because the duration of a completion is unknown. Instead, each server's health is polled.
If a server stops responding or makes no progress for too long, all its requests fail.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from typing import Any

import httpx

from lightrl.checkpoints.redaction import redact_text

log = logging.getLogger(__name__)

_KEEPALIVE_SECONDS = 2.0  # uvicorn closes idle connections after 5 s


class ServerError(RuntimeError):
    """Raised if a live server returned an error."""

    def __init__(self, url: str, path: str, status: int, text: str) -> None:
        super().__init__(f"{url}{path} returned {status}: {redact_text(text)[:500]}")
        self.status = status
        self.text = text


class ServerLostError(RuntimeError):
    """Raised if a server stopped responding."""


class Server:
    """A server at a URL without a path. Created and used in the thread of the requests' event loop.

    A healthy server must answer a health check at `alive_path` within `patience` seconds, also while it is paused. It
    counts as lost `progress_timeout` seconds after its last response while requests are pending. None for no limit.
    """

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        patience: float,
        progress_timeout: float | None,
        alive_path: str = "/health",
    ) -> None:
        self.url = url.rstrip("/")
        self.patience = patience
        self.progress_timeout = progress_timeout
        self.alive_path = alive_path
        self.lost: str | None = None  # why it counts as dead
        self.loaded: str | None = None  # token of its weights; None if it must not be used
        self.pending = 0  # pending requests of this process
        self.model = ""  # name of the served model
        self.max_model_len: int | None = None  # maximum sequence length in tokens; None if unknown
        self.dtype: str | None = None  # of the weights; None if unknown
        self.life = (self.url, 0)  # URL and the number of times that the server came back
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_SECONDS)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits)
        self._gone = asyncio.get_running_loop().create_future()  # done while the server is lost
        self._last_progress = 0.0  # time of the last response, or when requests became pending
        self._watch: asyncio.Task[None] | None = None

    async def call(self, method: str, path: str, **arguments: Any) -> Any:
        """Sends a request and returns the decoded response, or None if it is empty or no JSON.

        Raises a ServerError if the live server returned an error or dropped the connection, and a ServerLostError if it
        stopped responding.
        """
        if self.lost is not None:
            raise ServerLostError(f"{self.url}: {self.lost}")
        timeout = httpx.Timeout(None, connect=self.patience)
        if not self.pending:
            self._last_progress = time.monotonic()
        self.pending += 1
        request = asyncio.ensure_future(self._client.request(method, path, timeout=timeout, **arguments))
        try:
            await asyncio.wait({request, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise ServerLostError(f"{self.url}: {self.lost}")
            response = request.result()
            self._last_progress = time.monotonic()
        except httpx.TransportError as error:
            if await self.healthy():  # the server only closed an idle connection
                raise ServerError(self.url, path, 503, f"{type(error).__name__}: {error}") from error
            self.lose(f"{type(error).__name__} {error}".strip())
            raise ServerLostError(f"{self.url}: {self.lost}") from error
        finally:
            self.pending -= 1
            request.cancel()
        if response.status_code >= 300:
            if response.status_code >= 500 and not await self.healthy():
                self.lose(f"{path} returned {response.status_code}: {redact_text(response.text)[:200]}")
                raise ServerLostError(f"{self.url}: {self.lost}")
            raise ServerError(self.url, path, response.status_code, response.text)
        is_json = "json" in response.headers.get("content-type", "")  # SGLang's /flush_cache returns text
        return response.json() if response.content and is_json else None

    async def get(self, path: str, **arguments: Any) -> Any:
        """Sends a GET request."""
        return await self.call("GET", path, **arguments)

    async def post(self, path: str, body: Any = None, **arguments: Any) -> Any:
        """Sends a POST request with a JSON body."""
        return await self.call("POST", path, json=body, **arguments)

    async def healthy(self) -> bool:
        """Returns whether the server is healthy. Retries up to `patience` seconds while the network is down."""
        end = time.monotonic() + self.patience
        while True:
            try:  # httpx's timeout restarts with every byte
                answer = await asyncio.wait_for(self._client.get(self.alive_path, timeout=self.patience), self.patience)
                return answer.status_code in (200, 401)  # the next request names the missing key
            except asyncio.TimeoutError:
                return False
            except httpx.TransportError as error:
                if not _unreachable(error) or time.monotonic() > end:
                    return False
            await asyncio.sleep(0.2)

    def lose(self, reason: str) -> None:
        """Marks the server as dead."""
        if self.lost is None:
            log.warning("Server %s is down (%s).", self.url, reason)
            self._gone.set_result(None)
        self.lost, self.loaded = reason, None

    async def revive(self) -> bool:
        """Checks whether the server is healthy and starts to monitor it. Doesn't change its weights."""
        if not await self.healthy():
            self.lose("does not answer its health check")
            return False
        if self.lost is not None:
            log.warning("Server %s is back. It will be used after the next weight push.", self.url)
            self.life = (self.url, self.life[1] + 1)
            self.lost, self._gone = None, asyncio.get_running_loop().create_future()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._watch_health())
        return True

    async def _watch_health(self) -> None:
        while self.lost is None:
            await asyncio.sleep(self.patience / 6)
            if self.lost is None and not await self.healthy():
                self.lose(f"no healthy response within {self.patience:g} s")
            waited = time.monotonic() - self._last_progress if self.pending else 0.0
            if self.lost is None and self.progress_timeout is not None and waited > self.progress_timeout:
                self.lose(f"no response to any request for {waited:.0f} s (progress_timeout)")

    async def close(self) -> None:
        """Stops monitoring and closes the connections."""
        if self._watch is not None:
            self._watch.cancel()
        await self._client.aclose()


def _unreachable(error: BaseException | None) -> bool:
    """Whether the network failed. A stopped server refuses connections instead."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN):
            return True
        error = error.__cause__
    return False

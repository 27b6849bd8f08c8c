"""HTTP to engine servers, and what is known of each.

A single request has no time limit, since nobody knows how long a good completion takes. What ends it is the server's
death: each server is asked for its health all the time, and all that waits on one that stopped answering, or that
answered nothing but that for too long, fails at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from typing import Any, TypeVar

import httpx

from lightrl.checkpoints.redaction import redact_text

log = logging.getLogger(__name__)

T = TypeVar("T")

_KEEPALIVE_SECONDS = 2.0  # below the 5 s after which uvicorn closes an idle connection


class ServerError(RuntimeError):
    """A server that is alive answered with an error."""

    def __init__(self, url: str, path: str, status: int, text: str) -> None:
        super().__init__(f"{url}{path} answered {status}: {redact_text(text)[:500]}")
        self.status = status
        self.text = text


class ServerLostError(RuntimeError):
    """A server stopped answering."""


class Server:
    """One server. Everything but the constructor runs in the loop's thread.

    Args:
        url: e.g. http://10.0.0.2:8000, without a path.
        headers: sent with every request.
        patience: seconds within which a living server answers that it is healthy.
        progress_timeout: seconds for which it may answer no request while some are outstanding; None for no limit.

    Attributes:
        lost: why the server counts as dead; None while it lives.
        loaded: token of the weights that it holds; None where it must not be used.
        outstanding: groups that it works on for us.
        facts: what the protocol learnt about it.
        life: names the server and how often it came back.
    """

    def __init__(self, url: str, headers: dict[str, str], patience: float, progress_timeout: float | None) -> None:
        self.url = url.rstrip("/")
        self.patience = patience
        self.progress_timeout = progress_timeout
        self.lost: str | None = None
        self.loaded: str | None = None
        self.outstanding = 0
        self.facts: Any = None
        self.life = (self.url, 0)
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_SECONDS)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits)
        self._gone = asyncio.Event()
        self._num_open = 0  # requests without an answer
        self._last_progress = 0.0  # when it last answered one, or had none to answer
        self._watch: asyncio.Task[None] | None = None

    async def call(self, method: str, path: str, **arguments: Any) -> Any:
        """Sends a request and returns the decoded answer; None for an empty one.

        Raises:
            ServerError: the server lives and answered with an error, or dropped the connection.
            ServerLostError: it does not answer any more.
        """
        if self.lost is not None:
            raise ServerLostError(f"{self.url}: {self.lost}")
        timeout = httpx.Timeout(None, connect=self.patience)
        if not self._num_open:
            self._last_progress = time.monotonic()
        self._num_open += 1
        request = asyncio.ensure_future(self._client.request(method, path, timeout=timeout, **arguments))
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({request, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise ServerLostError(f"{self.url}: {self.lost}")
            response = request.result()
            self._last_progress = time.monotonic()
        except httpx.TransportError as error:
            if await self.healthy():  # an idle connection that the server closed, not the server's end
                raise ServerError(self.url, path, 503, f"{type(error).__name__}: {error}") from error
            self.lose(f"{type(error).__name__} {error}".strip())
            raise ServerLostError(f"{self.url}: {self.lost}") from error
        finally:
            self._num_open -= 1
            for task in (request, gone):
                task.cancel()
        if response.status_code >= 300:
            if response.status_code >= 500 and not await self.healthy():
                self.lose(f"{path} answered {response.status_code}: {redact_text(response.text)[:200]}")
                raise ServerLostError(f"{self.url}: {self.lost}")
            raise ServerError(self.url, path, response.status_code, response.text)
        try:
            return response.json() if response.content else None
        except (ValueError, RecursionError) as error:
            raise ServerError(self.url, path, 502, f"a body that is not JSON: {response.text[:200]!r}") from error

    async def get(self, path: str, **arguments: Any) -> Any:
        """GET."""
        return await self.call("GET", path, **arguments)

    async def post(self, path: str, body: Any = None, **arguments: Any) -> Any:
        """POST with a JSON body."""
        return await self.call("POST", path, json=body, **arguments)

    async def healthy(self) -> bool:
        """Whether the server reports that it is healthy; waits as long for a network that is down."""
        end = time.monotonic() + self.patience
        while True:
            try:  # httpx's own limit begins anew with every byte
                answer = await asyncio.wait_for(self._client.get("/health", timeout=self.patience), self.patience)
                return answer.status_code == 200
            except asyncio.TimeoutError:
                return False
            except httpx.TransportError as error:
                if not _unreachable(error) or time.monotonic() > end:
                    return False
            await asyncio.sleep(0.2)

    def lose(self, reason: str) -> None:
        """Marks the server as dead."""
        if self.lost is None:
            log.warning("Server %s is gone (%s).", self.url, reason)
        self.lost, self.loaded = reason, None
        self._gone.set()

    async def revive(self) -> bool:
        """Checks whether the server answers (again), and monitors it from then on. Its weights are not ours yet."""
        if not await self.healthy():
            self.lose("does not answer /health")
            return False
        if self.lost is not None:
            log.warning("Server %s is back; it is used again once it got the weights.", self.url)
            self.life = (self.url, self.life[1] + 1)
        self.lost = None
        self._gone.clear()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._watch_health())
        return True

    async def _watch_health(self) -> None:
        while self.lost is None:
            await asyncio.sleep(self.patience / 6)
            if self.lost is None and not await self.healthy():
                self.lose(f"no healthy answer within {self.patience:g} s")
            waited = time.monotonic() - self._last_progress if self._num_open else 0.0
            if self.lost is None and self.progress_timeout is not None and waited > self.progress_timeout:
                self.lose(f"no answer to any request for {waited:.0f} s (progress_timeout)")

    async def close(self) -> None:
        """Ends the watch and the connections."""
        if self._watch is not None:
            self._watch.cancel()
        await self._client.aclose()


def _unreachable(error: BaseException | None) -> bool:
    """Whether the network failed, and not the server: one that ended refuses connections, which is told at once."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN):
            return True
        error = error.__cause__
    return False

"""HTTP to engine servers, the connection to a set of them, and what is checked before any model is loaded.

A single request has no time limit, since nothing tells how long a good completion takes. What ends it is the server's
death: each server is asked for its health all the time, and all that waits for one that stopped answering, or that
answered no request for too long, fails at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from lightrl.checkpoints.redaction import redact_text, remember_secret
from lightrl.compat.arguments import above, at_least, bearer_token, one_of
from lightrl.engines.background import BackgroundLoop
from lightrl.models.loading import longrope_limit
from lightrl.records import EngineContext

log = logging.getLogger(__name__)

API_KEY = "LIGHTRL_SERVER_API_KEY"
"""Environment variable with the servers' key."""

_KEEPALIVE_SECONDS = 2.0  # below the 5 s after which uvicorn closes an idle connection
_PROBES = ("12 + 34 = 46", "The quick brown fox.", "def f(x):\n    return x")  # that tell tokenizers apart


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
        loaded: token of the weights that it holds; None if it must not be used.
        outstanding: groups that it works on for this process.
        facts: what the protocol learned about it.
        life: address, and how often the server came back.
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
        """Whether the server reports that it is healthy; waits for a network that is down, but not longer than that."""
        end = time.monotonic() + self.patience
        while True:
            try:  # httpx's own limit starts over with every byte
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
            log.warning("Server %s is back; it is used again after the next push of weights.", self.url)
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
    """Whether the network failed, not the server: one that ended refuses connections, which shows at once."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN):
            return True
        error = error.__cause__
    return False


@dataclass(eq=False)
class Connection:
    """The servers at some addresses, and the event loop in which they are asked.

    Args:
        owner: class whose arguments the others are (see `ServerEngine`), for messages.
        protocols: kind -> `ServerProtocol`.

    Attributes:
        servers: none until `open`.
        loop: runs requests; None while closed.

    Raises:
        ValueError: an argument is out of range.
    """

    owner: str
    urls: list[str]
    protocols: Mapping[str, Callable[[], Any]]
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
        self.protocol = self.protocols[one_of(f"{self.owner}.kind", self.kind, *self.protocols)]()
        above(f"{self.owner}.timeout", self.timeout)
        at_least(f"{self.owner}.start_timeout", self.start_timeout, 0)
        above(f"{self.owner}.progress_timeout", self.progress_timeout, or_none="for no limit")
        self._key()

    def open(self, look_at: Callable[[Server], Awaitable[Any]]) -> None:
        """Waits for servers that are still starting, and looks at each.

        Args:
            look_at: fills in a server's `facts`; raises a ValueError for one that does not fit.

        Raises:
            ValueError: a server cannot be reached, or does not fit.
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
                fix = f" Set {API_KEY} or {self.owner}.api_key to its key." if error.status == 401 else ""
                raise ValueError(f"{error}.{fix} Is it a server of {self.owner}.kind={self.kind!r}?") from error

    def close(self) -> None:
        """Disconnects from the servers, which keep running."""
        loop, self.loop = self.loop, None
        if loop is not None:
            for server in self.servers:
                loop.run(server.close())
            loop.close()


async def check_tokenizer(server: Server, protocol: Any, path: str) -> None:
    """Raises a ValueError for a server whose tokenizer, if it can be asked, is not that of `path`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    for text in _PROBES:
        theirs = await protocol.tokenize(server, text)
        ours = tokenizer.encode(text, add_special_tokens=False)
        if theirs is not None and theirs != ours:
            raise ValueError(
                f"{server.url} has another tokenizer than {path}: {text!r} is {theirs} there and {ours} here. Start it "
                "with the policy's model and tokenizer."
            )


def check_length(servers: Sequence[Server], context: EngineContext) -> None:
    """Raises a ValueError for servers that cannot hold the run's longest sequence, or would use other rotary factors.

    Args:
        servers: whose facts are known.
        context: of the run.
    """
    original = longrope_limit(context.model_path)
    for server in servers:
        longest, limit = (context.max_prompt_tokens or 0) + context.max_new_tokens, server.facts.max_model_len
        if limit and longest > limit:
            raise ValueError(
                f"{server.url} holds max_model_len={limit} tokens; the longest prompt with max_new_tokens="
                f"{context.max_new_tokens} needs {longest}. Start it with --max-model-len {longest}."
            )
        if original is not None and limit and (limit > original) != context.long_rope:
            raise ValueError(
                f"actor.long_rope={context.long_rope}: {server.url} holds max_model_len={limit} tokens, and above "
                f"{original} it uses LongRoPE's factors for long sequences. Set long_rope to {not context.long_rope}, "
                "or start it with another --max-model-len."
            )

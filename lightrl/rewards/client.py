"""Rewards that ask a server: JSON over HTTP with repetitions."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Mapping
from typing import Any, Literal

import httpx

from lightrl.checkpoints.redaction import redact_text, remember_secret
from lightrl.compat.arguments import above, at_least, bearer_token, one_of
from lightrl.rewards.base import Reward, RewardError

MOST_ANSWER_BYTES = 64 * 1024 * 1024
"""Of one answer, which is read as a whole."""
log = logging.getLogger(__name__)
_RETRIED_STATUS = frozenset({408, 425, 429})  # "try again later"; every other 4xx is a mistake in the request


class RetryingReward(Reward):
    """A reward that posts JSON to one address.

    A request that times out, cannot connect, breaks off or is answered with a 5xx status is sent again after
    `backoff * 2^k * u` seconds, k = 0, 1, ... and u uniform in [0.5, 1.5], at most `max_backoff`.

    Args:
        url: where to.
        timeout: seconds for one request, above 0: to connect, and again between two pieces of the answer.
        retries: how often a failed request is sent again, 0 or more.
        backoff: seconds before the first repetition.
        max_backoff: upper bound of every wait.
        concurrency: most requests of this object at a time, at least 1.
        token_env: environment variable with the server's bearer token; None sends none. A token is no argument, since
            arguments end up in checkpoints and loggers.
        on_failure: when the last repetition has failed: "error" ends the run, "none" leaves the rows of that request
            unscored, logs a warning and counts them in `reward/<name>/unanswered`.

    Raises:
        ValueError: an argument out of range, or no token in `token_env` or one that no header can carry.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        retries: int = 4,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
        concurrency: int = 8,
        token_env: str | None = None,
        on_failure: Literal["error", "skip"] = "error",
    ) -> None:
        owner = type(self).__name__
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{owner}.url={url!r}: must start with http:// or https://.")
        self.url = url
        if token_env is not None and not os.environ.get(token_env):
            raise ValueError(f"{owner}: token_env={token_env!r}, but that environment variable is not set.")
        self.token_env = token_env
        self._headers()
        self.on_failure = one_of(f"{owner}.on_failure", on_failure, "error", "skip")
        self.timeout = above(f"{owner}.timeout", timeout, note=" seconds")
        self.retries = at_least(f"{owner}.retries", retries, 0)
        self.backoff = above(f"{owner}.backoff", backoff, note=" seconds")
        self.max_backoff = above(f"{owner}.max_backoff", max_backoff, note=" seconds")
        self.concurrency = at_least(f"{owner}.concurrency", concurrency, 1)
        self._client: httpx.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(self, body: Mapping[str, Any], what: str) -> Any:
        """The JSON answer; None where all repetitions failed and `on_failure` is "skip".

        Args:
            body: JSON to send.
            what: of which the failure is, for messages: "3 rows".

        Raises:
            ConnectionError: all repetitions failed and `on_failure` is "error".
            RewardError: the server refused the request, or answered something that is not JSON.
        """
        client, slots = self._open()
        problem = ""
        for attempt in range(self.retries + 1):
            if attempt:
                wait = self.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(self.max_backoff, wait))
            try:
                async with slots:
                    status, answer = await self._send(client, body)
            except httpx.TransportError as error:  # time-outs, refused and broken connections
                problem = redact_text(f"{type(error).__name__}: {error}")
                continue
            if status < 500 and status not in _RETRIED_STATUS:
                return self._decoded(status, answer)
            problem = f"status {status}: {redact_text(answer.decode(errors='replace'))[:200]}"
        message = f"{self.url} did not score {what} in {self.retries + 1} attempts; the last: {problem}"
        if self.on_failure == "error":
            raise ConnectionError(message)
        log.warning("%s. They count as not scored (on_failure='skip').", message)
        return None

    async def close(self) -> None:  # type: ignore[override]
        """Closes the connections; the next request opens new ones."""
        client, self._client, self._loop = self._client, None, None
        if client is not None:
            await client.aclose()

    async def _send(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and body of the answer to one request; a RewardError where it does not end."""
        answer = bytearray()
        async with client.stream("POST", self.url, json=body, headers=self._headers()) as response:
            async for piece in response.aiter_bytes():
                answer += piece
                if len(answer) > MOST_ANSWER_BYTES:
                    raise RewardError(f"{self.url} answered more than {MOST_ANSWER_BYTES} bytes.")
        return response.status_code, bytes(answer)

    def _decoded(self, status: int, answer: bytes) -> Any:
        said = redact_text(answer.decode(errors="replace"))[:200]
        if status != 200:
            hints = {401: " Set token_env.", 403: " Set token_env.", 413: " Send less in one request (batch_size)."}
            raise RewardError(f"{self.url} refused the request with {status}: {said}.{hints.get(status, '')}")
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise RewardError(f"{self.url} answered {said!r}, which is not JSON.") from error
        if value is None:  # which stands for "did not answer"
            raise RewardError(f"{self.url} answered null.")
        return value

    def _headers(self) -> dict[str, str]:
        if self.token_env is None:
            return {}
        token = os.environ[self.token_env]
        remember_secret(token)  # a server may quote it
        bearer_token(f"{type(self).__name__}.token_env: the token in ${self.token_env}", token)
        return {"Authorization": f"Bearer {token}"}

    def _open(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if self._client is None or self._slots is None or self._loop is not loop:  # connections belong to their loop
            local = httpx.URL(self.url).host in ("127.0.0.1", "localhost", "::1")
            self._client = httpx.AsyncClient(timeout=self.timeout, trust_env=not local)  # no proxy for loopback
            self._slots, self._loop = asyncio.Semaphore(self.concurrency), loop
        return self._client, self._slots

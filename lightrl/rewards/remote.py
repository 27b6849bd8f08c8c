"""Rewards over HTTP with retries, and `RemoteReward`, which queries a scoring server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import httpx

from lightrl.checkpoints.redaction import redact_text, remember_secret
from lightrl.compat.arguments import bearer_token
from lightrl.rewards.base import Reward, RewardError
from lightrl.rewards.encoding import encode_rows
from lightrl.rewards.rules import column_of

log = logging.getLogger(__name__)
_RETRIED_STATUS = frozenset({408, 425, 429})  # temporary; every other 4xx is an error in the request
_LONGEST_WAIT = 60.0


class RetryingReward(Reward):
    """Base class of rewards that post JSON to a URL, with retries.

    Retries requests after timeouts, connection errors, and 5xx responses. Waits `backoff * 2^k * u` seconds before
    retry k = 0, 1, ..., with u uniform in [0.5, 1.5], or as long as `Retry-After` requests, but at most 60 seconds.

    Args:
        url: URL of the server.
        timeout: Time limit for connecting, and between two chunks of the response, in seconds.
        retries: Maximum number of retries per request.
        backoff: Delay before the first retry in seconds.
        concurrency: Maximum number of concurrent requests of this object.
        token_env: Environment variable with the server's bearer token. Defaults to no token. The token itself is not an
            argument, because arguments are saved in checkpoints and logs.
        on_failure: Response to a request whose last retry fails. "error" stops the run. "skip" leaves the completions
            of that request unscored, logs a warning, and counts them in `reward/<name>/unanswered`.

    Raises:
        ValueError: `token_env` contains no valid token.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        retries: int = 4,
        backoff: float = 0.5,
        concurrency: int = 8,
        token_env: str | None = None,
        on_failure: Literal["error", "skip"] = "error",
    ) -> None:
        self.url = url
        self._headers = {}
        if token_env is not None:
            token = bearer_token(f"{type(self).__name__}.token_env={token_env!r}", os.environ.get(token_env))
            if token is None:
                raise ValueError(f"{type(self).__name__}.token_env={token_env!r}: not set. Export the token.")
            remember_secret(token)  # a server may echo it
            self._headers = {"Authorization": f"Bearer {token}"}
        self.on_failure = on_failure
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self.concurrency = concurrency
        self._client: httpx.AsyncClient | None = None

    async def post(self, body: Mapping[str, Any], what: str) -> Any:
        """Posts JSON and returns the JSON response; None if all retries failed and `on_failure` is "skip".

        Raises a ConnectionError if all retries failed and `on_failure` is "error", and a RewardError if the server
        rejected the request, which `what` describes, or its response is not JSON.
        """
        client = self._open()
        problem, least = "", 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                wait = self.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(_LONGEST_WAIT, max(wait, least)))
            try:
                response = await client.post(self.url, json=body)
            except httpx.TransportError as error:  # timeouts and connection errors
                problem = redact_text(f"{type(error).__name__}: {error}")
                continue
            if response.status_code < 500 and response.status_code not in _RETRIED_STATUS:
                return self._decoded(response)
            problem = f"status {response.status_code}: {redact_text(response.text)[:200]}"
            after = response.headers.get("retry-after", "")
            least = float(after) if after.isdecimal() else 0.0
        message = f"{self.url} failed to score {what} after {self.retries + 1} attempts (last error: {problem})"
        if self.on_failure == "error":
            raise ConnectionError(message)
        log.warning("%s. Left unscored (on_failure='skip').", message)
        return None

    async def close(self) -> None:  # type: ignore[override]
        """Closes the connections. The next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _decoded(self, response: httpx.Response) -> Any:
        said, status = redact_text(response.text)[:200], response.status_code
        if status != 200:
            raise RewardError(f"{self.url} rejected the request with status {status}: {said}.")
        try:
            return json.loads(response.content)
        except ValueError as error:
            raise RewardError(f"url={self.url}: returned {said!r}, which is not JSON. Check the URL.") from error

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            local = httpx.URL(self.url).host in ("127.0.0.1", "localhost", "::1")
            self._client = httpx.AsyncClient(
                timeout=httpx.Timeout(self.timeout, pool=None),
                limits=httpx.Limits(max_connections=self.concurrency),
                headers=self._headers,
                trust_env=not local,  # no proxy for loopback
            )
        return self._client


class RemoteReward(RetryingReward):
    """Scores completions on a server, such as `lightrl serve-reward`.

    Each group is a `POST` with JSON, with lists of n values. Keys that are not configured are omitted:

        {"queries": [prompt + completion, ...], "prompts": [...], "completions": [...], "group_ids": [...],
         "references": [...], "labels": [...], "images": [...], "videos": [...], "columns": {name: [...]}}

    `images` contains a list of base64 PNG files per completion, `videos` a list of lists of frames. The response must
    be `{"rewards": [number or null, ...]}` with n values. A 4xx status or an invalid response is a configuration error.
    It is not retried and always stops the run.

    Args:
        url: URL of the scoring endpoint, such as `http://127.0.0.1:8000/score`.
        columns: Dataset columns to send in `columns`.
        reference_column: Dataset column to send as `references`.
        label_column: Dataset column to send as `labels`.
        send_media: Whether to send images and videos.
        connection: Other arguments of `RetryingReward`, such as `timeout`, `retries`, and `token_env`.
    """

    def __init__(
        self,
        url: str,
        columns: list[str] | None = None,
        reference_column: str | None = None,
        label_column: str | None = None,
        send_media: bool = True,
        **connection: Any,
    ) -> None:
        super().__init__(url, **connection)
        self.columns = list(columns or [])
        self.fields = {"references": reference_column, "labels": label_column}
        self.send_media = send_media

    async def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        group_ids: Sequence[int],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        body: dict[str, Any] = {key: list(column_of(columns, name)) for key, name in self.fields.items() if name}
        body["columns"] = {name: list(column_of(columns, name)) for name in self.columns}
        if self.send_media:
            body |= {name: encode_rows(media) for name, media in (("images", images), ("videos", videos)) if any(media)}
        body["queries"] = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        body |= {"prompts": list(prompts), "completions": list(completions), "group_ids": list(group_ids)}
        num_rows = len(completions)
        answer = await self.post(body, f"{num_rows} completion{'s' * (num_rows != 1)}")
        lost = answer is None and self.on_failure == "skip"
        if self.on_failure == "skip" and log_metric is not None:
            log_metric("unanswered", float(lost))
        if lost:
            return [None] * num_rows
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != num_rows:
            raise RewardError(
                f"url={self.url}: returned {str(answer)[:200]} for {num_rows} completions. Return "
                '{"rewards": [...]} with one number or null each.'
            )
        return rewards

"""Rewards from a scoring server over HTTP.

One request, `POST url` with JSON (lists of n values, keys that are not configured are left out):

    {"queries": [prompt + completion, ...], "prompts": [...], "completions": [...], "group_ids": [...],
     "references": [...], "labels": [...], "images": [...], "completion_ids": [[...], ...], "columns": {name: [...]}}

and its answer `{"rewards": [number or null, ...]}` with n values. `lightrl serve-reward` speaks it, and servers that
follow the `queries`/`prompts`/`labels` -> `rewards` convention do.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import os
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import httpx

from lightrl.rewards.base import Reward, RewardError

__all__ = ["RemoteReward"]

log = logging.getLogger(__name__)
_RETRIED_STATUS = frozenset({408, 425, 429})  # "try again later"; every other 4xx is a mistake in the request


class RemoteReward(Reward):
    """Asks a scoring server.

    A request that times out, cannot connect, breaks off or is answered with a 5xx status is sent again after
    `backoff * 2^k * u` seconds, k = 0, 1, ... and u uniform in [0.5, 1.5], at most `max_backoff`. A refusal (4xx) or an
    answer that is not n rewards is a mistake in the set-up: it is not repeated and always an error.

    Args:
        url: the server's scoring address, for example `http://127.0.0.1:8000/score`.
        columns: data-set columns to send, under their own names.
        reference_column: column sent as `references`.
        label_column: sent as `labels`.
        image_column: sent as `images`: text as it is, bytes and PIL images as base64 (PIL as PNG), lists of them alike.
        send_completion_ids: also send the sampled token ids.
        timeout: seconds for one request, above 0: to connect, and again between two pieces of the answer.
        retries: how often a failed request is sent again, 0 or more.
        backoff: seconds before the first repetition.
        max_backoff: upper bound of every wait.
        batch_size: most rows per request, at least 1; a group larger than that is sent whole.
        concurrency: most requests of this object at a time, at least 1.
        token_env: environment variable with the bearer token. A token is no argument, since arguments end up in
            checkpoints and loggers.
        on_failure: when the last repetition has failed: "error" ends the run, "none" gives None for the rows of that
            request, logs a warning and the fraction of unscored rows as `reward/<name>/unanswered`.

    Raises:
        ValueError: an argument out of range, or no token in `token_env`.
    """

    def __init__(
        self,
        url: str,
        columns: list[str] | None = None,
        reference_column: str | None = None,
        label_column: str | None = None,
        image_column: str | None = None,
        send_completion_ids: bool = False,
        timeout: float = 60.0,
        retries: int = 4,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
        batch_size: int = 64,
        concurrency: int = 8,
        token_env: str | None = None,
        on_failure: Literal["error", "none"] = "error",
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"RemoteReward: url={url!r}; must start with http:// or https://.")
        if not (timeout > 0 and backoff > 0 and max_backoff > 0):
            raise ValueError(
                f"RemoteReward: timeout={timeout}, backoff={backoff}, max_backoff={max_backoff} seconds; "
                "all must be above 0."
            )
        if retries < 0 or batch_size < 1 or concurrency < 1:
            raise ValueError(
                f"RemoteReward: retries={retries} must be 0 or more, batch_size={batch_size} and "
                f"concurrency={concurrency} at least 1."
            )
        if token_env is not None and not os.environ.get(token_env):
            raise ValueError(f"RemoteReward: token_env={token_env!r}, but that environment variable is not set.")
        if on_failure not in ("error", "none"):
            raise ValueError(f"RemoteReward: on_failure={on_failure!r}; must be 'error' or 'none'.")
        self.url, self.token_env, self.on_failure = url, token_env, on_failure
        self.columns = list(columns or [])
        self.fields = {"references": reference_column, "labels": label_column, "images": image_column}
        self.send_completion_ids = send_completion_ids
        self.timeout, self.retries, self.backoff, self.max_backoff = timeout, retries, backoff, max_backoff
        self.batch_size, self.concurrency = batch_size, concurrency
        self._client: httpx.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        group_ids: Sequence[int],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        rows = self._rows(prompts, completions, group_ids, columns)
        batches = _batches(group_ids, self.batch_size)
        tasks = [
            asyncio.ensure_future(self._ask({name: v[a:b] for name, v in rows.items()}, b - a)) for a, b in batches
        ]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one failed for good: the run ends, the others need no answer
                task.cancel()
        if self.on_failure == "none" and log_metric is not None:
            lost = sum(b - a for (a, b), answer in zip(batches, answers, strict=True) if answer is None)
            log_metric("unanswered", lost / max(1, len(completions)))
        values: list[float | None] = []
        for (a, b), answer in zip(batches, answers, strict=True):
            values += [None] * (b - a) if answer is None else answer
        return values

    async def close(self) -> None:  # type: ignore[override]
        """Closes the connections; the next call opens new ones."""
        client, self._client, self._loop = self._client, None, None
        if client is not None:
            await client.aclose()

    def _rows(
        self, prompts: Sequence[str], completions: Sequence[str], group_ids: Sequence[int], columns: dict[str, Any]
    ) -> dict[str, list[Any]]:
        """Every key of the request; keys of `columns` get the prefix "columns/"."""
        wanted = {key: name for key, name in self.fields.items() if name is not None}
        wanted.update({f"columns/{name}": name for name in self.columns})
        missing = sorted(set(wanted.values()) - columns.keys())
        if missing:
            raise RewardError(
                f"RemoteReward sends the columns {', '.join(missing)}, which the data set lacks; "
                f"it has: {', '.join(sorted(columns))}."
            )
        rows = {key: list(columns[name]) for key, name in wanted.items()}
        if "images" in rows:
            rows["images"] = [_image(value) for value in rows["images"]]
        if self.send_completion_ids:
            rows["completion_ids"] = [list(ids) for ids in columns["completion_ids"]]
        rows["queries"] = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        return {**rows, "prompts": list(prompts), "completions": list(completions), "group_ids": list(group_ids)}

    async def _ask(self, rows: dict[str, list[Any]], num_rows: int) -> list[float | None] | None:
        """One request with its repetitions; None where all of them failed and `on_failure` is "none"."""
        body: dict[str, Any] = {key: value for key, value in rows.items() if not key.startswith("columns/")}
        body["columns"] = {key[8:]: value for key, value in rows.items() if key.startswith("columns/")}
        client, slots = self._open()
        problem = ""
        for attempt in range(self.retries + 1):
            if attempt:
                wait = self.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                await asyncio.sleep(min(self.max_backoff, wait))
            try:
                async with slots:
                    response = await client.post(self.url, json=body, headers=self._headers())
            except httpx.TransportError as error:  # time-outs, refused and broken connections
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.status_code < 500 and response.status_code not in _RETRIED_STATUS:
                return self._rewards(response, num_rows)
            problem = f"status {response.status_code}: {response.text[:200]}"
        message = f"{self.url} did not score {num_rows} rows in {self.retries + 1} attempts; the last: {problem}"
        if self.on_failure == "error":
            raise ConnectionError(message)
        log.warning("%s. They count as not scored (on_failure='none').", message)
        return None

    def _rewards(self, response: httpx.Response, num_rows: int) -> list[float | None]:
        if response.status_code != 200:
            hints = {401: " Set token_env.", 403: " Set token_env.", 413: " Make batch_size smaller."}
            hint = hints.get(response.status_code, "")
            raise RewardError(
                f"{self.url} refused the request with {response.status_code}: {response.text[:200]}.{hint}"
            )
        try:
            rewards = response.json()["rewards"]
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(f'{self.url} answered {response.text[:200]!r}, not {{"rewards": [...]}}.') from error
        if not isinstance(rewards, list) or len(rewards) != num_rows:
            raise RewardError(f"{self.url} answered rewards={str(rewards)[:200]} for {num_rows} rows; one each is due.")
        return rewards

    def _headers(self) -> dict[str, str]:
        return {} if self.token_env is None else {"Authorization": f"Bearer {os.environ[self.token_env]}"}

    def _open(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if self._client is None or self._slots is None or self._loop is not loop:  # connections belong to their loop
            local = httpx.URL(self.url).host in ("127.0.0.1", "localhost", "::1")
            self._client = httpx.AsyncClient(timeout=self.timeout, trust_env=not local)  # no proxy for loopback
            self._slots, self._loop = asyncio.Semaphore(self.concurrency), loop
        return self._client, self._slots


def _batches(group_ids: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Cuts n rows into [start, end) pieces of at most `size` rows, between groups only."""
    cuts = [i for i in range(1, len(group_ids)) if group_ids[i] != group_ids[i - 1]] + [len(group_ids)]
    batches, start, end = [], 0, 0
    for cut in cuts:
        if cut - start > size and end > start:
            batches.append((start, end))
            start = end
        end = cut
    return [*batches, (start, end)] if end > start else batches


def _image(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_image(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "save"):
        buffer = io.BytesIO()
        value.save(buffer, format="PNG")
        return base64.b64encode(buffer.getvalue()).decode()
    return value

"""The routes of the scoring server. Imported by `serve.py` only, since it needs the extra `server`."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect

from lightrl.background import in_thread
from lightrl.rewards.base import RewardError
from lightrl.rewards.calls import CallFailed, RewardFunction
from lightrl.rewards.media import MEDIA, decode_images, decode_videos

__all__ = ["create_app"]

log = logging.getLogger(__name__)

PIXELS_PER_BYTE = 16
"""Times `max_bytes`: most pixels of a request's images, and of its videos. Photographs have fewer than one per byte."""


_READERS = 4  # most requests that are parsed at a time


class ScoreRequest(BaseModel):
    """The body of `POST /score`; see `lightrl/rewards/remote.py`."""

    model_config = ConfigDict(extra="ignore")  # queries repeat prompts and completions

    prompts: list[str]
    completions: list[str]
    group_ids: list[int] | None = None
    completion_ids: list[list[int]] | None = None
    references: list[Any] | None = None
    labels: list[Any] | None = None
    images: list[Any] | None = None
    videos: list[Any] | None = None
    columns: dict[str, list[Any]] = {}

    def rows(self, media: bool, max_pixels: int) -> dict[str, list[Any]]:
        """name -> n values, as a reward function gets them; images and videos are decoded for one that takes them."""
        named: dict[str, list[Any]] = self.model_dump(exclude={"columns"}, exclude_none=True)
        named.setdefault("group_ids", list(range(len(self.completions))))
        if media:
            empty: list[Any] = [None] * len(self.completions)
            named["images"] = decode_images(named.get("images", empty), max_pixels=max_pixels)
            named["videos"] = decode_videos(named.get("videos", empty), max_pixels)
        return {**self.columns, **named}


def create_app(
    function: RewardFunction,
    *,
    token: str | None,
    max_rows: int,
    max_bytes: int,
    max_concurrency: int,
    timeout: float | None,
) -> FastAPI:
    """Builds the application with `POST /score` and `GET /health`; the arguments are those of `serve_reward`."""
    app = FastAPI(title="LightRL reward server", openapi_url=None)
    slots, reading = asyncio.Semaphore(max_concurrency), asyncio.Semaphore(_READERS)
    counts = {"requests": 0, "rows": 0}

    @app.get("/health")  # type: ignore[untyped-decorator]
    async def health() -> dict[str, Any]:
        return {"status": "ok", "reward": function.name, **counts}

    @app.post("/score")  # type: ignore[untyped-decorator]
    async def score(request: Request) -> dict[str, Any]:
        if token is not None:
            _check_token(request, token)
        body, pixels = await _body(request, max_bytes), PIXELS_PER_BYTE * max_bytes
        async with reading:  # beside the loop, which answers others meanwhile
            rows, refused = await in_thread(lambda: _parse(body, function, max_rows, pixels), "reading a request")
        if refused is not None:
            raise refused
        assert rows is not None
        async with slots:
            try:
                values, _ = await function.run(rows, timeout)
            except RewardError as error:
                log.exception("scoring failed")
                # Only a failed call is worth another attempt; a mistake in the set-up ends the run that asked.
                status = 500 if isinstance(error, CallFailed) else 422
                raise HTTPException(status, str(error).splitlines()[0]) from error  # the lines of the code stay here
        counts["requests"] += 1
        counts["rows"] += len(values)
        return {"rewards": [None if math.isnan(value) else value for value in values]}

    return app


def _check_token(request: Request, token: str) -> None:
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise HTTPException(401, "wrong or missing bearer token", headers={"WWW-Authenticate": "Bearer"})


async def _body(request: Request, max_bytes: int) -> bytes:
    """Reads the body, and stops reading where it is too large, whatever its header promised."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise HTTPException(413, f"the request is larger than max_bytes={max_bytes}")
    except ClientDisconnect as error:  # it went away, or was cut off after read_timeout
        raise HTTPException(400, "the request ended before its body did") from error
    return bytes(body)


def _parse(body: bytes, function: RewardFunction, max_rows: int, max_pixels: int) -> dict[str, list[Any]]:
    try:
        rows = ScoreRequest.model_validate_json(body).rows(bool(function.takes & set(MEDIA)), max_pixels)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise HTTPException(422, problems) from error
    except ValueError as error:  # what was sent as an image is none
        raise HTTPException(422, str(error)) from error
    num_rows = len(rows["completions"])
    if num_rows > max_rows:
        raise HTTPException(413, f"{num_rows} rows are more than max_rows={max_rows}")
    wrong = {name[:60]: len(values) for name, values in rows.items() if len(values) != num_rows}
    if wrong:
        first = dict(list(wrong.items())[:5])
        raise HTTPException(422, f"{num_rows} completions, but other lengths of {len(wrong)} columns, such as {first}")
    missing = function.missing(rows)
    if missing:
        raise HTTPException(422, f"{function.name} needs {', '.join(missing)}, which the request does not send")
    return rows

"""The routes of the scoring server. Imported by `serve.py` only, since it needs the extra `server`."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from lightrl.engines.background import in_thread
from lightrl.rewards.base import RewardError
from lightrl.rewards.calls import CallFailed, RewardFunction
from lightrl.rewards.media import MEDIA, decode_images, decode_videos

log = logging.getLogger(__name__)

PIXELS_PER_BYTE = 16
"""Times `max_bytes`: most pixels of a request's images, and of its videos. Photographs have fewer than one per byte."""


_TYPES: dict[str, Any] = {"prompts": str, "completions": str, "group_ids": int, "completion_ids": list}
_FIELDS = (*_TYPES, "references", "labels", "images", "videos")
"""Lists of a request's body, see `lightrl/rewards/remote.py`; other keys are ignored, as `queries`, which repeat."""


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
    slots = asyncio.Semaphore(max_concurrency)
    counts = {"requests": 0, "rows": 0}

    @app.get("/health")  # type: ignore[untyped-decorator]
    async def health() -> dict[str, Any]:
        return {"status": "ok", "reward": function.name, **counts}

    @app.post("/score")  # type: ignore[untyped-decorator]
    async def score(request: Request) -> dict[str, Any]:
        if token is not None:
            _check_token(request, token)
        body, pixels = await _body(request, max_bytes), PIXELS_PER_BYTE * max_bytes
        async with slots:
            # In a thread, so that others are answered meanwhile.
            rows, refused = await in_thread(lambda: _parse(body, function, max_rows, pixels), "reading a request")
            if refused is not None:
                raise refused
            assert rows is not None
            try:
                values, _ = await function.run(rows, timeout)
            except RewardError as error:
                log.exception("scoring failed")
                # Only a failed call is worth another attempt; a mistake in the set-up ends the run that asked.
                status = 500 if isinstance(error, CallFailed) else 422
                raise HTTPException(status, str(error).splitlines()[0]) from error  # the lines of code stay here
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
    except ClientDisconnect as error:  # it went away
        raise HTTPException(400, "the request ended before its body did") from error
    return bytes(body)


def _parse(body: bytes, function: RewardFunction, max_rows: int, max_pixels: int) -> dict[str, list[Any]]:
    """name -> n values, as a reward function gets them; images and videos are decoded for one that takes them."""
    try:
        rows = _rows(body, max_rows)
        if function.takes & set(MEDIA):
            empty: list[Any] = [None] * len(rows["completions"])
            rows["images"] = decode_images(rows.get("images", empty), max_pixels=max_pixels)
            rows["videos"] = decode_videos(rows.get("videos", empty), max_pixels)
        if missing := function.missing(rows):
            raise ValueError(f"{function.name} needs {', '.join(missing)}, which the request does not send")
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    return rows


def _rows(body: bytes, max_rows: int) -> dict[str, list[Any]]:
    """The lists of a body: its columns and `_FIELDS`. Stops at the first mistake: a body may hold a million of them.

    Raises:
        HTTPException: 413 for more than `max_rows` rows.
        ValueError: another mistake, or no JSON.
    """
    sent = from_json(body)
    if not isinstance(sent, dict) or not isinstance(columns := sent.get("columns", {}), dict):
        raise ValueError("the request, and columns in it, must be JSON objects")
    rows: dict[str, list[Any]] = {**columns, **{name: sent[name] for name in _FIELDS if sent.get(name) is not None}}
    if missing := [name for name in ("prompts", "completions") if sent.get(name) is None]:
        raise ValueError(f"{missing[0]}: is missing")
    for name, values in rows.items():
        if not isinstance(values, list):
            raise ValueError(f"{name[:60]}: must be a list, one entry for each completion")
        if len(values) > max_rows:
            raise HTTPException(413, f"{name[:60]}: {len(values)} rows are more than max_rows={max_rows}")
    num_rows = len(rows["completions"])
    for name, values in rows.items():
        if len(values) != num_rows:
            raise ValueError(f"{name[:60]}: {len(values)} values for {num_rows} completions")
    for name, kind in _TYPES.items():
        for row, value in enumerate(rows.get(name, ())):
            if not isinstance(value, kind) or (kind is list and any(type(each) is not int for each in value)):
                wanted = "list of integers" if kind is list else kind.__name__
                raise ValueError(f"{name}, row {row}: {type(value).__name__}, where {wanted} is due")
    return {"group_ids": list(range(num_rows)), **rows}

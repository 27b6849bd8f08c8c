"""`lightrl serve-reward`: serves a reward function or a sequence classification model over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import math
import os
import socket
from collections.abc import Sequence
from typing import Any, Optional

from lightrl.checkpoints.redaction import remember_secret
from lightrl.compat.arguments import above, at_least, bearer_token, require_model_folder, require_packages
from lightrl.engines.background import in_thread
from lightrl.rewards.base import (
    MEDIA,
    CallFailed,
    Reward,
    RewardError,
    RewardFunction,
    RewardSpec,
    load_reward,
    reward_name,
)

log = logging.getLogger(__name__)

PIXELS_PER_BYTE = 16
"""Maximum pixels of a request's images or videos per byte of `max_bytes`. Photos have less than one."""
_TYPES: dict[str, Any] = {"prompts": str, "completions": str, "group_ids": int, "completion_ids": list}
_FIELDS = (*_TYPES, "references", "labels", "images", "videos")


class ModelReward(Reward):
    """Scores prompts and completions with a model that has one output. The reward is the raw logit.

    Completions without tokens are unscored. In a training run, use the module's `reward_models` instead; they use the
    strategy's devices.

    Args:
        path: Model directory or model ID, including the tokenizer.
        device: Device, such as "cpu" or "cuda:0".
        dtype: Dtype of the weights. Defaults to float32.
        chat_template: Jinja template (text or file) that renders [user: prompt, assistant: completion]. "default" uses
            the tokenizer's template. Defaults to None, which scores prompt + completion as plain text.
        max_length: Maximum number of tokens. Longer texts are truncated at the beginning. Defaults to the model's
            limit.
        batch_tokens: Maximum number of tokens per forward pass.

    Raises:
        ValueError: The model doesn't exist, has more than one output, or has no weights for the output (a language
            model).
    """

    max_concurrency = 1  # concurrent calls would compete for device memory

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        dtype: str | None = None,
        chat_template: str | None = None,
        max_length: int | None = None,
        batch_tokens: int = 16384,
    ) -> None:
        at_least("ModelReward.max_length", max_length, 1, or_none="for no limit")
        require_model_folder(path)
        from lightrl.models.reward import RewardModel
        from lightrl.models.spec import RewardModelSpec

        spec = RewardModelSpec("model", path, dtype=dtype, chat_template=chat_template, max_length=max_length)
        self.model = RewardModel.from_spec(spec).to(device).eval()
        self.batch_tokens = at_least("ModelReward.batch_tokens", batch_tokens, 1)

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
        scores: list[float] = self.model.score_texts(prompts, completions, self.batch_tokens).tolist()
        rows = zip(scores, prompts, completions, strict=True)
        return [None if math.isnan(score) and not self.model.encode(*texts) else score for score, *texts in rows]


def serve_reward(
    reward: Optional[RewardSpec] = None,  # noqa: UP045 - jsonargparse reads it at run time
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    token_env: str = "LIGHTRL_REWARD_TOKEN",
    max_rows: int = 1024,
    max_bytes: int = 16 * 1024 * 1024,
    max_concurrency: int = 8,
    timeout: float | None = None,
) -> None:
    """Serve a reward function over HTTP until interrupted.

    Endpoints: `POST /score` (see `RemoteReward`) and `GET /health`.

    Responds with 200 and `{"rewards": [...]}`, 401 for a wrong token, 413 if a limit is exceeded, 422 if the request
    is invalid, and 500 if the function failed. Values logged by the function stay on the server.

    Clients with the token are trusted. If untrusted clients can reach the server, put it behind a reverse proxy that
    limits connections and slow requests.

    Args:
        reward: Reward function: an import path, or class_path and init_args. Set either `reward` or `model`.
        model: Model directory or model ID of a sequence classification model with one output. Runs on the CPU. For
            other devices, set `reward` to the class_path `lightrl.rewards.ModelReward`.
        host: Address to listen on. Addresses other than loopback require a token.
        port: TCP port. 0 picks a free port.
        token: Bearer token for `POST /score`. Prefer `token_env`, because other users can see command lines.
        token_env: Environment variable with the token, used if `token` is not set.
        max_rows: Maximum number of completions per request.
        max_bytes: Maximum size of a request in bytes. Images and videos may have up to 16 pixels per byte.
        max_concurrency: Maximum number of concurrent calls; other requests wait. The function's own `max_concurrency`
            takes precedence.
        timeout: Time limit per call in seconds. Defaults to no limit.

    Raises:
        ValueError: Not exactly one of `reward` and `model` is set, a public address has no token, the address is not
            available, a limit is out of range, or the extra `server` is not installed.
    """
    if (reward is None) == (model is None):
        raise ValueError(f"serve_reward: reward={reward!r}, model={model!r}: set exactly one of them.")
    token = token or os.environ.get(token_env) or None
    remember_secret(token or "")
    bearer_token(f"serve_reward: the token of --token or ${token_env}", token)
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"serve_reward: host={host!r}: is reachable from other computers. Set a token in ${token_env}, "
            "or listen on 127.0.0.1."
        )
    for name, limit in {"max_rows": max_rows, "max_bytes": max_bytes, "max_concurrency": max_concurrency}.items():
        at_least(f"serve_reward: {name}", limit, 1)
    above("serve_reward: timeout", timeout, or_none="for no limit")
    require_packages("serve_reward", "server", "fastapi", "uvicorn")
    import uvicorn

    with _listening(host, port) as listener:  # before loading a model, which is slow
        loaded = load_reward(reward) if reward is not None else ModelReward(str(model))
        function = RewardFunction(model or reward_name(loaded), loaded)
        slots = function.max_concurrency or max_concurrency
        app = create_app(
            function, token=token, max_rows=max_rows, max_bytes=max_bytes, max_concurrency=slots, timeout=timeout
        )
        # With `lifespan`, a second Ctrl-C would print a traceback.
        config = uvicorn.Config(app, ws="none", lifespan="off", timeout_graceful_shutdown=5)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve(uvicorn.Server(config), listener, function))


def _listening(host: str, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, address = min(addresses, key=lambda found: found[0] != socket.AF_INET)  # prefers IPv4
        return socket.create_server(address, family=family)
    except (OSError, UnicodeError, OverflowError) as error:  # unknown host, foreign address, or port in use
        raise ValueError(
            f"serve_reward: host={host!r}, port={port}: {error}. Use an address of this computer, such as 127.0.0.1, "
            "and a free port above 1023."
        ) from error


async def _serve(server: Any, listener: socket.socket, function: RewardFunction) -> None:
    logging.getLogger("uvicorn.error").info("Listening on %s, port %d", *listener.getsockname()[:2])
    try:
        await server.serve(sockets=[listener])
    finally:
        await function.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def create_app(
    function: RewardFunction,
    *,
    token: str | None,
    max_rows: int,
    max_bytes: int,
    max_concurrency: int,
    timeout: float | None,
) -> Any:
    """Builds the ASGI application with `POST /score` and `GET /health`. See `serve_reward` for the arguments."""
    from fastapi import FastAPI, HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse

    app = FastAPI(title="LightRL reward server", openapi_url=None)
    slots = asyncio.Semaphore(max_concurrency)
    counts = {"requests": 0, "rows": 0}

    async def health(request: Any) -> JSONResponse:
        return JSONResponse({"status": "ok", "reward": function.name, **counts})

    async def score(request: Any) -> JSONResponse:
        given = request.headers.get("authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "wrong or missing bearer token", headers={"WWW-Authenticate": "Bearer"})
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise HTTPException(413, f"the request is larger than max_bytes={max_bytes}")
        except ClientDisconnect as error:
            raise HTTPException(400, "the request body is incomplete") from error
        async with slots:
            rows, wrong = await in_thread(lambda: parse_rows(body, function, PIXELS_PER_BYTE * max_bytes), "reading")
            if wrong is not None or rows is None:
                raise HTTPException(422, str(wrong))
            if (num_rows := len(rows["completions"])) > max_rows:
                raise HTTPException(413, f"{num_rows} completions exceed max_rows={max_rows}")
            try:
                values, _ = await function.run(rows, timeout)
            except RewardError as error:
                log.exception("Scoring failed")
                # Clients retry failed calls (500); a configuration error (422) stops the client's run.
                status = 500 if isinstance(error, CallFailed) else 422
                raise HTTPException(status, str(error).splitlines()[0]) from error  # source code stays on the server
        counts["requests"] += 1
        counts["rows"] += len(values)
        return JSONResponse({"rewards": [None if math.isnan(value) else value for value in values]})

    app.add_route("/health", health, methods=["GET"])
    app.add_route("/score", score, methods=["POST"])
    return app


def parse_rows(body: bytes | bytearray, function: RewardFunction, max_pixels: int) -> dict[str, list[Any]]:
    """Parses a request to name -> n values for the reward function. Decodes media if the function uses them.

    Raises:
        ValueError: The request is not JSON, or a field has the wrong type or length.
    """
    sent = json.loads(body)
    if not isinstance(sent, dict) or not isinstance(columns := sent.get("columns", {}), dict):
        raise ValueError("the request and its columns must be JSON objects")
    rows: dict[str, list[Any]] = {**columns, **{name: sent[name] for name in _FIELDS if sent.get(name) is not None}}
    for name in ("prompts", "completions"):
        if sent.get(name) is None:
            raise ValueError(f"{name}: is required")
    num_rows = len(sent["completions"])
    for name, values in rows.items():
        if not isinstance(values, list) or len(values) != num_rows:
            raise ValueError(f"{name[:60]}: must be a list with one entry per completion")
    for name, kind in _TYPES.items():
        for row, value in enumerate(rows.get(name, ())):
            if not isinstance(value, kind):
                raise ValueError(f"{name}, row {row}: must be of type {kind.__name__}, got {type(value).__name__}")
    rows = {"group_ids": list(range(num_rows)), **rows}
    if function.takes & set(MEDIA):
        from lightrl.rewards.encoding import decode_images, decode_videos

        empty: list[Any] = [None] * num_rows
        rows["images"] = decode_images(rows.get("images", empty), max_pixels=max_pixels)
        rows["videos"] = decode_videos(rows.get("videos", empty), max_pixels)
    if missing := function.missing(rows):
        raise ValueError(f"{function.name} requires {', '.join(missing)}, which the request does not contain")
    return rows

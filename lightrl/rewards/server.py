"""`lightrl serve-reward`: serves a reward function or a sequence classification model over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import os
import socket
from collections.abc import Sequence
from typing import Any, Optional

from pydantic import BaseModel

from lightrl.checkpoints.redaction import remember_secret
from lightrl.compat.arguments import bearer_token, require_model_folder, require_packages
from lightrl.engines.background import in_thread
from lightrl.rewards.base import CallFailed, Reward, RewardError, RewardFunction, RewardSpec, load_reward, reward_name

log = logging.getLogger(__name__)


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
        require_model_folder(path)
        from lightrl.models.reward import RewardModel, RewardModelSpec

        spec = RewardModelSpec("model", path, dtype=dtype, chat_template=chat_template, max_length=max_length)
        self.model = RewardModel.from_spec(spec).to(device).eval()
        self.batch_tokens = batch_tokens

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
        scores: list[float] = self.model.score_texts(prompts, completions, self.batch_tokens).tolist()
        rows = zip(scores, prompts, completions, strict=True)
        return [None if math.isnan(score) and not self.model.encode(*texts) else score for score, *texts in rows]


def serve_reward(
    reward: Optional[RewardSpec] = None,  # noqa: UP045 - jsonargparse reads it at run time
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_env: str = "LIGHTRL_REWARD_TOKEN",
    max_concurrency: int = 8,
    timeout: float | None = None,
) -> None:
    """Serve a reward function over HTTP until interrupted.

    Endpoints: `POST /score` (see `RemoteReward`) and `GET /health`.

    Responds with 200 and `{"rewards": [...]}`, 401 for a wrong token, 422 if the request is invalid, and 500 if the
    function failed. Values logged by the function stay on the server.

    Clients with the token are trusted. If untrusted clients can reach the server, put it behind a reverse proxy that
    limits requests.

    Args:
        reward: Reward function: an import path, or class_path and init_args. Set either `reward` or `model`.
        model: Model directory or model ID of a sequence classification model with one output. Runs on the CPU. For
            other devices, set `reward` to the class_path `lightrl.rewards.ModelReward`.
        host: Address to listen on. Addresses other than loopback require a token.
        port: TCP port. 0 picks a free port.
        token_env: Environment variable with the bearer token for `POST /score`.
        max_concurrency: Maximum number of concurrent calls; other requests wait. The function's own `max_concurrency`
            takes precedence.
        timeout: Time limit per call in seconds. Defaults to no limit.

    Raises:
        ValueError: Not exactly one of `reward` and `model` is set, a public address has no token, or the extra `server`
            is not installed.
    """
    if (reward is None) == (model is None):
        raise ValueError(f"serve_reward: reward={reward!r}, model={model!r}: set exactly one of them.")
    token = bearer_token(f"serve_reward: token_env={token_env!r}", os.environ.get(token_env))
    remember_secret(token or "")
    if token is None and host not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(
            f"serve_reward: host={host!r}: reachable from other hosts. Set a token in ${token_env}, "
            "or listen on 127.0.0.1."
        )
    require_packages("serve_reward", "server", "fastapi", "uvicorn")
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:  # before loading a model, which is slow
        loaded = load_reward(reward) if reward is not None else ModelReward(str(model))
        function = RewardFunction(model or reward_name(loaded), loaded)
        slots = function.max_concurrency or max_concurrency
        app = create_app(function, token=token, max_concurrency=slots, timeout=timeout)
        # With `lifespan`, a second Ctrl-C would print a traceback.
        config = uvicorn.Config(app, ws="none", lifespan="off", timeout_graceful_shutdown=5)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_serve(uvicorn.Server(config), listener, function))


async def _serve(server: Any, listener: socket.socket, function: RewardFunction) -> None:
    logging.getLogger("uvicorn.error").info("Listening on %s, port %d", *listener.getsockname()[:2])
    try:
        await server.serve(sockets=[listener])
    finally:
        await function.close()


class ScoreRequest(BaseModel):
    """Body of `POST /score`. See `RemoteReward`."""

    prompts: list[str]
    completions: list[str]
    group_ids: list[int] | None = None
    references: list[Any] | None = None
    labels: list[Any] | None = None
    images: list[list[str]] | None = None
    videos: list[list[list[str]]] | None = None
    columns: dict[str, list[Any]] = {}

    def rows(self, function: RewardFunction) -> dict[str, list[Any]]:
        """Name -> n values for the function, with decoded media. Raises a ValueError if they don't fit."""
        from lightrl.rewards.encoding import decode_image, decode_video

        num_rows = len(self.completions)
        sent = {**self.columns, **self.model_dump(exclude={"columns", "images", "videos"}, exclude_none=True)}
        rows: dict[str, list[Any]] = {"group_ids": list(range(num_rows)), **sent}
        for name, decode in (("images", decode_image), ("videos", decode_video)):
            if name in function.takes:
                values: list[list[Any]] = getattr(self, name) or [[]] * num_rows
                rows[name] = [[decode(value) for value in row] for row in values]
        if wrong := [name for name, values in rows.items() if len(values) != num_rows]:
            raise ValueError(f"{', '.join(wrong)}: must have one entry per completion")
        if missing := function.missing(rows):
            raise ValueError(f"{function.name} requires {', '.join(missing)}, which the request does not contain")
        return rows


def create_app(function: RewardFunction, *, token: str | None, max_concurrency: int, timeout: float | None) -> Any:
    """Builds the ASGI application with `POST /score` and `GET /health`. See `serve_reward` for the arguments."""
    from fastapi import FastAPI, Header, HTTPException

    app = FastAPI(title="LightRL reward server", openapi_url=None)
    slots = asyncio.Semaphore(max_concurrency)
    counts = {"requests": 0, "rows": 0}

    async def health() -> dict[str, Any]:
        return {"status": "ok", "reward": function.name, **counts}

    async def score(request: ScoreRequest, authorization: str = Header("")) -> dict[str, Any]:
        if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "wrong or missing bearer token", headers={"WWW-Authenticate": "Bearer"})
        async with slots:
            rows, wrong = await in_thread(lambda: request.rows(function), "reading")
            if wrong is not None or rows is None:
                raise HTTPException(422, str(wrong))
            try:
                values = (await function.run(rows, timeout)).values
            except RewardError as error:
                log.exception("Scoring failed")
                # Clients retry failed calls (500); a configuration error (422) stops the client's run.
                status = 500 if isinstance(error, CallFailed) else 422
                raise HTTPException(status, str(error).splitlines()[0]) from error  # source code stays on the server
        counts["requests"] += 1
        counts["rows"] += len(values)
        return {"rewards": [None if math.isnan(value) else value for value in values]}

    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/score", score, methods=["POST"])
    return app

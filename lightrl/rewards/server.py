"""`lightrl serve-reward`: any reward function or sequence-classification model behind HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import ipaddress
import os
from typing import Optional

from lightrl.rewards.base import RewardFn, RewardSpec, load_reward, reward_name
from lightrl.rewards.calls import RewardFunction

__all__ = ["serve_reward"]


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
    """Serves rewards until it is interrupted: `POST /score` (see `RemoteReward`) and `GET /health`.

    A request is answered with status 200 and `{"rewards": [...]}`, 401 without the right token, 413 beyond a limit, 422
    where it cannot be scored as it is, and 500 where the function failed. What the function logs stays here.

    Args:
        reward: reward function: import path, or class_path and init_args. Give this or `model`.
        model: folder or hub name of a sequence-classification model with one output, on the CPU; for other devices
            give `reward` with the class_path `lightrl.rewards.model.ModelReward`.
        host: address to listen at. Beyond loopback a token is required.
        port: TCP port.
        token: bearer token that `POST /score` asks for. Other users of the machine can see command lines: prefer
            `token_env`.
        token_env: environment variable with the token, read where `token` is not given; unset means no token.
        max_rows: most rows per request; more are refused.
        max_bytes: largest request in bytes; larger ones are refused without being read to the end.
        max_concurrency: most calls of the function at a time; further requests wait. The function's own
            `max_concurrency` attribute wins.
        timeout: seconds per call of the function, after which the request is answered with 500; None for no limit.

    Raises:
        ValueError: not exactly one of `reward` and `model`, a public address without token, a limit below 1, or the
            extra `server` is not installed.
    """
    if (reward is None) == (model is None):
        raise ValueError(f"serve_reward: reward={reward!r}, model={model!r}: give exactly one of the two.")
    token = token or os.environ.get(token_env) or None
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"serve_reward: host={host!r} can be reached from other machines: set a token in ${token_env}, "
            "or listen at 127.0.0.1."
        )
    if min(max_rows, max_bytes, max_concurrency) < 1 or (timeout is not None and timeout <= 0):
        raise ValueError(
            f"serve_reward: max_rows={max_rows}, max_bytes={max_bytes}, max_concurrency={max_concurrency}, "
            f"timeout={timeout}: must be at least 1 (timeout above 0, or None)."
        )
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve_reward needs {' and '.join(missing)}: pip install 'lightrl[server]'.")
    function = RewardFunction(*_function(reward, model))
    limit = getattr(function.function, "max_concurrency", None) or max_concurrency
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it is meant to end
        asyncio.run(_serve(function, host, port, token, max_rows, max_bytes, limit, timeout))


async def _serve(
    function: RewardFunction,
    host: str,
    port: int,
    token: str | None,
    max_rows: int,
    max_bytes: int,
    max_concurrency: int,
    timeout: float | None,
) -> None:
    import uvicorn

    from lightrl.rewards.server_app import create_app

    app = create_app(
        function,
        token=token,
        max_rows=max_rows,
        max_bytes=max_bytes,
        max_concurrency=max_concurrency,
        timeout=timeout,
    )
    config = uvicorn.Config(app, host=host, port=port, timeout_graceful_shutdown=5)
    try:
        await uvicorn.Server(config).serve()
    finally:
        closing = getattr(function.function, "close", lambda: None)()
        if inspect.isawaitable(closing):
            await closing


def _function(reward: RewardSpec | None, model: str | None) -> tuple[str, RewardFn]:
    if model is not None:
        from lightrl.rewards.model import ModelReward

        return model, ModelReward(model)
    assert reward is not None
    function = load_reward(reward)
    return reward_name(function), function


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

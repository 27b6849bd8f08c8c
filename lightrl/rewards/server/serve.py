"""`lightrl serve-reward`: any reward function or sequence-classification model behind HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any, Optional

from lightrl.checkpoints.redaction import remember_secret
from lightrl.compat.arguments import above, at_least, bearer_token, require_packages
from lightrl.rewards.base import RewardFn, RewardSpec, load_reward, reward_name
from lightrl.rewards.calls import RewardFunction

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


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

    The server trusts whoever has the token. If others can reach it, put a reverse proxy in front, which limits
    connections and slow clients.

    Args:
        reward: reward function: import path, or class_path and init_args. Give this or `model`.
        model: folder or hub name of a sequence-classification model with one output, on the CPU; for other devices
            give `reward` with the class_path `lightrl.rewards.model.ModelReward`.
        host: address to listen at. Beyond loopback a token is required.
        port: TCP port; 0 takes any that is free.
        token: bearer token that `POST /score` asks for. Other users of the machine can see command lines: prefer
            `token_env`.
        token_env: environment variable with the token, read where `token` is not given; unset means no token.
        max_rows: most rows per request; more are refused.
        max_bytes: largest request in bytes; larger ones are refused without being read to the end. So are images, or
            videos, of more than 16 times as many pixels together.
        max_concurrency: most calls of the function at a time; further requests wait. The function's own
            `max_concurrency` attribute wins.
        timeout: seconds per call of the function, after which the request is answered with 500; None for no limit.

    Raises:
        ValueError: not exactly one of `reward` and `model`, a public address without token, a token that no header can
            carry, an address where it cannot listen, a limit below 1, or the extra `server` is not installed.
    """
    if (reward is None) == (model is None):
        raise ValueError(f"serve_reward: reward={reward!r}, model={model!r}: give exactly one of the two.")
    token = token or os.environ.get(token_env) or None
    remember_secret(token or "")
    bearer_token(f"serve_reward: the token of --token or ${token_env}", token)
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"serve_reward: host={host!r} can be reached from other machines: set a token in ${token_env}, "
            "or listen at 127.0.0.1."
        )
    for name, limit in {"max_rows": max_rows, "max_bytes": max_bytes, "max_concurrency": max_concurrency}.items():
        at_least(f"serve_reward: {name}", limit, 1)
    above("serve_reward: timeout", timeout, or_none="for no limit")
    require_packages("serve_reward", "server", "fastapi", "uvicorn")
    with _listening(host, port) as listeners:  # before a model loads, which takes long
        function = RewardFunction(*_function(reward, model))
        import uvicorn

        from lightrl.rewards.server.app import create_app

        app = create_app(
            function,
            token=token,
            max_rows=max_rows,
            max_bytes=max_bytes,
            max_concurrency=function.max_concurrency or max_concurrency,
            timeout=timeout,
        )
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http="h11",
            ws="none",
            lifespan="off",  # it has none, and would tell of a second Ctrl-C by a traceback
            timeout_graceful_shutdown=5,
        )
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it is meant to end
            asyncio.run(_serve(uvicorn.Server(config), listeners, function))


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """One socket for each address of the host; clients that connect before it is served wait.

    Raises:
        ValueError: it cannot listen there; says why.
    """
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for number, (family, _, _, _, address) in enumerate(addresses, 1):
                try:
                    listeners.append(opened.enter_context(socket.create_server(address, family=family)))
                except OSError as error:  # "localhost" has an IPv6 address also where the machine has IPv4 only
                    if error.errno not in _NO_SUCH_ADDRESS or (number == len(addresses) and not listeners):
                        raise
        except (OSError, UnicodeError) as error:  # no such host, no address of this machine, or a port in use
            raise ValueError(
                f"serve_reward: host={host!r}, port={port}: {error}. Give an address of this machine, such as "
                "127.0.0.1, and a port above 1023 that nobody listens at."
            ) from error
        yield listeners


async def _serve(server: Any, listeners: list[socket.socket], function: RewardFunction) -> None:
    places = ", ".join("{}, port {}".format(*listener.getsockname()) for listener in listeners)
    logging.getLogger("uvicorn.error").info("Listening at %s (Ctrl-C ends it)", places)
    try:
        await server.serve(sockets=listeners)
    finally:
        await function.close()


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

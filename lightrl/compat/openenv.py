"""OpenEnv client that keeps error details and uses one session per game."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx


class OpenEnvError(RuntimeError):
    """Raised for an error response from the server."""

    def __init__(self, message: str, code: str, errors: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(f"Server error: {message} (code: {code})")
        self.code = code  # such as VALIDATION_ERROR for a message that doesn't match the server's models
        self.errors = list(errors)  # of Pydantic, each with a location `loc` and a text `msg`


def make_client(url: str, timeout: float) -> Any:
    """Creates a client of an OpenEnv server that raises `OpenEnvError`, and waits `timeout` seconds for responses."""
    from openenv.core import GenericEnvClient

    class Client(GenericEnvClient):  # type: ignore[misc]
        async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
            await self._send(message)
            response: dict[str, Any] = await self._receive()
            if response.get("type") == "error":
                data = response.get("data", {})
                raise OpenEnvError(data.get("message", ""), data.get("code", ""), data.get("errors") or ())
            return response

        async def _ensure_connected(self) -> None:
            if self._ws is None or self._ws.state.name != "OPEN":
                raise ConnectionError(f"the server at {url} ended the session of this game")

    return Client(base_url=url, connect_timeout_s=timeout, message_timeout_s=timeout, mode="simulation")


async def action_schema(url: str, timeout: float) -> dict[str, Any]:
    """Returns the JSON schema of an OpenEnv server's actions, or raises an error after `timeout` seconds."""
    url = url.replace("ws", "http", 1) if url.startswith("ws") else url
    async with httpx.AsyncClient(timeout=timeout) as client:
        response = await client.get(f"{url.rstrip('/')}/schema")
        response.raise_for_status()
        return dict(response.json()["action"])

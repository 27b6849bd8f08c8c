"""OpenEnv's client, with the details of errors that servers answer, and one session per game."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

PRIVATE = {
    "openenv.core:GenericEnvClient._send": "sends a message",
    "openenv.core:GenericEnvClient._receive": "receives the answer, of which its caller drops the details of errors",
    "openenv.core:GenericEnvClient._send_and_receive": "overridden to keep them",
    "openenv.core:GenericEnvClient._ws": "the connection, which is one session of the server",
    "openenv.core:GenericEnvClient._ensure_connected": "overridden, because it would connect to a new session",
}
"""What is used of openenv 0.10 beyond its documented interface, and why."""


class ServerError(RuntimeError):
    """An error that the server answered.

    Attributes:
        code: Name of the kind, such as "VALIDATION_ERROR" for a message that does not fit the server's models.
        errors: Pydantic's errors, each with a place `loc` and a text `msg`; empty for other kinds.
    """

    def __init__(self, message: str, code: str, errors: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(f"Server error: {message} (code: {code})")
        self.code = code
        self.errors = list(errors)


def make_client(url: str, timeout: float) -> Any:
    """A client of an OpenEnv server that raises `ServerError`.

    Args:
        url: Of the server.
        timeout: Seconds that connecting and each answer may take.
    """
    from openenv.core import GenericEnvClient

    class Client(GenericEnvClient):  # type: ignore[misc]
        async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
            await self._send(message)
            response: dict[str, Any] = await self._receive()
            if response.get("type") == "error":
                data = response.get("data", {})
                raise ServerError(data.get("message", ""), data.get("code", ""), data.get("errors") or ())
            return response

        async def _ensure_connected(self) -> None:
            if self._ws is None or self._ws.state.name != "OPEN":
                raise ConnectionError(f"the server at {url} ended the session of this game")

    return Client(base_url=url, connect_timeout_s=timeout, message_timeout_s=timeout, mode="simulation")


async def action_schema(url: str, timeout: float) -> dict[str, Any]:
    """JSON schema of the actions of an OpenEnv server.

    Args:
        url: Of the server.
        timeout: Seconds that it may take.
    """
    url = url.replace("ws", "http", 1) if url.startswith("ws") else url
    async with httpx.AsyncClient(timeout=timeout) as client:
        response = await client.get(f"{url.rstrip('/')}/schema")
        response.raise_for_status()
        return dict(response.json()["action"])

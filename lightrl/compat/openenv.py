"""OpenEnv's client, with the details of errors that servers answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PRIVATE = {
    "openenv.core:GenericEnvClient._send": "sends a message",
    "openenv.core:GenericEnvClient._receive": "receives the answer, of which its caller drops the details of errors",
    "openenv.core:GenericEnvClient._send_and_receive": "overridden to keep them",
}
"""What is used of openenv-core 0.3 beyond its documented interface, and why."""


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

    return Client(base_url=url, connect_timeout_s=timeout, message_timeout_s=timeout, mode="simulation")

"""Ends uvicorn's connections with the server.

Relies on: `Server.server_state.connections` (seen in 0.30 to 0.54), without which a server that ends leaves its clients
waiting.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from uvicorn import Server


async def serve(server: Server, listener: socket.socket) -> None:
    """Serves on a socket until `should_exit`; whatever ends it, no connection stays open."""
    try:
        await server.serve(sockets=[listener])
    finally:
        connections: list[Any] = list(server.server_state.connections)
        for connection in connections:
            connection.transport.abort()


def cut(server: Server) -> None:
    """Tells the clients of a server whose loop broke off that it is gone."""
    connections: list[Any] = list(server.server_state.connections)
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

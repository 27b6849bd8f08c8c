"""Ports for servers that are told theirs: kept from everyone else until the server takes it, and after it died."""

from __future__ import annotations

import socket


def held_port() -> socket.socket:
    """A socket that holds a free port for as long as it is open; `getsockname()[1]` is the number.

    It never listens, so that a server that sets SO_REUSEADDR, as servers do, may bind beside it, while no other process
    is given the port by chance. One that was bound and closed again could be anybody's by the time the server starts.
    """
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))  # a port of nobody else's
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now, or it could have been shared with another
    return holder

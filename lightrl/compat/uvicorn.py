"""uvicorn's HTTP protocol with time limits on reading and writing.

Relies on: `H11Protocol` of `uvicorn.protocols.http.h11_impl`, its `transport`, its `conn` (an `h11.Connection`), its
`send_400_response`, and its `cycle` with `response_complete` and `more_body`; `Server.server_state.connections` (seen
in 0.30 to 0.54). uvicorn bounds how long a kept connection idles and how long a shutdown takes, but not how long a
client may take to send a request or to read an answer, so half-sent requests and unread answers hold connections for
ever; and h11 bounds a request's head only where it comes in parts.
`tests/rewards/test_server_limits.py` fails where a release changes this.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial
from typing import Any

import h11
from uvicorn import Server
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["bounded_protocol", "cut", "serve"]

HEAD_SECONDS = 10.0
"""Time for a request's line and headers, where the limit on the whole request is not shorter."""


def bounded_protocol(read_timeout: float, max_connections: int) -> Any:
    """What `uvicorn.Config(http=...)` takes to bound connections and the time to read a request.

    A request whose headers are not there after 10 seconds, or which is not there as a whole after `read_timeout`
    seconds, is cut off; so is a client that takes no more of its answers for as long. Where a connection too many
    comes, the oldest one that does not read, or that sends requests before it is answered, is cut off for it, or else
    the oldest that is still sending its request; where all others are being answered, the new one is. A head above the
    configured limit is answered with 431.

    Args:
        read_timeout: seconds, above 0.
        max_connections: at least 1.
    """
    return partial(_BoundedProtocol, read_timeout, max_connections, {})


class _Connection(h11.Connection):
    """Refuses heads above the limit that come as a whole, too.

    Attributes:
        too_long: whether a head was.
    """

    def __init__(self, our_role: Any, limit: int | None) -> None:
        super().__init__(our_role, *(() if limit is None else (limit,)))
        self.limit = limit
        self.too_long = False

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and self.limit is not None:
            head = (
                len(event.method) + len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
            )
            if head > self.limit:
                self.too_long = True
                raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
        return event


class _BoundedProtocol(H11Protocol):  # type: ignore[misc, unused-ignore]
    """One connection.

    Args:
        read_timeout, max_connections: see `bounded_protocol`.
        all_open: the server's connections by id, in the order in which they came.
        uvicorn: what uvicorn gives its protocols.
    """

    def __init__(
        self, read_timeout: float, max_connections: int, all_open: dict[int, _BoundedProtocol], **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self.conn = _Connection(h11.SERVER, self.config.h11_max_incomplete_event_size)
        self.read_timeout = read_timeout
        self.max_connections = max_connections
        self.all_open = all_open
        self.timer: asyncio.TimerHandle | None = None
        self.unread: asyncio.TimerHandle | None = None  # while the client takes nothing of its answers
        self.began = 0.0

    @property
    def reading(self) -> bool:
        """Whether a request is still to come, in part or as a whole."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def pipelines(self) -> bool:
        """Whether requests wait behind the one that is answered, as no usual client sends them."""
        return not self.reading and bool(self.conn.trailing_data[0])

    @property
    def head_read(self) -> bool:
        """Whether the headers of the request that is being read are there."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.all_open) >= self.max_connections:
            others = list(self.all_open.values())
            oldest = next((other for other in others if other.unread is not None or other.pipelines), None)
            oldest = oldest or next((other for other in others if other.reading), self)
            oldest.transport.abort()
            self.all_open.pop(id(oldest), None)
            if oldest is self:
                return
        self.all_open[id(self)] = self
        self.watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.all_open.pop(id(self), None)
        self.stop()
        self.written()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts the clock of a client that does not read: what it was sent fills all buffers."""
        super().pause_writing()
        if self.unread is None:
            self.unread = self.loop.call_later(self.read_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.written()

    def written(self) -> None:
        """Stops the clock of a client that does not read."""
        if self.unread is not None:
            self.unread.cancel()
            self.unread = None

    def send_400_response(self, msg: str) -> None:
        if self.conn.too_long and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
            self.transport.write(
                self.conn.send(
                    h11.Response(status_code=431, headers=headers, reason=b"Request Header Fields Too Large")
                )
                + self.conn.send(h11.Data(data=b"The request's line and headers are too long."))
                + self.conn.send(h11.EndOfMessage())
            )
            self.transport.close()
        else:
            super().send_400_response(msg)

    def watch(self) -> None:
        """Starts the clock with a request's first byte, and stops it with its last."""
        if not self.reading:
            self.stop()
        elif self.timer is None:
            self.began = self.loop.time()
            self.timer = self.loop.call_later(min(HEAD_SECONDS, self.read_timeout), self.expire)

    def stop(self) -> None:
        """Stops the clock."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def expire(self) -> None:
        """Cuts the client off, unless only the body is still to come and has time left."""
        left = self.began + self.read_timeout - self.loop.time()
        if self.head_read and left > 0:  # the body may take as long as it all may
            self.timer = self.loop.call_later(left, self.expire)
        elif self.reading:
            self.transport.abort()


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

"""An MCP server with a few tools, over its standard streams or, with a port, over HTTP."""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("calculator", log_level="CRITICAL")
total = 0


@server.tool()
def add(a: int) -> str:
    """Adds to the total."""
    global total
    total += a
    return f"total {total}"


@server.tool()
def fails() -> str:
    """Cannot be done."""
    raise ToolError("out of paper")


@server.tool()
def sleeps() -> str:
    """Takes long."""
    time.sleep(30)
    return "late"


@server.tool()
def dies() -> str:
    """Takes the server with it."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()

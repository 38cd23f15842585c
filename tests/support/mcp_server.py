"""An MCP server for tests: `python mcp_server.py`, or with a port, over HTTP on the loopback."""

from __future__ import annotations

import os
import sys
import time
from typing import Literal

from mcp.server import MCPServer
from mcp.types import ImageContent
from pydantic import BaseModel

server = MCPServer("tests")
count = 0


class Place(BaseModel):
    row: int
    column: int


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def move(place: Place, way: Literal["up", "down"]) -> dict[str, int]:
    """Move a place by a row."""
    return {"row": place.row + (1 if way == "down" else -1), "column": place.column}


@server.tool()
def counted() -> str:
    """How often this server was asked."""
    global count
    count += 1
    return str(count)


@server.tool()
def broken() -> str:
    """Fail."""
    raise ValueError("the shelf is empty")


@server.tool()
def slow(seconds: float) -> str:
    """Take a while."""
    time.sleep(seconds)
    return "done"


@server.tool()
def picture() -> ImageContent:
    """Draw."""
    return ImageContent(type="image", data="AAAA", mime_type="image/png")


@server.tool()
def variable(name: str) -> str:
    """Read a variable of the environment."""
    return os.environ.get(name, "none")


@server.tool()
def die() -> str:
    """End."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")

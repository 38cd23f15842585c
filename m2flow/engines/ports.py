"""Ports of this host for servers that take long until they listen."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from m2flow.errors import EngineError

_FIRST = 20_000
"""Ray gives its workers those from 10,002 on."""
_LAST = 32_767
_FEWEST = 1_000
"""A host that gives nearly all of its ports to who asks for any leaves no others to choose from."""
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(number: int) -> list[int]:
    """Free at every address of this host, and below those that the kernel gives to who asks for any: nobody is given one in between.

    Raises:
        EngineError: there are not so many.
    """
    last = _last()
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(_FIRST, last + 1), last + 1 - _FIRST):
            if len(found) == number:
                return found
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(port)
    raise EngineError(f"of the ports {_FIRST} to {last} only {len(found)} are free, and a server needs {number}")


def _last() -> int:
    try:
        first_given = int(_GIVEN.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LAST
    return first_given - 1 if first_given - _FIRST >= _FEWEST else _LAST

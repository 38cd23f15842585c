"""Ports that stay free until a server takes them a moment later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_FIRST = 20_000
"""Ray gives its workers those from 10,002 on."""


def free_ports(number: int) -> list[int]:
    """Free at every address of this machine, and none that the kernel gives to who asks for any: nobody is given one in between."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = [port for port in range(_FIRST, 1 << 16) if not first <= port <= last] or list(range(_FIRST, 1 << 16))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in candidates:
            if len(found) == number:
                break
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(port)
    assert len(found) == number, "no port is free"
    return found

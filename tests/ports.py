"""Ports that stay free until a server takes them a moment later."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_FIRST = 20_000
"""Ray gives its workers those from 10,002 on."""


def free_ports(number: int) -> list[int]:
    """Free at every address of this machine, and below those that the kernel gives to who asks for any: nobody is given one in between."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(_FIRST, first_given), first_given - _FIRST):
            if len(found) == number:
                break
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(port)
    assert len(found) == number, "no port is free"
    return found

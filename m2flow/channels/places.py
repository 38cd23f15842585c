"""Where a socket may listen: in a private directory, on the loopback interface, or on an interface that is named.

A place is written `ipc:DIRECTORY` (one that only we can enter), `ipc:` (a new one), `tcp` (a port of loopback that is free), `tcp:PORT`,
`tcp:ADDRESS` or `tcp:ADDRESS:PORT`, the address an IPv4 one of this host.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
import tempfile

from m2flow.errors import SpecError

_LOOPBACK = "127.0.0.1"
MAX_IPC_PATH_BYTES = 106
"""`sun_path` holds 108 bytes on Linux with its final zero; libzmq and other systems leave a little less."""


def address_of(place: str) -> str:
    """The ZeroMQ address to bind; an `ipc` one is new each time. Raises `SpecError`.

    >>> address_of("tcp"), address_of("tcp:5555"), address_of("tcp:10.0.0.7")
    ('tcp://127.0.0.1:*', 'tcp://127.0.0.1:5555', 'tcp://10.0.0.7:*')
    """
    transport, _, rest = place.partition(":")
    if transport == "tcp":
        host, _, port = rest.rpartition(":")
        if "." in port:
            host, port = port, ""
        if _is_address(host or _LOOPBACK) and (not port or (port.isdecimal() and int(port) < 65536)):
            return f"tcp://{host or _LOOPBACK}:{port or '*'}"
    if transport != "ipc" or not rest:
        raise SpecError(f"{place!r} is no place to listen at", now="Write ipc:DIRECTORY, tcp, tcp:PORT, tcp:ADDRESS or tcp:ADDRESS:PORT.")
    path = os.path.join(rest, secrets.token_hex(6))
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise SpecError(
            f"the socket path {path} is longer than {MAX_IPC_PATH_BYTES} bytes, which the system can't bind",
            now="Name a directory with a shorter path, or use tcp.",
        )
    _require_private(rest)
    return f"ipc://{path}"


def is_private(address: str) -> bool:
    """Whether only this host can reach a ZeroMQ address."""
    if address.startswith("ipc://"):
        return True
    return ipaddress.IPv4Address(address.removeprefix("tcp://").rpartition(":")[0]).is_loopback


def _is_address(host: str) -> bool:
    """One that others can connect to: not a name, which may mean several, and not the wildcard."""
    try:
        return not ipaddress.IPv4Address(host).is_unspecified
    except ValueError:
        return False


def private_directory() -> str:
    """A new directory that only this user can enter, its path short enough for sockets. The caller removes it."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="m2flow-", dir=parent if len(os.fsencode(parent)) <= MAX_IPC_PATH_BYTES - 32 else "/tmp")


def _require_private(directory: str) -> None:
    try:
        status = os.lstat(directory)
    except OSError as error:
        # It is not made here: a directory of a run that is over would come back, and nobody would remove it.
        raise SpecError(f"can't listen in {directory}: {error.strerror}", now="Make it with `mkdir -m 700`, or name another.") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SpecError(
            f"{directory} is not a directory that only you can enter, so others could reach the sockets in it",
            now=f"Run `chmod 700 {directory}`, or name another.",
        )

"""Where a socket may listen, and the key of those who may talk to it.

A place is written `ipc:DIRECTORY` (one that only its owner can enter), `ipc:` (a new one), `tcp` (a free port of loopback), `tcp:PORT`,
`tcp:ADDRESS` or `tcp:ADDRESS:PORT`, where the address is an IPv4 address of this host.

    m2flow keys FILE --write_keys--> FILE --read_keys--> Keys --> m2flow.channels.zeromq

All hosts and processes of a cluster share one key pair: each proves by it that it belongs, as listener and as caller. The file is readable
by its owner alone, and must be copied to other hosts in a way that keeps it so (`scp -p`).

Source:
    CurveZMQ, rfc.zeromq.org/spec/26: elliptic-curve keys, perfect forward secrecy. Keys are written in Z85 (spec 32).
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
import tempfile
from pathlib import Path

import msgspec

from m2flow.errors import SpecError

_HEAD = "m2flow key 1"
_LENGTH = 40
_ALPHABET = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")


class Keys(msgspec.Struct, frozen=True):
    """A CURVE key pair, 40 characters of Z85 each; or, with `encrypts=False`, a shared secret that authenticates and encrypts nothing."""

    public: str
    secret: str
    encrypts: bool = True

    def __repr__(self) -> str:
        return f"Keys({self.public!r}, secret)"


def write_keys(path: Path, keys: Keys) -> None:
    """Write a key pair to a new file that only its owner can read.

    Raises:
        SpecError: there is one already, or it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{_HEAD}\npublic {keys.public}\nsecret {keys.secret}\n")
    except FileExistsError:
        raise SpecError(f"{path} exists already", now="Its holders could not talk to holders of a new key. Remove it first.") from None
    except OSError as error:
        raise SpecError(f"can't write the key {path}: {error.strerror}") from None


def read_keys(path: Path) -> Keys:
    """Read a key file that `write_keys` wrote.

    Raises:
        SpecError: it can't be read, others than its owner can read it, or it is no key.
    """
    now = f"Make one with `m2flow keys {path}`."
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid != os.getuid():
                raise SpecError(f"others than you can read the key {path}, or it is not yours", now=f"chmod 600 {path}")
            lines = file.read(4096).splitlines()
    except OSError as error:
        raise SpecError(f"can't read the key {path}: {error.strerror}", now=now) from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is no key of m2flow", now=now) from None
    found = dict(line.split(" ", 1) for line in lines[1:] if " " in line)
    parts = [found.get(name, "") for name in ("public", "secret")]
    if lines[:1] != [_HEAD] or any(len(part) != _LENGTH or not _ALPHABET.issuperset(part) for part in parts):
        raise SpecError(f"{path} is no key of m2flow", now=now)
    return Keys(parts[0], parts[1])


# ---- places to listen at

_LOOPBACK = "127.0.0.1"
MAX_IPC_PATH_BYTES = 106
"""`sun_path` holds 108 bytes on Linux with its final zero; libzmq and other systems leave a little less."""


def address_of(place: str) -> str:
    """Return the ZeroMQ address to bind for a place; an `ipc` address is new each time. Raises `SpecError`.

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
    """Whether it is an address to connect to: not a host name, which may mean several, and not the wildcard."""
    try:
        return not ipaddress.IPv4Address(host).is_unspecified
    except ValueError:
        return False


def private_directory() -> str:
    """Create a directory that only this user can enter, its path short enough for sockets. The caller removes it."""
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

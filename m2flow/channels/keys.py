"""The key of a cluster: who has it may talk to its sockets, and who has not learns nothing.

    m2flow keys FILE --write_keys--> FILE --read_keys--> Keys --> m2flow.channels.zeromq

One pair for all hosts and processes of a cluster: each proves by it that it belongs, as listener and as caller. The file is for its
owner alone; it goes to other hosts by a way that keeps it so (`scp -p`).

Source:
    CurveZMQ, rfc.zeromq.org/spec/26: elliptic-curve keys, perfect forward secrecy. Keys are written in Z85 (spec 32).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from m2flow.errors import SpecError

_HEAD = "m2flow key 1"
_LENGTH = 40
_ALPHABET = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")


class Keys(msgspec.Struct, frozen=True):
    """A pair of CURVE keys, 40 characters of Z85 each; or a secret alone, that lets its holders in and encrypts nothing."""

    public: str
    secret: str
    encrypts: bool = True

    def __repr__(self) -> str:
        return f"Keys({self.public!r}, secret)"


def write_keys(path: Path, keys: Keys) -> None:
    """Write a new file that only its owner can read.

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
    """
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

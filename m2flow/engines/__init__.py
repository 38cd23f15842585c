"""Engines execute the calls of roles: the contract, the registry, and a package for each family of engines."""

from __future__ import annotations

from collections.abc import Callable

PLACES: list[Callable[[], str]] = []
"""What engines of this process have to say of where they are in a call, in words; empty: in none. Heartbeats carry it. For any thread."""


def place() -> str:
    """Describe where the engines of this process are, in words; empty: in no call."""
    return "; ".join(filter(None, (words() for words in PLACES)))

"""Messages are asserted by their parts: the number, the name, the line; not by whole sentences."""

from __future__ import annotations


def lacks(message: str, *parts: str) -> list[str]:
    """Return the message after the parts that it does not have; empty if it has all, in this order and without overlap."""
    at, missing = 0, []
    for part in parts:
        found = message.find(part, at)
        if found < 0:
            missing.append(part)
        else:
            at = found + len(part)
    return [*missing, message] if missing else []

"""A command in a terminal of its own, as someone who looks at it sees it: what it drew, frame by frame."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Callable, Mapping, Sequence

import programs

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown_by(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    columns: int = 100,
    rows: int = 40,
    look: Callable[[str], object] = lambda text: None,
) -> tuple[int, str]:
    """The exit status and all that was written to the terminal, without control sequences.

    Args:
        look: is shown all that was written so far, each time that something was.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = programs.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(env), start_new_session=True)
    os.close(theirs)
    written = bytearray()
    try:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # The last process that had the terminal has closed it.
                break
            if not part:
                break
            written += part
            look(_text(written))
    finally:
        os.close(ours)
        if process.poll() is None:
            process.wait()
    return process.returncode, _text(written)


def _text(written: bytearray) -> str:
    return _CONTROL.sub("", written.decode("utf-8", "replace")).replace("\r", "\n")

"""What a worker's heartbeat says of its process, read in the beating thread while the main one may be busy for long.

VitalSigns.pulse --> Pulse with processor, memory, GPU, and the time here
Echo --VitalSigns.hear--> the next pulse says how long the two were on their way
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import final

import psutil

from m2flow.errors import DecodeError
from m2flow.micro import messages as m
from m2flow.micro.work.gpu_use import GpuUse
from m2flow.observe.recorder import now_ns


@final
class VitalSigns:
    """Of this process. The beating thread alone uses it, once it is made."""

    def __init__(self, progress: Callable[[], tuple[int, bool]], gpu: GpuUse | None, anchor_ns: int) -> None:
        """
        Args:
            progress: turns of the main loop so far, and whether it is in a user's function.
            gpu: that it uses, if it can be asked.
            anchor_ns: what makes the recorder's times Unix times, in this process.
        """
        self._progress = progress
        self._anchor_ns = anchor_ns
        self._process = psutil.Process(os.getpid())
        self._gpu = gpu
        self._exchange: tuple[int, int, int, int] | None = None

    def pulse(self) -> bytes:
        """The next heartbeat."""
        num_turns, is_in_users_code = self._progress()
        exchange, self._exchange = self._exchange, None
        memory: int | None = None
        with contextlib.suppress(psutil.Error, OSError):
            memory = self._process.memory_info().rss
        use, gpu_memory = self._gpu.read() if self._gpu is not None else (None, None)
        return m.encode(
            m.Pulse(num_turns, time.process_time(), is_in_users_code, self._now_ns(), exchange, memory, use, gpu_memory)
        )  # The time is read last: what comes before it is not on the way.

    def hear(self, body: bytes) -> None:
        """An answer to a heartbeat. What is none goes: the next one says the same."""
        back_ns = self._now_ns()
        try:
            echo = m.decode_echo(body)
        except DecodeError:
            return
        self._exchange = (echo.asked_ns, echo.heard_ns, echo.answered_ns, back_ns)

    def _now_ns(self) -> int:
        return now_ns() + self._anchor_ns

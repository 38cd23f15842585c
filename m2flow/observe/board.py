"""Metrics for TensorBoard, written beside the run: nobody who has a number to write waits for it.

    MetricsWriter --Board.add--> a thread --tensorboardX--> tensorboard/

The library brings torch with it, which takes seconds to import, and much longer on a busy machine. Would the controller wait for that,
all of its workers would wait for the controller.
"""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from typing import final

from m2flow.errors import host_error

_Number = tuple[str, float, int, float]
_NOTHING: _Number = ("", 0.0, 0, 0.0)
_FLUSH_S = 10.0


@final
class Board:
    """Takes numbers from the moment it is made; `close` waits until all are written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers: queue.SimpleQueue[_Number | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="tensorboard", daemon=True)
        self._thread.start()

    def add(self, name: str, value: float, step: int, time_s: float) -> None:
        self._numbers.put((name, value, step, time_s))

    def close(self) -> None:
        """Raises what writing raised."""
        self._numbers.put(None)
        self._thread.join()
        if self._error is not None:
            raise host_error(f"TensorBoard's files in {self._directory} can't be written", self._error) or self._error

    def _write(self) -> None:
        # The library's own writer has a queue and a thread beside: when its disk is full the thread ends, and who fills the queue waits.
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.summary import scalar

            self._directory.mkdir(parents=True, exist_ok=True)
            writer, flushed_s = EventsWriter(str(self._directory / "events")), time.monotonic()
            while (number := self._next(flushed_s + _FLUSH_S)) is not None:
                if number is not _NOTHING:
                    name, value, step, time_s = number
                    writer.write_event(Event(wall_time=time_s, step=step, summary=scalar(name, value)))
                if time.monotonic() >= flushed_s + _FLUSH_S:
                    writer.flush()
                    flushed_s = time.monotonic()
            writer.close()
        except BaseException as error:
            self._error = error

    def _next(self, until_s: float) -> _Number | None:
        """What is to be written next; nothing if the time is over."""
        try:
            return self._numbers.get(timeout=max(until_s - time.monotonic(), 0.0))
        except queue.Empty:
            return _NOTHING

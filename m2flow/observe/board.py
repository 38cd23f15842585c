"""Metrics for TensorBoard, written beside the run: nobody who has a number to write waits for it.

    MetricsWriter --Board.add--> a thread --tensorboardX--> tensorboard/

The library brings torch with it, which takes seconds to import, and much longer on a busy machine. Would the controller wait for that,
all of its workers would wait for the controller.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import final

_Number = tuple[str, float, int, float]


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
            raise self._error

    def _write(self) -> None:
        try:
            from tensorboardX import SummaryWriter

            writer = SummaryWriter(str(self._directory), flush_secs=10)
            while (number := self._numbers.get()) is not None:
                name, value, step, time_s = number
                writer.add_scalar(name, value, step, walltime=time_s)
            writer.close()
        except BaseException as error:
            self._error = error

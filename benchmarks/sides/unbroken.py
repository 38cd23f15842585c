"""A launcher for measuring the controller, whose workers never die."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m2flow.micro.control.launcher import Launcher


class Unbroken(Launcher):
    """Without a `start` and a `stop`; a worker that has to be helped ends the measurement."""

    def __init__(self, *args: Any, **more: Any) -> None:
        more.pop("flow_file", None)
        super().__init__(*args, **more)

    @property
    def place(self) -> str:
        return "tcp:127.0.0.1"

    def restart(self, worker: str, incarnation: int) -> None:
        raise SystemExit(f"{worker} died")

    def kill(self, worker: str) -> None:
        raise SystemExit(f"{worker} hangs")

    def ended(self) -> Mapping[str, str]:
        return {}

    def pid(self, worker: str) -> int:
        return 0

"""A launcher for measuring the controller, whose workers never die."""

from __future__ import annotations

from collections.abc import Mapping

from m2flow.micro.controller.launcher import Launcher


class Unbroken(Launcher):
    """Without a `start` and a `stop`; a worker that has to be helped ends the measurement."""

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

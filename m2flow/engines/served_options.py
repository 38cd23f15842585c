"""The options that all rollout engines with an inference server have: `rollout.options` of the cluster spec, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final

from m2flow.engines.server_installed import interpreter_of
from m2flow.engines.server_process import ServerOptions
from m2flow.errors import EngineError

_NAMES = ("python", "args", "env", "start_timeout_s", "url", "stream_interval", "weights_dir", "restarts", "hung_after_s", "keep_kv")
_STREAM_INTERVAL = 8
_RESTARTS = 2
_HUNG_AFTER_S = 120.0


@final
class ServedOptions:
    """Of one engine."""

    def __init__(self, engine: str, given: Mapping[str, object], own: tuple[str, ...]) -> None:
        self._engine = engine
        self._given = given
        self._names = (*_NAMES, *own)

    def check(self) -> None:
        """Raises `EngineError` for what is no option, or no value of one."""
        if unknown := sorted(set(self._given) - set(self._names)):
            raise EngineError(
                f"the rollout engine {self._engine} has no option {', '.join(unknown)}", now=f"It has {', '.join(self._names)}."
            )
        for name in ("start_timeout_s", "hung_after_s", "restarts", "stream_interval"):
            self._number(name, 1.0)

    def is_set(self, name: str) -> bool:
        return bool(self._given.get(name))

    @property
    def url(self) -> str:
        """Of a server that runs already; empty: one is started."""
        return str(self._given.get("url", ""))

    @property
    def server(self) -> ServerOptions:
        timeout = self._number("start_timeout_s", ServerOptions.start_timeout_s)
        return ServerOptions(interpreter_of(self._given), str(self._given.get("args", "")), str(self._given.get("env", "")), timeout)

    @property
    def stream_interval(self) -> int:
        """Tokens between two pieces of news of a sample."""
        return max(1, int(self._number("stream_interval", _STREAM_INTERVAL)))

    @property
    def restarts(self) -> int:
        return int(self._number("restarts", _RESTARTS))

    @property
    def hung_after_s(self) -> float:
        return self._number("hung_after_s", _HUNG_AFTER_S)

    @property
    def keeps_caches(self) -> bool:
        """What runs keeps its caches when weights change."""
        return self.is_set("keep_kv")

    @property
    def weights_place(self) -> str | None:
        """Where weights are handed over; None: wherever temporary files are."""
        if given := str(self._given.get("weights_dir", "")):
            return given
        return "/dev/shm" if Path("/dev/shm").is_dir() else None

    def _number(self, name: str, default: float) -> float:
        value = self._given.get(name, default)
        if not isinstance(value, int | float) or value < 0:
            raise EngineError(f"the option {name} of the rollout engine {self._engine} is {value!r}; it must be a number from 0 on")
        return float(value)

"""The objects of users' roles in this process: made when the first call comes, and kept to the end of the run.

A role has up to two here: one with its state, for calls that declare what they read or write, and one for all others, which may
run anywhere and must not see that state. So what a call sees does not depend on where it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from m2flow.errors import OpError
from m2flow.macro.graph import Call
from m2flow.macro.user_roles import may_write
from m2flow.micro.work import performing


@final
class Instances:
    """By role. Any thread that runs a unit may ask."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bool], object] = {}
        self._making = threading.Lock()

    def method(self, call: Call) -> Callable[..., object]:
        """A role's method as a plain function of the call's arguments."""

        def run(*args: object, **kwargs: object) -> object:
            instance = self._instance(call)
            may_write(instance, bool(call.writes))
            bound = getattr(instance, str(call.options["method"]))
            return bound(*args, **kwargs)

        run.__name__ = str(call.options["method"])
        run.__qualname__ = call.name
        return run

    def make(self, call: Call) -> None:
        """Make the object that a call works on, if it is not there yet."""
        self._instance(call)

    def _instance(self, call: Call) -> object:
        key = str(call.options["instance"]), "state" in call.options
        with self._making:  # Two units at once must not make two.
            if key not in self._made:
                try:
                    self._made[key] = performing.function_of(call)()
                except Exception as error:
                    raise OpError(f"the role {key[0]} can't be made: {type(error).__name__}: {error}") from error
            return self._made[key]

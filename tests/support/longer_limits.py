"""For tests of which something must be done within a time limit, and something else must not: no limit is right on every machine.

One that fails with a short limit is tried again with ten times that, up to a limit which only a machine that stands still would break.
What is broken fails with all of them, and what works passes with the shortest on a machine that does not stand still.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable

import pytest

from m2flow.errors import M2FlowError

_LIMITS_S = (0.05, 0.5, 5.0, 50.0)


def with_longer_limits(test: Callable[..., None]) -> Callable[..., None]:
    """A test that takes `limit_s`, and may run several times."""

    @functools.wraps(test)
    def tried(*args: object, **given: object) -> None:
        for limit_s in _LIMITS_S[:-1]:
            with contextlib.suppress(AssertionError, M2FlowError, pytest.fail.Exception):
                return test(*args, limit_s=limit_s, **given)
        test(*args, limit_s=_LIMITS_S[-1], **given)

    signature = inspect.signature(test)
    tried.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[parameter for name, parameter in signature.parameters.items() if name != "limit_s"]
    )
    del tried.__wrapped__  # type: ignore[attr-defined]  # Or pytest would look for a fixture of that name.
    return tried

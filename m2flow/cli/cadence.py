"""`--checkpoint-every 20`, `5m`, `20,5m` or `never`: how often a run writes a checkpoint, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]  # generic in newer releases of click only
else:
    ParamType = click.ParamType

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Every(NamedTuple):
    """Steps, seconds, or both: whichever comes first. Neither: never."""

    steps: int | None
    seconds: float | None


class Cadence(ParamType):
    """As click reads it."""

    name = "steps|time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if isinstance(value, Every):
            return value
        steps, seconds = None, None
        for part in str(value).split(","):
            text = part.strip()
            unit = _SECONDS.get(text[-1:])
            try:
                if text == "never":
                    continue
                if unit is None:
                    steps = int(text)
                else:
                    seconds = float(text[:-1]) * unit
            except ValueError:
                self.fail(f"{value!r} is no number of steps (20), no time (90s, 5m, 1h), not both (20,5m), and not `never`", param, ctx)
        if (steps is not None and steps < 1) or (seconds is not None and not 0 < seconds < float("inf")):
            self.fail(f"{value!r}: it must be more than nothing", param, ctx)
        return Every(steps, seconds)

"""Options that say how much is recorded, and where it also goes: of `m2flow run` and `m2flow send`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from m2flow.spec import RunSettings

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]  # generic in newer releases of click only
else:
    ParamType = click.ParamType

_F = TypeVar("_F", bound=Callable[..., object])
_PLACES = ("tensorboard", "wandb", "mlflow")


class Places(ParamType):
    """Names with commas between them; `none` for none."""

    name = "name,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(",") if name.strip() not in ("", "none"))
        wrong = [name for name in names if name not in _PLACES]
        if wrong:
            self.fail(f"{wrong[0]!r} is none of {', '.join(_PLACES)}, none.", param, ctx)
        return names


to_option = click.option(
    "--metrics-to",
    type=Places(),
    metavar="NAME,...",
    help="Of tensorboard, wandb, mlflow; or none.  [default: tensorboard, and those that the environment configures]",
)


def record_options(function: _F) -> _F:
    """`--otlp`, `--metrics-to` and `--record-every`."""
    for option in (
        click.option(
            "--record-every", type=click.IntRange(min=1), metavar="N", help="N decode steps as one span, one group in N sample by sample."
        ),
        to_option,
        click.option("--otlp", metavar="URL", help="Spans and metrics also go there.  [default: OTEL_EXPORTER_OTLP_ENDPOINT]"),
    ):
        function = option(function)
    return function


def recording(settings: RunSettings, otlp: str | None, metrics_to: tuple[str, ...] | None, record_every: int | None) -> RunSettings:
    """The settings with what was given; a run that is taken up again may be told anew."""
    given = {"otlp": otlp, "metrics_to": metrics_to, "record_every": record_every}
    return settings.model_copy(update={name: value for name, value in given.items() if value is not None})

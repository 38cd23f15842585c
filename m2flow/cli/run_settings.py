"""`--setting NAME=VALUE` of `m2flow run`: the run settings that have no option of their own.

    --setting stopped_after_s=4 --setting turn_limit_s=none --> RunSettings

They change neither the mathematics nor the placement, so a run that goes on may be told anew.
"""

from __future__ import annotations

import click
from pydantic import ValidationError

from m2flow.errors import OptionError, did_you_mean
from m2flow.spec import RunSettings

_OWN = {
    "seed": "--seed",
    "eager": "--eager",
    "deterministic": "--deterministic",
    "runs_dir": "--runs-dir",
    "checkpoint_steps": "--checkpoint-every",
    "checkpoint_s": "--checkpoint-every",
    "checkpoints_kept": "--keep-checkpoints",
    "record_every": "--record-every",
    "otlp": "--otlp",
    "metrics_to": "--metrics-to",
}
SETTINGS = tuple(name for name in RunSettings.model_fields if name not in _OWN)
"""What can be given."""

settings_option = click.option(
    "--setting",
    "given_settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A run setting, like stopped_after_s=4; docs/guide/reliability.md lists them. May be repeated.",
)


def with_given(settings: RunSettings, given: tuple[str, ...]) -> RunSettings:
    """The settings with what the command line says.

    Raises:
        OptionError: there is no such setting, it has an option of its own, or it can't have this value.
    """
    found: dict[str, str | None] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if name in _OWN:
            raise OptionError(f"--setting {text}: {name} has an option of its own", now=f"Give {_OWN[name]}.")
        if name not in SETTINGS or not equals:
            hint = f"Give {name}=VALUE." if name in SETTINGS else did_you_mean(name, SETTINGS)
            raise OptionError(f"--setting {text}: {'no value' if name in SETTINGS else f'there is no run setting {name!r}'}", now=hint)
        found[name] = None if value == "none" else value
    try:
        return RunSettings.model_validate({**settings.model_dump(), **found})
    except ValidationError as error:
        wrong = error.errors()[0]
        names = [str(part) for part in wrong.get("ctx", {}).get("at", wrong["loc"])]
        raise OptionError(f"--setting {'.'.join(names)}: {wrong['msg']}", now="docs/guide/reliability.md lists the settings.") from None

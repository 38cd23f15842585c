"""What a plan file is of: flow, options, cluster and lengths, written beside the plan, so that the file can be simulated,
checked and run by itself.

    m2flow plan FLOW ... --out plan.json --origin_of--> {"of": {...}} --read_origin--> Origin

The plan that a run leaves has the same in the run's `config.json`. Limit: whether the flow is still the one that was planned is seen
by the checksum of its own file, not by what that imports.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from m2flow.errors import SpecError
from m2flow.micro.record.rundir import option_text, read_config
from m2flow.spec import ClusterSpec

KEY = "of"
"""Of the plan file's document."""


@dataclass(frozen=True)
class Origin:
    """What a plan was made of."""

    flow: str
    """Its file, as it was given: `flows/grpo.py`, or `flows/grpo.py:name`."""
    directory: str
    """Where that was said, and where relative paths are from."""
    sha256: str
    """Of the flow's file; empty: not known."""
    options: dict[str, object]
    cluster: ClusterSpec
    lengths: str = ""
    profile: str = ""
    assume: tuple[str, ...] = field(default=())
    seed: int = 0

    def flow_target(self, plan_file: str, usage: str) -> str:
        """The flow as it can be loaded from here.

        Args:
            usage: the command that takes the plan with another flow, which stands there as `FLOW`.
        Raises:
            SpecError: its file is gone, or is another one than the plan was made of.
        """
        file = Path(self.flow.partition(":")[0])
        if not file.is_file():
            is_there = (Path(self.directory) / file).is_file()
            where = f"{self.flow} in {self.directory}" if is_there else self.flow
            raise SpecError(
                f"the plan {plan_file} is of the flow {where}, and there is no such file {'here' if is_there else 'any more'}",
                # The lines of the flow, which a plan names, are relative to where it was made.
                now=f"Begin there: cd {self.directory}"
                if is_there
                else f"It was in {self.directory}. If it has moved, say where it is: {usage}",
            )
        if self.sha256 and _checksum(file) != self.sha256:
            raise SpecError(
                f"{file} has changed since the plan {plan_file} was made of it",
                now=f"Make a new plan (m2flow plan {self.flow} --out {plan_file}), or hold the old one against the flow as it is now: "
                f"{usage.replace('FLOW', self.flow, 1)}",
            )
        return self.flow

    def as_document(self) -> dict[str, object]:
        return {**vars(self), "cluster": self.cluster.model_dump(mode="json"), "assume": list(self.assume)}


def origin_of(
    target: str,
    options: Mapping[str, object],
    cluster: ClusterSpec,
    *,
    lengths: str = "",
    profile: Path | None = None,
    assume: tuple[str, ...] = (),
    seed: int = 0,
) -> Origin:
    """What a plan that is made now, here, is of."""
    file = Path(target.partition(":")[0])
    texts = {name: option_text(value) for name, value in options.items()}
    checksum = _checksum(file) if file.is_file() else ""
    return Origin(target, str(Path.cwd()), checksum, texts, cluster, lengths, str(profile or ""), assume, seed)


def read_origin(plan_file: Path, usage: str) -> Origin:
    """
    Args:
        usage: as in `Origin.flow_target`.
    Raises:
        SpecError: the file can't be read, or does not say what it is of.
    """
    try:
        document = json.loads(plan_file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(
            f"the plan {plan_file} can't be read: {error.strerror if isinstance(error, OSError) else error}",
            now=f"Make one: m2flow plan FLOW --out {plan_file}",
        ) from None
    found = document.get(KEY) if isinstance(document, dict) else None
    if found is None and (plan_file.parent / "config.json").is_file():
        config = read_config(plan_file.parent)
        return Origin(config.flow, config.directory, "", config.options, config.cluster, seed=config.settings.seed)
    now = f"Name the flow: {usage}"
    if not isinstance(found, dict):
        raise SpecError(f"the plan {plan_file} does not say which flow it is of", now=now)
    try:
        return Origin(**{**found, "cluster": ClusterSpec.model_validate(found["cluster"]), "assume": tuple(found["assume"])})
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(f"the plan {plan_file} does not say which flow it is of: {error}", now=now) from None


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()

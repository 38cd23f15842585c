"""Write a plan to a file together with its origin, read it back, and check what was edited in it.

    m2flow plan FLOW ... --out plan.json --write_plan_file--> {"of": origin_of(...), ...}
    plan.json --read_plan, read_origin--> Plan, Origin --check_edited--> the plan of `m2flow run --plan`

What may be edited: the workers (devices, threads, which engines they have, leases) and the sizes of the calls (`chunk`, `token_budget`).
A call's unit, what is a barrier, and what depends on what follow from the flow and stay. The plan in a run's directory has the same
origin in the run's `config.json`. Limit: a changed flow is noticed by the checksum of its own file, not of what that imports.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from m2flow.errors import PlanError, SpecError
from m2flow.micro.protocol.plan import Plan
from m2flow.micro.records.rundir import option_text, read_config
from m2flow.spec import ClusterSpec

_read_plan = msgspec.json.Decoder(Plan).decode

KEY = "of"
"""Key of the origin in the document of a plan file."""


@dataclass(frozen=True)
class Origin:
    """The flow, options and cluster that a plan was made of."""

    flow: str
    """The flow's file as it was given: `flows/grpo.py`, or `flows/grpo.py:name`."""
    directory: str
    """The working directory then, which relative paths start from."""
    sha256: str
    """Checksum of the flow's file; empty if it is not known."""
    options: dict[str, object]
    cluster: ClusterSpec
    lengths: str = ""
    profile: str = ""
    assume: tuple[str, ...] = field(default=())
    seed: int = 0

    def flow_target(self, plan_file: str, usage: str) -> str:
        """The flow as it can be loaded from the current directory.

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
                # A plan names lines of the flow relative to where the plan was made.
                now=f"Begin there: cd {self.directory}"
                if is_there
                else f"It was in {self.directory}. If it has moved, say where it is: {usage}",
            )
        if self.sha256 and _checksum(file) != self.sha256:
            raise SpecError(
                f"{file} has changed since the plan {plan_file} was made of it",
                now=f"Make a new plan (m2flow plan {shlex.quote(str(self.flow))} --out {shlex.quote(str(plan_file))}), "
                "or hold the old one against the flow as it is now: "
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
    """The origin of a plan that is made now in the current directory."""
    file = Path(target.partition(":")[0])
    texts = {name: option_text(value) for name, value in options.items()}
    checksum = _checksum(file) if file.is_file() else ""
    return Origin(target, str(Path.cwd()), checksum, texts, cluster, lengths, str(profile or ""), assume, seed)


def read_origin(plan_file: Path, usage: str) -> Origin:
    """Read the origin in a plan file.

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
            now=f"Make one: m2flow plan FLOW --out {shlex.quote(str(plan_file))}",
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


class _Document(msgspec.Struct):
    """The document that `m2flow plan --json` prints, which has the plan under a key."""

    plan: Plan


_read_document = msgspec.json.Decoder(_Document).decode


def read_plan(path: Path) -> Plan:
    """Read a plan from a plan file, or from the document of `m2flow plan --json`.

    Raises:
        SpecError: it can't be read, or is no plan; with the place of the field.
    """
    now = f"Make one: m2flow plan FLOW --out {shlex.quote(str(path))}"
    try:
        body = path.read_bytes()
    except OSError as error:
        raise SpecError(f"the plan {path} can't be read: {error.strerror}", now=now) from None
    try:
        is_document = isinstance(found := msgspec.json.decode(body), dict) and isinstance(found.get("plan"), dict)
        return _read_document(body).plan if is_document else _read_plan(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{path} is no plan: {error}", now=now) from None


def write_plan_file(path: Path, plan: Plan, origin: Origin | None = None) -> None:
    """Write a plan and its origin. Raises SpecError if the file can't be written."""
    document = json.loads(plan.to_json())
    document |= {KEY: origin.as_document()} if origin else {}
    try:
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise SpecError(f"can't write {path}: {error.strerror}", now="Give another file, in a directory that you may write to.") from None


def check_edited(plan: Plan, fresh: Plan, spec: ClusterSpec) -> None:
    """Check a plan that may have been edited against a fresh plan of the same flow.

    Args:
        fresh: what the flow and the spec give, with the edited plan's workers and sizes taken over.
    Raises:
        PlanError: it is of another flow or another structure, or asks for more than there is; the offending part is named.
    """
    now = "Make a new one with m2flow plan FLOW --out FILE, and edit that."
    if plan.flow != fresh.flow:
        raise PlanError(f"the plan is of the flow {plan.flow}, and this is {fresh.flow}", now=now)
    if plan.structure != fresh.structure:
        calls = [{stage.call for stage in p.stages} for p in (plan, fresh)]
        differing = ", ".join(sorted(calls[0] ^ calls[1])) or "how they are wired, or their options"
        raise PlanError(f"the plan is of other calls than the flow makes now; what differs: {differing}", now=now)
    sizes: dict[str, tuple[int, int]] = {}
    for stage in plan.stages:
        if sizes.setdefault(stage.call, (stage.chunk, stage.token_budget)) != (stage.chunk, stage.token_budget):
            raise PlanError(f"{stage.call} stands in the plan with two sizes", now="Calls of one name have the same: change all of them.")
    for old, new in zip(plan.stages, fresh.stages, strict=False):
        for name in ("unit", "is_barrier", "engine"):
            if getattr(old, name) != getattr(new, name):
                raise PlanError(
                    f"{old.call}: {name} is {getattr(old, name)!r} in the plan, and {getattr(new, name)!r} follows from the flow",
                    now="That can't be chosen: another value would change the answer. Put it back.",
                )
        if old.chunk < 0 or old.token_budget < 0 or (old.engine in ("rollout", "function") and old.chunk < 1):
            raise PlanError(
                f"{old.call}: chunk {old.chunk} and token_budget {old.token_budget} must be 1 or more",
                now="Mend these numbers in the plan file.",
            )
    for worker in plan.workers:
        if worker.threads < 1:
            raise PlanError(f"{worker.name} has {worker.threads} threads; it must be 1 or more", now="Mend that number in the plan file.")
        kinds = {slot.kind for slot in worker.engines}
        if worker.device == "cpu" and "function" not in kinds and worker.threads > spec.num_cores:
            raise PlanError(
                f"{worker.name} has {worker.threads} threads, and the machine {spec.num_cores} cores",
                now="Give it fewer threads in the plan file, or say `cores:` in the cluster spec.",
            )
        if {"rollout", "train"} <= kinds and not worker.lease:
            raise PlanError(f"{worker.name} generates and trains and has no lease", now="Give it one, any name, so that they take turns.")

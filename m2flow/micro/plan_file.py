"""A plan as a file: written by `m2flow plan --out` and into each run's directory, edited, checked, and pinned by `m2flow run --plan`.

    plan.json --read_plan--> Plan --check_edited--> Plan --(m2flow.micro.lowering.lower)--> the run's plan

What may be edited: the workers (devices, threads, which engines they have, leases) and the sizes of the calls (`chunk`,
`token_budget`). What a call's unit is, what is a barrier, and what depends on what follows from the flow and stays. Beside the plan
stands what it is of (`m2flow.micro.plan_origin`).
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from m2flow.errors import PlanError, SpecError
from m2flow.micro.plan import Plan
from m2flow.micro.plan_origin import KEY, Origin
from m2flow.spec import ClusterSpec


class _Document(msgspec.Struct):
    """What `m2flow plan --json` prints has the plan under a key."""

    plan: Plan


def read_plan(path: Path) -> Plan:
    """A plan file, or the document of `m2flow plan --json`.

    Raises:
        SpecError: it can't be read, or is no plan; with the place of the field.
    """
    now = f"Make one: m2flow plan FLOW --out {path}"
    try:
        body = path.read_bytes()
    except OSError as error:
        raise SpecError(f"the plan {path} can't be read: {error.strerror}", now=now) from None
    try:
        is_document = isinstance(found := msgspec.json.decode(body), dict) and isinstance(found.get("plan"), dict)
        return msgspec.json.decode(body, type=_Document).plan if is_document else msgspec.json.decode(body, type=Plan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{path} is no plan: {error}", now=now) from None


def write_plan_file(path: Path, plan: Plan, origin: Origin | None = None) -> None:
    """A plan, and what it is of. Raises SpecError: it can't be written."""
    document = json.loads(plan.to_json())
    document |= {KEY: origin.as_document()} if origin else {}
    try:
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise SpecError(f"can't write {path}: {error.strerror}") from None


def check_edited(plan: Plan, fresh: Plan, spec: ClusterSpec) -> None:
    """Hold a plan that may have been edited against the one that is made now, of the same flow.

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
            raise PlanError(f"{old.call}: chunk {old.chunk} and token_budget {old.token_budget} must be 1 or more")
    for worker in plan.workers:
        if worker.threads < 1:
            raise PlanError(f"{worker.name} has {worker.threads} threads; it must be 1 or more")
        kinds = {slot.kind for slot in worker.engines}
        if worker.device == "cpu" and "function" not in kinds and worker.threads > spec.num_cores:
            raise PlanError(f"{worker.name} has {worker.threads} threads, and the machine {spec.num_cores} cores")
        if {"rollout", "train"} <= kinds and not worker.lease:
            raise PlanError(f"{worker.name} generates and trains and has no lease", now="Give it one, any name, so that they take turns.")

"""Out of a run: the model of a role as it was after a step, or at the end, as a directory that other tools load.

run directory --find_part--> a part of a checkpoint, checked --export_part--> a Hugging Face model, loaded and compared
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from m2flow.errors import M2FlowError, ModelError, SpecError
from m2flow.micro.record import checkpoints
from m2flow.micro.record.flow_record import read_record

FINAL = "final"


class Part(msgspec.Struct, frozen=True):
    """One role's, of a checkpoint that is whole."""

    path: Path
    role: str
    which: str
    """`final`, or `step 12`."""
    digest: str
    """Of its weights, as the trainer held them; empty if the checkpoint does not say."""


def find_part(run_dir: Path, step: int | None, role: str | None) -> Part:
    """
    Args:
        step: the checkpoint after so many steps; None: the final one, or the newest that is whole.
        role: None: the only one.
    Raises:
        SpecError: there is no such checkpoint, or no such role in it. ModelError: it is not whole.
    """
    steps = _steps(run_dir)
    final = run_dir / "checkpoints" / FINAL
    if step is None and final.is_dir():
        return _of_final(final, role, trained_roles(run_dir))
    if step is None and steps:
        step = max(steps)
    if step is None or step not in steps:
        there = [f"--step {number}" for number in steps] + ([f"{FINAL} (no --step)"] if final.is_dir() else [])
        what = "has no checkpoint" if step is None else f"has no checkpoint of step {step}"
        now = f"There are: {', '.join(there)}." if there else "`m2flow run --checkpoint-every 20` keeps some."
        raise SpecError(f"{run_dir} {what}", now=now)
    found = checkpoints.read(steps[step])
    name = _role(role, sorted(found.parts), trained_roles(run_dir), steps[step])
    return Part(Path(found.parts[name]), name, f"step {step}", found.point.digests.get(name, ""))


def export_part(part: Part, out: Path) -> str:
    """Write the model; the digest of its weights as transformers has loaded them.

    Raises:
        ModelError: they are not those that the trainer held, or there is no model.
    """
    from m2flow.channels.weights import Tied, digest
    from m2flow.channels.weights.torch_tensors import travelling
    from m2flow.engines.exporting import export_model

    weights = export_model(part.path, out)
    found = digest((name, weight) for name, weight in travelling(weights.items()) if not isinstance(weight, Tied))
    if part.digest and found != part.digest:
        raise ModelError(
            f"{out} does not have the weights that {part.role} had at {part.which}: their digest is {found[:12]}, not {part.digest[:12]}",
            now="The trainer's numbers have another type than the checkpoint's, or this is a fault of m2flow: please report it.",
        )
    return found


def export_part_adapters(part: Part, out: Path) -> Path:
    """Write the adapters alone; the model that they belong to.

    Raises:
        ModelError: there are none, or peft makes something else of them and that model than was trained.
    """
    from m2flow.engines.exporting_adapters import export_adapters

    return export_adapters(part.path, out)


def _of_final(final: Path, role: str | None, trained: set[str]) -> Part:
    from m2flow.engines.checkpoint import verify

    name = _role(role, sorted(path.name for path in final.iterdir() if path.is_dir()), trained, final)
    if (final / name / "config.json").exists():
        verify(final / name)
    return Part(final / name, name, FINAL, "")


def trained_roles(run_dir: Path) -> set[str]:
    """Those that the run's program updates; empty where its record does not say."""
    try:
        return {call.name.rpartition(".")[0] for call in read_record(run_dir).calls if call.name.endswith(".update")}
    except M2FlowError:
        return set()


def _role(role: str | None, roles: list[str], trained: set[str], where: Path) -> str:
    """The role that is asked for, or else the only one that was trained: a reference is there too."""
    wanted = [name for name in roles if name in trained] or roles
    if role is None and len(wanted) == 1:
        return wanted[0]
    if role is None or role not in roles:
        what = f"has no role {role!r}" if role else "has several roles"
        raise SpecError(f"{where} {what}", now=f"Name one: {', '.join(f'--role {name}' for name in roles) or 'there is none'}")
    return role


def _steps(run_dir: Path) -> dict[int, Path]:
    found = {}
    for path in sorted((run_dir / "checkpoints").glob("step-*")):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match:
            found[int(match[1])] = path
    return found

"""Write a run's checkpoints atomically, find the newest sound one, and export models from them.

    checkpoints/.step-000012.0.new/<role>/    a part: what the role's trainer wrote, and its seal
    checkpoints/step-000012/                  all parts and `point.json`, renamed into place when every call before the point is over

A part is sealed by its writer: size and CRC-32 of each file, fsynced before the seal is. `point.json` holds the checksums of the seals and
its own. So what is truncated or altered later is told from what is whole, and `newest_good` skips it. A role whose version is that of the
checkpoint before is not written again: its files are hard-linked.

    run directory --find_part--> a part of a checkpoint, checked --export_part--> a Hugging Face model, loaded and compared
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

import msgspec

from m2flow.errors import M2FlowError, ModelError, SpecError, naming_host_errors, unexpected
from m2flow.micro.records.flow_record import read_record

_DAMAGED_NOW = "Use an earlier checkpoint, or one whose files were copied whole."
_SEAL, _POINT = "m2flow_seal.json", "point.json"
_BLOCK = 1 << 20
_NAME = "step-*"


class Point(msgspec.Struct, frozen=True):
    """The point of the program that a checkpoint is of."""

    num_calls: int
    """Calls of the program that it includes: the first so many."""
    step: int
    """The step after which it was made."""
    versions: dict[str, int]
    """Version of each role's weights."""
    digests: dict[str, str] = {}
    """Digest of each role's weights (`m2flow.channels.weights.digest`)."""
    seals: dict[str, int] = {}
    """CRC-32 of each part's seal."""


class _Sealed(msgspec.Struct, frozen=True):
    files: dict[str, tuple[int, int]]
    """Name -> size in bytes, CRC-32."""


_read_sealed = msgspec.json.Decoder(_Sealed).decode


class _Written(msgspec.Struct, frozen=True):
    point: Point
    checksum: int
    """CRC-32 of the point."""


_read_written = msgspec.json.Decoder(_Written).decode


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint that is whole."""

    path: Path
    point: Point

    @property
    def parts(self) -> dict[str, str]:
        """Role -> the directory that its trainer loads."""
        return {role: str(self.path / role) for role in self.point.seals}


def partial_path(run_dir: Path, step: int, attempt: int) -> Path:
    """Where the parts of a checkpoint are gathered. Each attempt has its own place, since a trainer may outlive its controller."""
    return (run_dir / "checkpoints" / f".{_name(step)}.{attempt}.new").resolve()


def seal(part: str | Path) -> None:
    """Fsync a part's files, and write their sizes and checksums.

    Raises:
        HostError: the disk is full or fails.
    """
    directory = Path(part)
    with naming_host_errors(f"the checkpoint {part} can't be written"):
        files = {str(file.relative_to(directory)): _synced(file) for file in _files(directory) if file.name != _SEAL}
        _write(directory / _SEAL, msgspec.json.encode(_Sealed(files)))
        for inner in {directory, *(file.parent for file in _files(directory))}:
            _sync(inner)


class Written(NamedTuple):
    """What became of a part that was written while training went on."""

    step: int
    role: str
    digest: str
    error: M2FlowError | None


@final
class PartWriter:
    """Writes parts of a checkpoint in a thread, one after the other, while its owner goes on."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._written: queue.SimpleQueue[Written] = queue.SimpleQueue()

    def begin(self, step: int, role: str, path: str, write: Callable[[], str]) -> None:
        """Write a part, and seal it.

        Args:
            write: writes it to the path; returns the digest of its weights.
        """
        before = list(self._threads)

        def run() -> None:
            for thread in before:
                thread.join()
            digest, error = "", None
            try:
                with naming_host_errors(f"the checkpoint {path} can't be written"):
                    digest = write()
                seal(path)
            except M2FlowError as failure:
                error = failure
            except Exception as failure:
                error = unexpected(f"writing the checkpoint {path}", failure)
            self._written.put(Written(step, role, digest, error))

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=run, name=f"m2flow-checkpoint-{role}", daemon=True))
        self._threads[-1].start()

    def written(self) -> list[Written]:
        """What has ended since this was last asked."""
        return [self._written.get() for _ in range(self._written.qsize())]

    def drain(self) -> None:
        """Wait for what has begun."""
        for thread in self._threads:
            thread.join()


def link(part: Path, to: Path) -> None:
    """Link the files of an earlier part into a new one; copy them if the file system has no links."""
    with naming_host_errors(f"the checkpoint {to} can't be written"):
        shutil.copytree(part, to, copy_function=_link, dirs_exist_ok=True)


def commit(partial: Path, point: Point) -> Checkpoint:
    """Make a checkpoint of sealed parts, by a rename.

    Raises:
        HostError: a part is missing, or the disk is full or fails.
    """
    target = partial.with_name(_name(point.step))
    with naming_host_errors(f"the checkpoint {target} can't be written"):
        point = msgspec.structs.replace(point, seals={role: zlib.crc32((partial / role / _SEAL).read_bytes()) for role in point.versions})
        _write(partial / _POINT, msgspec.json.encode(_Written(point, _checksum(point))))
        _sync(partial)
        if target.exists():  # A damaged one of an earlier attempt.
            shutil.rmtree(target)
        partial.rename(target)
        _sync(target.parent)
    return Checkpoint(target, point)


def newest_good(run_dir: Path, warn: Callable[[str], None], is_of_it: Callable[[Point], bool]) -> Checkpoint | None:
    """The newest checkpoint that is whole and accepted by `is_of_it` (the run's ledger knows its point); warns about those it skips."""
    for path in sorted((run_dir / "checkpoints").glob(_NAME), reverse=True):
        try:
            found = read(path)
        except ModelError as error:
            warn(f"the checkpoint {path} is passed over: {error.what}")
            continue
        if is_of_it(found.point):
            return found
        warn(f"the checkpoint {path} is passed over: the ledger does not have all that went into it")
    return None


def read(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it.

    Raises:
        ModelError: it is not whole.
    """
    try:
        written = _read_written((path / _POINT).read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{path / _POINT} can't be read ({error})", now=_DAMAGED_NOW) from None
    if _checksum(written.point) != written.checksum:
        raise ModelError(f"{path / _POINT} is not what was written", now=_DAMAGED_NOW)
    for role, checksum in written.point.seals.items():
        _check(path / role, checksum)
    return Checkpoint(path.resolve(), written.point)


def keep_newest(run_dir: Path, count: int) -> None:
    """Remove all checkpoints but the newest."""
    for path in sorted((run_dir / "checkpoints").glob(_NAME), reverse=True)[max(count, 1) :]:
        # Renamed first: a removal that is cut short must not look like a checkpoint.
        with contextlib.suppress(OSError):
            gone = path.with_name(f".{path.name}.old")
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def clear_leftovers(run_dir: Path) -> None:
    """Remove unfinished checkpoints of earlier attempts at the run."""
    for path in (run_dir / "checkpoints").glob("." + _NAME):
        shutil.rmtree(path, ignore_errors=True)


def _check(part: Path, checksum: int) -> None:
    try:
        body = (part / _SEAL).read_bytes()
        if zlib.crc32(body) != checksum:
            raise ModelError(f"{part / _SEAL} is not what was written", now=_DAMAGED_NOW)
        files: Mapping[str, Sequence[int]] = _read_sealed(body).files
        for name, (size, crc) in files.items():
            if (part / name).stat().st_size != size or _crc(part / name) != crc:
                raise ModelError(
                    f"{part / name} is not what was written: its size or checksum differs",
                    now=_DAMAGED_NOW,
                )
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{part} can't be read ({error})", now=_DAMAGED_NOW) from None


def _name(step: int) -> str:
    return f"step-{step + 1:06}"


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _checksum(point: Point) -> int:
    return zlib.crc32(msgspec.json.encode(point, order="deterministic"))


def _crc(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _synced(file: Path) -> tuple[int, int]:
    _sync(file)
    return file.stat().st_size, _crc(file)


def _write(path: Path, body: bytes) -> None:
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Fsync a file or a directory."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # Another file system, or one without links.
        shutil.copy2(source, target)


FINAL = "final"


# ---- export


class CheckpointPart(msgspec.Struct, frozen=True):
    """One role's part of a checkpoint that is whole."""

    path: Path
    role: str
    which: str
    """`final`, or `step 12`."""
    digest: str
    """Digest of the weights as the trainer held them; empty if the checkpoint has none."""


def find_part(run_dir: Path, step: int | None, role: str | None) -> CheckpointPart:
    """Find a role's part of a checkpoint.

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
        now = (
            f"There are: {', '.join(there)}."
            if there
            else "A run keeps its last at its end, and with --checkpoint-every 20 some before; `m2flow export RUN` names another run."
        )
        raise SpecError(f"{run_dir} {what}", now=now)
    found = read(steps[step])
    name = _role(role, sorted(found.parts), trained_roles(run_dir), steps[step])
    return CheckpointPart(Path(found.parts[name]), name, f"step {step}", found.point.digests.get(name, ""))


def export_part(part: CheckpointPart, out: Path, shard_size: str | None = None) -> str:
    """Write the model as transformers loads it, in files of at most this size, and return the digest of its weights.

    Raises:
        ModelError: they are not those that the trainer held, or there is no model.
    """
    from m2flow.channels.weights import Tied, digest
    from m2flow.channels.weights.tensors import to_wire
    from m2flow.engines.models.model_export import export_model

    weights = export_model(part.path, out, shard_size)
    found = digest((name, weight) for name, weight in to_wire(weights.items()) if not isinstance(weight, Tied))
    if part.digest and found != part.digest:
        raise ModelError(
            f"{out} does not have the weights that {part.role} had at {part.which}: their digest is {found[:12]}, not {part.digest[:12]}",
            now="The trainer's numbers have another type than the checkpoint's, or this is a fault of m2flow: please report it.",
        )
    return found


def export_part_gguf(part: CheckpointPart, out: Path, dtype: str | None = None) -> Path:
    """Write the model as one GGUF file in a directory, and return the file.

    Args:
        dtype: of the matrices, `float32`, `float16` or `bfloat16`; None: as the trainer held them.
    Raises:
        ModelError: as `export_part` does, or it is a model that can't be written so. MissingExtra: the package gguf is not installed.
    """
    from m2flow.engines.models.model_export import put_in_place, saved_weights, write_gguf

    name = f"{part.role}-{part.which.replace(' ', '-')}"
    with put_in_place(out) as fresh:
        export_part(part, fresh / "model")
        write_gguf(fresh / "model", saved_weights(fresh / "model"), fresh / f"{name}.gguf", name=name, dtype=dtype)
        shutil.rmtree(fresh / "model")
    return out / f"{name}.gguf"


def export_part_adapters(part: CheckpointPart, out: Path) -> Path:
    """Write the adapters alone, and return the directory of the model that they belong to.

    Raises:
        ModelError: there are none, or peft makes something else of them and that model than was trained.
    """
    from m2flow.engines.models.model_export import export_adapters

    return export_adapters(part.path, out)


def _of_final(final: Path, role: str | None, trained: set[str]) -> CheckpointPart:
    from m2flow.engines.models.trainer_checkpoint import verify

    name = _role(role, sorted(path.name for path in final.iterdir() if path.is_dir()), trained, final)
    if (final / name / "config.json").exists():
        verify(final / name)
    return CheckpointPart(final / name, name, FINAL, "")


def trained_roles(run_dir: Path) -> set[str]:
    """Roles that the run's program updates; empty if its record does not say."""
    try:
        return {call.name.rpartition(".")[0] for call in read_record(run_dir).calls if call.name.endswith(".update")}
    except M2FlowError:
        return set()


def _role(role: str | None, roles: list[str], trained: set[str], where: Path) -> str:
    """The role that is asked for, or else the only trained one; a checkpoint may have a reference too."""
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

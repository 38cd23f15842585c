"""A run's checkpoints on disk: the state of every trained role at one point of the program, complete or not there at all.

    checkpoints/.step-000012.0.new/<role>/    a part: what the role's trainer wrote, and its seal
    checkpoints/step-000012/                  all parts and `point.json`, renamed into place when every call before the point is over

A part is sealed by who wrote it: size and CRC-32 of each file, on the disk before the seal is. `point.json` holds the checksums of
the seals and its own. So what is cut short, or altered later, is told apart from what is whole; `newest_good` passes it over. A role
whose version is that of the checkpoint before is not written again: its files are linked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from m2flow.errors import ModelError, naming_host_errors

_SEAL, _POINT = "m2flow_seal.json", "point.json"
_BLOCK = 1 << 20
_NAME = "step-*"


class Point(msgspec.Struct, frozen=True):
    """What a checkpoint is of."""

    num_calls: int
    """The calls of the program that it includes: so many, from the first."""
    step: int
    """The step at whose end that was."""
    versions: dict[str, int]
    """Of each role's weights."""
    digests: dict[str, str] = {}
    """Of each role's weights (`m2flow.channels.weights.digest`)."""
    seals: dict[str, int] = {}
    """CRC-32 of each part's seal."""


class _Sealed(msgspec.Struct, frozen=True):
    files: dict[str, tuple[int, int]]
    """Name -> size in bytes, CRC-32."""


class _Written(msgspec.Struct, frozen=True):
    point: Point
    checksum: int
    """CRC-32 of the point."""


class Checkpoint(msgspec.Struct, frozen=True):
    """One that is whole."""

    path: Path
    point: Point

    @property
    def parts(self) -> dict[str, str]:
        """Role -> the directory that its trainer reads."""
        return {role: str(self.path / role) for role in self.point.seals}


def partial_path(run_dir: Path, step: int, attempt: int) -> Path:
    """Where the parts of a checkpoint gather. Another attempt at the run has another place, since a trainer may outlive its controller."""
    return (run_dir / "checkpoints" / f".{_name(step)}.{attempt}.new").resolve()


def seal(part: str | Path) -> None:
    """Make sure that a part's files are on the disk, and write down what they are.

    Raises:
        HostError: the disk is full or fails.
    """
    directory = Path(part)
    with naming_host_errors(f"the checkpoint {part} can't be written"):
        files = {str(file.relative_to(directory)): _synced(file) for file in _files(directory) if file.name != _SEAL}
        _write(directory / _SEAL, msgspec.json.encode(_Sealed(files)))
        for inner in {directory, *(file.parent for file in _files(directory))}:
            _sync(inner)


def link(part: Path, to: Path) -> None:
    """Have the files of an earlier part in a new place too, without a copy where the file system can do that."""
    with naming_host_errors(f"the checkpoint {to} can't be written"):
        shutil.copytree(part, to, copy_function=_link, dirs_exist_ok=True)


def commit(partial: Path, point: Point) -> Checkpoint:
    """Make a checkpoint of parts that are all sealed.

    Raises:
        HostError: a part is missing, or the disk is full or fails.
    """
    target = partial.with_name(_name(point.step))
    with naming_host_errors(f"the checkpoint {target} can't be written"):
        point = msgspec.structs.replace(point, seals={role: zlib.crc32((partial / role / _SEAL).read_bytes()) for role in point.versions})
        _write(partial / _POINT, msgspec.json.encode(_Written(point, _checksum(point))))
        _sync(partial)
        if target.exists():  # A bad one of an earlier attempt.
            shutil.rmtree(target)
        partial.rename(target)
        _sync(target.parent)
    return Checkpoint(target, point)


def newest_good(run_dir: Path, warn: Callable[[str], None], is_of_it: Callable[[Point], bool]) -> Checkpoint | None:
    """The newest checkpoint that is whole and whose point the run's ledger knows (`is_of_it`); what is wrong with newer ones is said."""
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
    """A checkpoint, every byte of it checked.

    Raises:
        ModelError: it is not whole.
    """
    try:
        written = msgspec.json.decode((path / _POINT).read_bytes(), type=_Written)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{path / _POINT} can't be read ({error})") from None
    if _checksum(written.point) != written.checksum:
        raise ModelError(f"{path / _POINT} is not what was written")
    for role, checksum in written.point.seals.items():
        _check(path / role, checksum)
    return Checkpoint(path.resolve(), written.point)


def keep_newest(run_dir: Path, count: int) -> None:
    """Remove all checkpoints but the newest."""
    for path in sorted((run_dir / "checkpoints").glob(_NAME), reverse=True)[max(count, 1) :]:
        # Out of sight first: a removal that is cut short must not look like a checkpoint.
        with contextlib.suppress(OSError):
            gone = path.with_name(f".{path.name}.old")
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def clear_leftovers(run_dir: Path) -> None:
    """Remove what earlier attempts at the run have left half done."""
    for path in (run_dir / "checkpoints").glob("." + _NAME):
        shutil.rmtree(path, ignore_errors=True)


def _check(part: Path, checksum: int) -> None:
    try:
        body = (part / _SEAL).read_bytes()
        if zlib.crc32(body) != checksum:
            raise ModelError(f"{part / _SEAL} is not what was written")
        files: Mapping[str, Sequence[int]] = msgspec.json.decode(body, type=_Sealed).files
        for name, (size, crc) in files.items():
            if (part / name).stat().st_size != size or _crc(part / name) != crc:
                raise ModelError(f"{part / name} is not what was written: its size or checksum differs")
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{part} can't be read ({error})") from None


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
    """What a file or a directory holds is on the disk after this."""
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

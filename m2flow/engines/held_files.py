"""Weights as a directory of safetensors files, for engines that read them from there: written tensor by tensor, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from m2flow.errors import EngineError

_FILE_BYTES = 2 << 30
Shapes = Mapping[str, tuple[int, ...]]


def shapes_in(directory: Path) -> Shapes:
    """The tensors of a directory, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118  # It is no dict.
    return found


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """One tensor after the other, by name."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def write_tensors(directory: Path, like: Path, shapes: Shapes, tensors: Iterable[tuple[str, Any]], dtype: torch.dtype) -> None:
    """Write weights beside a copy of all other files of the directory `like`.

    Args:
        shapes: what must be there; nothing else may be. Tensors are written in `dtype`, if they are of floating point.
    Raises:
        EngineError: a tensor is missing, unknown, of another shape, or comes twice; nothing is left of the directory then.
    """
    directory.mkdir()
    try:
        where: dict[str, str] = {}
        part: dict[str, Tensor] = {}
        for name, given in tensors:
            tensor = torch.as_tensor(given).detach().to("cpu")
            if name not in shapes or tuple(tensor.shape) != shapes[name] or name in where:
                expected = f"{list(shapes[name])}" if name in shapes else "no such tensor"
                raise EngineError(f"weights that do not fit: {name} is {list(tensor.shape)}, expected {expected}")
            where[name] = ""
            # A copy: what is given may be gone when the next is taken.
            part[name] = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
            if sum(t.nbytes for t in part.values()) >= _FILE_BYTES:
                _write(directory, part, where)
        if missing := sorted(set(shapes) - set(where)):
            raise EngineError(f"{len(missing)} weights are missing: {', '.join(missing[:4])}")
        _write(directory, part, where)
        for file in like.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                shutil.copy(file, directory / file.name)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _write(directory: Path, part: dict[str, Tensor], where: dict[str, str]) -> None:
    file = f"model-{len(set(where.values()) - {''}) + 1:05d}.safetensors"
    save_file(part, str(directory / file), metadata={"format": "pt"})
    where.update(dict.fromkeys(part, file))
    part.clear()

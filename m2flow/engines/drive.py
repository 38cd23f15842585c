"""Tensors whose memory is a file on a drive: what is used once a step, and needs no memory in between.

    Drive(DIR).taken(tensor) --> the same numbers, mapped from a file in DIR; the operating system moves pages as they are needed

A file has its full size before it is mapped, so a full drive is an error then and no signal later. Once mapped, it has no name any more:
its space is free again when the tensor is gone or the process has ended, however that was. No other process reads it; checkpoints are
elsewhere.

Source: Rajbhandari et al. 2021, arXiv:2104.07857 (ZeRO-Infinity), which reads and writes by calls of its own.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from m2flow.errors import EngineError


class Drive:
    """A directory that takes tensors."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def taken(self, tensor: Tensor) -> Tensor:
        """A tensor's numbers on the drive, in the host's address space.

        Raises:
            EngineError: the directory can't be written, or has no room.
        """
        size = tensor.numel() * tensor.element_size()
        if not size:
            return tensor.detach().cpu()
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._path, prefix="m2flow-") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                found: Tensor = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        except OSError as error:
            raise EngineError(
                f"{size} bytes of an optimiser can't be put on the drive {self._path}: {error}", now="Give nvme_path a drive with room."
            ) from error
        return found.view(tensor.shape).copy_(tensor.detach())

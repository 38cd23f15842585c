"""Tensors that are spread over ranks, in files that every rank writes its own parts of: PyTorch's distributed checkpoints (DCP).

    every rank:  name -> DTensor --write_parts--> DIR/__0_0.distcp, __1_0.distcp, .metadata --read_parts--> name -> whole tensor

No rank ever has the whole model while it is written. Whoever reads it, on any number of ranks, has it whole in the host's memory once, as
with any other checkpoint here.

Source: PyTorch, torch.distributed.checkpoint.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from m2flow.errors import EngineError, ModelError, host_error

_PART = "m2flow_part"
"""Key of what stands for a tensor that is in the parts."""


def write_parts(directory: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write what this rank has of each tensor. Collective.

    Raises:
        EngineError: a rank's disk refuses; on every rank.
    """
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(directory), process_group=group)
    except (dcp.CheckpointException, OSError) as error:
        what = f"the checkpoint {directory} can't be written"
        raise host_error(what, error) or EngineError(f"{what}: {str(error)[:300]}") from error


def read_parts(directory: Path) -> dict[str, Tensor]:
    """All tensors, whole, in the host's memory.

    Raises:
        ModelError: they can't be read.
    """
    try:
        reader = dcp.FileSystemReader(directory)
        known: dict[str, Any] = reader.read_metadata().state_dict_metadata
        found = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in known.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of being a single process.
            dcp.load(found, storage_reader=reader, no_dist=True)
    except (dcp.CheckpointException, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ModelError(f"the checkpoint {directory} can't be read: {str(error)[:300]}", now="Use an earlier checkpoint.") from error
    return found


def take_out(state: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A state with a mark for each tensor that is spread; these go into `tensors`, by names that begin with this one."""
    if isinstance(state, dict):
        return {key: take_out(value, tensors, f"{name}.{key}") for key, value in state.items()}
    if isinstance(state, list):
        return [take_out(value, tensors, f"{name}.{i}") for i, value in enumerate(state)]
    if isinstance(state, Tensor) and hasattr(state, "full_tensor"):
        tensors[name] = state
        return {_PART: name}
    return state


def put_back(state: Any, tensors: Mapping[str, Tensor], device: str) -> Any:
    """Undo `take_out`."""
    if isinstance(state, dict):
        if set(state) == {_PART}:
            return tensors[state[_PART]].to(device)
        return {key: put_back(value, tensors, device) for key, value in state.items()}
    return [put_back(value, tensors, device) for value in state] if isinstance(state, list) else state

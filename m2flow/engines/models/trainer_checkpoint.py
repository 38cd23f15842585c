"""Save and load a trainer's checkpoint: a Hugging Face model directory with optimiser states and a manifest, from one rank or many.

    path/  config.json, *.safetensors, tokenizer.*     what any tool reads
           m2flow_parts/                               instead of *.safetensors: each rank's part of weights and state (an option)
           adapter/                                    of a model with adapters; the weights are then base and adapters merged
           m2flow_state.pt                             optimiser states: tensors and numbers, read without unpickling code
           m2flow_checkpoint.json                      size and SHA-256 of every file

Written to a neighbouring directory, which then takes the place of `path`: that is either the old checkpoint or the new one, never a part.

    every rank:  name -> DTensor or Pieces --write_parts--> DIR/__0_0.distcp, __1_0.distcp, .metadata --read_parts--> name -> whole tensor

No rank has the whole model while parts are written. A reader, on any number of ranks, has it whole in the host's memory once, as with any
other checkpoint here. DTensors are recognised by their methods: a process that shards nothing does not import torch's distributed tensors,
which takes half a second.

Source: PyTorch, torch.distributed.checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import glob
import hashlib
import json
import os
import pickle
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from m2flow.engines.contract import HeldCheckpoint
from m2flow.engines.models import lora
from m2flow.engines.models.hf_model import checkpoint_tensors, load_model
from m2flow.errors import EngineError, ModelError, host_error, naming_host_errors
from m2flow.recipe import Model

if TYPE_CHECKING:
    from m2flow.engines.models.model_files import TextCodec


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor whole on every rank. Collective if it is sharded."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a view: writing to it writes to the tensor."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def spread_like(value: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor over the ranks like another of its shape. Each rank has the whole, so nothing is sent."""
    if not hasattr(like, "full_tensor") or hasattr(value, "full_tensor") or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


# ---- parts of several ranks

_PART = "m2flow_part"
"""Key of what stands for a tensor that is in the parts."""


class Pieces:
    """What this rank writes or reads of a tensor that is no DTensor: boxes of it. All that write have each of its numbers once.

    PyTorch's distributed checkpoints ask it as they ask a DTensor (`torch.distributed.checkpoint.planner_helpers`), and what is written is
    read as any other tensor.
    """

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape
        self._pieces: dict[torch.Size, Tensor] = {}

    def add(self, start: Sequence[int], piece: Tensor) -> None:
        """Add a box that begins there. It has as many dimensions as the tensor, or fewer, after others of size 1."""
        fill = len(self._shape) - piece.ndim
        self._pieces[torch.Size(start)] = piece.reshape([1] * fill + list(piece.shape))

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                MetadataIndex(name, start),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(start, piece.shape), TensorProperties.create_from_tensor(piece), self._shape
                ),
            )
            for start, piece in self._pieces.items()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(start, piece.shape) for start, piece in self._pieces.items()]

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self._shape

    def piece(self, start: torch.Size) -> Tensor:
        return self._pieces[start]


class _SavePlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """The library's own, which looks for what it writes in tensors alone."""

    def lookup_object(self, index: Any) -> Any:
        found = self.state_dict[index.fqn]
        return found.piece(index.offset) if isinstance(found, Pieces) else super().lookup_object(index)


class _LoadPlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc]
    """The planner of what is read, like `_SavePlanner`: the library's own leaves out what is no tensor."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({}, metadata, is_coordinator)
        self.state_dict = state_dict

    def lookup_tensor(self, index: Any) -> Tensor:
        return cast("Pieces", self.state_dict[index.fqn]).piece(index.offset)


def mark(name: str) -> dict[str, str]:
    """What stands in a state for a tensor that is in the parts under this name."""
    return {_PART: name}


def write_parts(directory: Path, tensors: Mapping[str, Tensor | Pieces], group: dist.ProcessGroup) -> None:
    """Write this rank's part of each tensor. Collective.

    Raises:
        EngineError: a rank's disk refuses; on every rank.
    """
    try:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(directory), planner=_SavePlanner(), process_group=group)
    except (dcp.CheckpointException, OSError) as error:
        what = f"the checkpoint {directory} can't be written"
        raise host_error(what, error) or EngineError(f"{what}: {str(error)[:300]}") from error


class PlannedParts:
    """What this rank writes of the tensors of a checkpoint: planned with the other ranks, written by each alone, in any thread.

        PlannedParts (collective: names and shapes) -> write, on every rank -> DIR/__RANK_0.distcp
            --what was written, by the store--> finish, on the first rank -> DIR/.metadata

    Args:
        tensors: they are read when they are written, so they may not change until then.
        store: of all ranks, by which they tell the first one.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, Tensor | Pieces], group: dist.ProcessGroup, store: Any) -> None:
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        self._what = f"the checkpoint {directory} can't be written"
        self._store = store
        self._planner, self._writer = _SavePlanner(), dcp.FileSystemWriter(directory)
        self._planner.set_up_planner(dict(tensors), self._writer.storage_meta(), rank == 0)
        self._writer.set_up_storage_writer(rank == 0)
        own = self._writer.prepare_local_plan(self._planner.create_local_plan())
        plans: list[Any] = [None] * count
        dist.gather_object(own, plans if rank == 0 else None, group=group, group_dst=0)
        if rank == 0:
            plans, self._metadata = self._planner.create_global_plan(plans)
            keys = [f"m2flow/parts/{secrets.token_hex(8)}/{each}" for each in range(count)]
            plans = list(zip(keys, self._writer.prepare_global_plan(plans), strict=True))
            self._keys = keys
        given: list[Any] = [None]
        dist.scatter_object_list(given, plans if rank == 0 else None, group=group, group_src=0)
        self._key, plan = given[0]
        self._plan = self._planner.finish_plan(plan)

    def write(self) -> None:
        """Write this rank's part, and tell the first one of it, or why it can't be written."""
        try:
            written = self._writer.write_data(self._plan, self._planner)
            written.wait()
            told = written.value(), ""
        except Exception as error:
            failure = host_error(self._what, error)
            told = [], f"{self._what}: {str(error)[:300]}" if failure is None else failure.what
        with contextlib.suppress(RuntimeError):  # The first rank, which keeps the store, is gone.
            self._store.set(self._key, pickle.dumps(told))

    def finish(self, timeout_s: float) -> None:
        """Wait until all ranks have written their parts, and write what they are parts of. Of the first rank.

        Raises:
            EngineError: a rank could not, or has not within so many seconds.
        """
        results, deadline = [], time.monotonic() + timeout_s
        for rank, key in enumerate(self._keys):
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    raise EngineError(f"{self._what}: rank {rank} has not written its part within {timeout_s:g} s")
                time.sleep(_POLL_S)
            found, failure = pickle.loads(self._store.get(key))
            self._store.delete_key(key)
            if failure:
                raise EngineError(f"rank {rank}: {failure}", now="Make room, or write to another place.")
            results.append(found)
        try:
            self._writer.finish(self._metadata, results)
        except OSError as error:
            raise host_error(self._what, error) or EngineError(f"{self._what}: {error}") from error


_POLL_S = 0.02


def held_part(tensor: Tensor | Pieces) -> Tensor | Pieces:
    """Copy what this rank has of a tensor into the host's memory; pieces are there already."""
    if isinstance(tensor, Pieces):
        return tensor
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach().to("cpu", copy=True)
    found = Pieces(tensor.shape)
    for chunk in tensor.__create_chunk_list__():
        found.add(chunk.offsets, local(tensor).detach().to("cpu", copy=True))
    return found


def weights_in_parts(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the weights that ranks wrote in parts, by the module's names, some at a time.

    Raises:
        ModelError: they can't be read.
    """
    with _reading(path / _PARTS) as (reader, known):
        names = [name for name in known if name.startswith(WEIGHT)]
        while names:
            wanted: dict[str, Tensor] = {}
            while names and sum(tensor.nbytes for tensor in wanted.values()) < _READ_BYTES:
                about = known[name := names.pop()]
                wanted[name] = torch.empty(about.size, dtype=about.properties.dtype)
            dcp.load(wanted, storage_reader=reader, no_dist=True)
            yield from ((name.removeprefix(WEIGHT), tensor) for name, tensor in wanted.items())


_READ_BYTES = 1 << 30


def read_parts(directory: Path) -> dict[str, Tensor]:
    """Read all tensors, whole, into the host's memory.

    Raises:
        ModelError: they can't be read.
    """
    with _reading(directory) as (reader, known):
        found = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in known.items()}
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def read_pieces(path: str, wanted: Mapping[str, Pieces]) -> None:
    """Read pieces of the tensors that ranks wrote in parts, into the memory of the pieces, by the names that they have there.

    Raises:
        ModelError: they can't be read, or are of a model of other shapes.
    """
    wanted = {name: pieces for name, pieces in wanted.items() if pieces.__create_chunk_list__()}
    with _reading(Path(path) / _PARTS) as (reader, known):
        wrong = [name for name, pieces in wanted.items() if name not in known or known[name].size != pieces.shape]
        if wrong:
            raise ModelError(
                f"the checkpoint {path} is of another model: it has {wrong[0]} not, or in another shape",
                now="Give the model that the checkpoint was made with, or another checkpoint.",
            )
        dcp.load(dict(wanted), storage_reader=reader, planner=_LoadPlanner(), no_dist=True)


@contextlib.contextmanager
def _reading(directory: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A reader, and what it knows of the tensors. Raises ModelError: they can't be read."""
    try:
        reader = dcp.FileSystemReader(directory)
        known: dict[str, Any] = reader.read_metadata().state_dict_metadata
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of being a single process.
            yield reader, known
    except (dcp.CheckpointException, OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ModelError(f"the checkpoint {directory} can't be read: {str(error)[:300]}", now="Use an earlier checkpoint.") from error


def take_out(state: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Replace each sharded tensor of a state by a mark, and move it into `tensors`, by names that begin with this one."""
    if isinstance(state, dict):
        return {key: take_out(value, tensors, f"{name}.{key}") for key, value in state.items()}
    if isinstance(state, list):
        return [take_out(value, tensors, f"{name}.{i}") for i, value in enumerate(state)]
    if isinstance(state, Tensor) and hasattr(state, "full_tensor"):
        tensors[name] = state
        return mark(name)
    return state


def put_back(state: Any, tensors: Mapping[str, Tensor], device: str) -> Any:
    """Undo `take_out`."""
    if isinstance(state, dict):
        if set(state) == {_PART}:
            return tensors[state[_PART]].to(device)
        return {key: put_back(value, tensors, device) for key, value in state.items()}
    return [put_back(value, tensors, device) for value in state] if isinstance(state, list) else state


_MANIFEST, _STATE, _ADAPTER, _PARTS = "m2flow_checkpoint.json", "m2flow_state.pt", "adapter", "m2flow_parts"
# ---- checkpoints

WEIGHT = "weights."
"""What names of weights begin with in the parts; other tensors there are the state's."""


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by checkpoints' names, without a copy and without gradient; tied ones once, under their first name."""
    for name, tensor in lora.whole_state(model):
        yield from checkpoint_tensors(model, name, tensor.detach())


def save(
    path: str,
    model: Any,
    codec: TextCodec,
    state: Mapping[str, object],
    weights: Mapping[str, Tensor] | None = None,
    adapter: Mapping[str, Tensor] | None = None,
    parts: Path | None = None,
) -> None:
    """Write a checkpoint, with the model's weights and adapters or those that are given, by the module's names.

    Args:
        parts: a directory that ranks have written weights and the marked tensors of the state into
        (`m2flow.engines.models.trainer_checkpoint`); it is
            moved into the checkpoint.

    Raises `HostError` if the disk refuses; what was at `path` is then still there."""
    with _put_in_place_of(Path(path)) as fresh:
        if lora.is_adapted(model):
            weights = dict(lora.whole_state(model)) if weights is None else weights
            lora.write_adapter(model, fresh / _ADAPTER, dict(lora.adapter_state(model)) if adapter is None else adapter)
        if parts is None:
            model.save_pretrained(str(fresh), state_dict=weights)
        else:
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]  # As transformers does where it writes the weights too.
            config.save_pretrained(str(fresh))
            parts.rename(fresh / _PARTS)
        codec.save(str(fresh))
        torch.save(on_host(dict(state), {}), fresh / _STATE)  # The same file wherever the trainer's tensors are.
        files = [file for file in sorted(fresh.rglob("*")) if file.is_file()]
        manifest = {str(file.relative_to(fresh)): [file.stat().st_size, _digest(file)] for file in files}
        (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def held(
    path: str,
    model: Any,
    codec: TextCodec,
    state: Mapping[str, object],
    weights: Mapping[str, Tensor] | None = None,
    adapter: Mapping[str, Tensor] | None = None,
) -> HeldCheckpoint:
    """Hold these tensors as they are now, to `save` them later. Given weights, and their state, belong to it; others are copied."""
    if weights is None:
        adapter = dict(lora.adapter_state(model)) if lora.is_adapted(model) else None
        state, weights, adapter = on_host((dict(state), dict(lora.whole_state(model)), adapter), {}, copy=True)
    found = dict(weights or {})

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in found.items():
            yield from checkpoint_tensors(model, name, tensor)

    # A copy of the mapping: transformers empties the one that it writes.
    return HeldCheckpoint(lambda: save(path, model, codec, state, dict(found), adapter), named)


def on_host(value: Any, found: dict[tuple[Any, ...], Tensor], *, copy: bool = False) -> Any:
    """Bring a state's tensors into the host's memory: those of a device, or with `copy` all; one that is there twice once."""
    if isinstance(value, Mapping):
        return {key: on_host(one, found, copy=copy) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_host(one, found, copy=copy) for one in value)
    if not isinstance(value, Tensor) or not (copy or value.is_cuda):
        return value
    key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (id(value),)
    if key not in found:
        found[key] = value.detach().to("cpu", copy=True)
    return found[key]


@contextlib.contextmanager
def _put_in_place_of(target: Path) -> Iterator[Path]:
    """Yield a new directory, which replaces `target` afterwards; if anything is raised, `target` stays.

    Whoever is killed at any moment leaves a whole one: both change places at once, or where the file system can't do that, `_put_back`
    finds the old one.

    Raises:
        HostError: the disk refuses.
    """
    fresh, old = target.with_name(f".{target.name}.{os.getpid()}.new"), target.with_name(f".{target.name}.{os.getpid()}.old")
    with naming_host_errors(f"the checkpoint {target} can't be written"):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            yield fresh
            if not target.exists() or not _exchange(fresh, target):
                if target.exists():
                    target.rename(old)
                fresh.rename(target)
            for gone in _moved_away(target):
                shutil.rmtree(gone, ignore_errors=True)
        except BaseException:
            _put_back(target)
            raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Have two directories change places, in one step; False: the system or the file system can't.

    Source: renameat2(2), RENAME_EXCHANGE; on macOS renamex_np(2), RENAME_SWAP. Both flags are 2.
    """
    library, (a, b) = ctypes.CDLL(None), (os.fsencode(one), os.fsencode(other))
    here = -100  # AT_FDCWD
    if hasattr(library, "renameat2"):
        return bool(library.renameat2(here, a, here, b, 2) == 0)
    return hasattr(library, "renamex_np") and bool(library.renamex_np(a, b, 2) == 0)


def _moved_away(target: Path) -> list[Path]:
    """Checkpoints that were at `target`, and are beside it: another was to take their place."""
    return sorted(target.parent.glob(f".{glob.escape(target.name)}.*.old"))


def _put_back(target: Path) -> None:
    """If nothing is at `target`, since who was replacing it was killed, put back what was there."""
    if not target.exists():
        for moved in _moved_away(target)[-1:]:
            with contextlib.suppress(OSError):  # Another rank was faster.
                moved.rename(target)


def load(path: str, model: Any, source: Model) -> dict[str, Any]:
    """Copy a checkpoint's weights into the model and return its state. Raises `ModelError` if it is incomplete or altered."""
    device = str(next(model.parameters()).device)
    current = model.state_dict()
    loaded = read_weights(path, source, {name: tensor.shape for name, tensor in current.items()})
    with torch.no_grad():
        for name, tensor in loaded.items():
            current[name].copy_(spread_like(tensor, current[name]))
    return read_state(path, device)


def read_weights(path: str, source: Model, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Read a checkpoint's weights by the module's names, into the host's memory; of a model with adapters, only these.

    Raises `ModelError` if it is incomplete, altered, or of another model.

    Args:
        shapes: what the model has, by the same names.
    """
    verify(Path(path))
    if source.lora is not None:
        return lora.read_adapter(Path(path) / _ADAPTER, shapes)
    if (Path(path) / _PARTS).is_dir():
        loaded = parts_of(Path(path))
        if json.loads((Path(path) / "config.json").read_text()).get("tie_word_embeddings"):
            shapes = {name: shape for name, shape in shapes.items() if name in loaded}  # A tied one is there under its first name.
    else:
        loaded = load_model(replace(source, path=path, init="pretrained"), device="cpu", attention="eager").state_dict()
    if {name: tensor.shape for name, tensor in loaded.items()} != dict(shapes):
        raise ModelError(
            f"the checkpoint {path} is of a model of other shapes than {source.path}",
            now="Give the model that the checkpoint was made with, or another checkpoint.",
        )
    return loaded


def marked_state(path: str, device: str) -> dict[str, Any]:
    """Read what `read_state` does, with marks for the tensors that are in the parts."""
    file = Path(path) / _STATE
    try:
        state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"{file} can't be read: {error}", now="Use an earlier checkpoint, or one whose files were copied whole."
        ) from error
    return state


def name_in_parts(value: object) -> str:
    """The name of the tensor that a mark stands for; empty if it is none."""
    return str(value.get(_PART, "")) if isinstance(value, dict) else ""


def has_parts(path: str) -> bool:
    _put_back(Path(path))
    return (Path(path) / _PARTS).is_dir()


def read_state(path: str, device: str) -> dict[str, Any]:
    """Read a checkpoint's state beside the weights, onto a device. Raises `ModelError` if it can't be read."""
    state, file = marked_state(path, device), Path(path) / _STATE
    if (file.parent / _PARTS).is_dir():
        state = put_back(state, read_parts(file.parent / _PARTS), device)
    return state


def parts_of(directory: Path) -> dict[str, Tensor]:
    """Read the weights that ranks wrote in parts, whole, by the module's names; empty if the checkpoint has them in one piece."""

    if not (directory / _PARTS).is_dir():
        return {}
    found = read_parts(directory / _PARTS)
    return {name.removeprefix(WEIGHT): tensor for name, tensor in found.items() if name.startswith(WEIGHT)}


def marked(weights: Mapping[str, Tensor], state: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the tensors that are written in parts, by name, and the state with marks in their place."""

    tensors = {WEIGHT + name: tensor.detach() for name, tensor in weights.items()}
    return tensors, take_out(dict(state), tensors, "state")


def verify(directory: Path) -> None:
    """Check a checkpoint against its manifest. Raises `ModelError` if it is incomplete or altered."""
    _put_back(directory)
    manifest = directory / _MANIFEST
    try:
        expected: dict[str, tuple[int, str]] = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{directory} is not a complete checkpoint: {manifest.name} can't be read ({error})", now="Use an earlier checkpoint."
        ) from error
    for name, (size, digest) in expected.items():
        file = directory / name
        if not file.is_file():
            raise ModelError(f"the checkpoint {directory} lacks {name}", now="Use an earlier checkpoint.")
        if file.stat().st_size != size or _digest(file) != digest:
            raise ModelError(f"{file} is not what was saved: its size or checksum differs", now="Use an earlier checkpoint.")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

"""Run one trainer on several ranks: processes that hold parts of one model and do the same tasks in the same order.

    every rank:  the same micro-batch --shares--> its own samples --packed passes of the embedded trainer--> gradients, numbers
                 numbers --gathered--> the whole batch's, on every rank

What a rank tells the others goes through collectives of plain tensors. An error of one rank becomes an error of all, at the same place,
before any of them waits in a collective for one that will not come. All ranks make the same number of forward passes: one without samples
left makes a pass whose result counts nothing. How gradients add up over ranks, and who steps, is the engine's (`_backward`, `apply`).
`ReplicatedTrain` is the embedded trainer itself over several ranks: a replica of the model on each.
"""

from __future__ import annotations

import copy
import datetime
import functools
import gc
import itertools
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.engines import PLACES
from m2flow.engines.contract import (
    NO_AGREEMENT,
    Agreement,
    EngineSettings,
    HeldCheckpoint,
    Objective,
    Sums,
    TrainEngine,
    WeightForm,
    WeightPiece,
    blended,
)
from m2flow.engines.distributed import COLLECTIVE_TIMEOUT, timeout_s_of
from m2flow.engines.distributed.guard import Course, Guard, GuardedPart, Place, is_of_a_collective, named
from m2flow.engines.embedded.trainer import EmbeddedTrain
from m2flow.engines.installed import keep_gloo_here
from m2flow.engines.models import lora, packing, trainer_checkpoint
from m2flow.engines.models.hf_model import checkpoint_tensors, layers
from m2flow.engines.models.trainer_checkpoint import Pieces, PlannedParts
from m2flow.engines.registry import built_in
from m2flow.errors import EngineError, M2FlowError, OutOfMemory, StateLost, is_out_of_memory, naming_host_errors, unexpected
from m2flow.recipe import Model, Optimizer
from m2flow.samples import Batch, Ragged, group_keys

_WAIT = datetime.timedelta(minutes=10)
"""A rank that waits longer for the others raises, in a start or where none of the trainer's own times is set: another one is gone, or
hangs, or is not doing the same."""
MEANING = (
    "Seconds that a rank waits in a collective, by default 600: longer than any pass, step or checkpoint takes another one. Then the step "
    "ends, with the rank that hangs and its call, pass and layer in the error, and the run goes on from its last checkpoint."
)
"""The meaning of `COLLECTIVE_TIMEOUT`."""


_NAMED = re.compile(re.escape(named(0)).replace("0", r"\d+", 1))
"""How what a rank tells begins, if it is said already which one; it may have heard it from another."""


_HERE = "m2flow/trainer/here/{}"
"""The key by which a rank tells in the store that it has come."""


class _Gloo(type(dist.ProcessGroupGloo)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, dist.ProcessGroupGloo)


class SharedGloo(dist.ProcessGroupGloo, metaclass=_Gloo):  # type: ignore[misc]
    """Gloo whose groups in this process have one device. By default each has its own, with a thread that wakes a hundred times a second:
    a layout has up to twenty groups, and eight idle ranks would keep a core busy."""

    devices: ClassVar[list[Any]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        if not self.devices:
            names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
            made = [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
            self.devices.extend(made or [dist.ProcessGroupGloo.create_default_device()])
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout, options._threads = self.devices, timeout, 2 * len(self.devices)
        super().__init__(store, rank, size, options)


class Ranks:
    """This process among the ranks of its trainer. `open`, `close` and everything else is collective."""

    _open: ClassVar[list[Ranks]] = []
    """Open instances in this process, which share torch's one process group."""
    _hooks: ClassVar[list[Callable[..., object]]] = []
    """The former `sys.excepthook`, which torch replaces and never restores."""
    _leaving: ClassVar[list[Callable[[], object]]] = []
    """Called in place of `destroy_process_group`, for libraries that keep groups of their own."""

    def __init__(self, settings: EngineSettings) -> None:
        self.rank = settings.rank
        self.count = settings.num_ranks
        self._device = torch.device(settings.device)
        self._rendezvous = settings.rendezvous
        self.course = Course(settings.rank)
        self._timeout = datetime.timedelta(seconds=timeout_s_of(settings.options))
        self._hang_detector: HangDetector | None = None

    def open(self, leave: Callable[[], object] | None = None) -> None:
        """Join the other ranks. The trainers of one worker have the same ranks; they join once, and each has a group of its own.

        Args:
            leave: how a library that has groups of these ranks too takes its leave, when the last trainer closes.
        Raises:
            EngineError: they did not all come.
        """
        self.course.at("rendezvous")
        if not dist.is_initialized():
            self._join_group()
        self._open.append(self)
        self._behind = ThreadPoolExecutor(1, "m2flow-checkpoint")
        if leave is not None:
            self._leaving.append(leave)
        if self.count > 1:
            number = self._open.index(self)
            self._hang_detector = HangDetector(self.rank, self.count, number, self.course, _WAIT.total_seconds(), "Ranks that start")
            self._hang_detector.open()
            PLACES.append(self.course.words)
        self.group = dist.new_group(list(range(self.count)), timeout=_WAIT)
        self.course.at("loading")

    def _join_group(self) -> None:
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(self._device.index or 0)
        self._hooks.append(sys.excepthook)
        if not self._rendezvous.startswith("tcp:"):  # All are on this host.
            keep_gloo_here(os.environ)
        dist.distributed_c10d.ProcessGroupGloo = SharedGloo
        where: dict[str, Any] = {"init_method": self._rendezvous}
        store: Any = None
        if self.count == 1 and not self._rendezvous:
            where = {"store": dist.HashStore()}
        try:
            if self.count > 1:
                store = next(dist.distributed_c10d.rendezvous(self._rendezvous, self.rank, self.count, timeout=_WAIT))[0]
                store.set_timeout(_WAIT)
                store.set(_HERE.format(self.rank), "")
                where = {"store": dist.PrefixStore("default_pg", store)}
            dist.init_process_group(backend, rank=self.rank, world_size=self.count, timeout=_WAIT, **where)
        except (RuntimeError, ValueError, OSError) as error:
            sys.excepthook = self._hooks.pop()
            SharedGloo.devices.clear()
            # torch has counted the group that did not come about, and the store's keys have that number: later ranks would wait for others.
            dist.distributed_c10d._world.group_count = 0
            missing = [str(rank) for rank in range(self.count) if store is not None and not store.check([_HERE.format(rank)])]
            who = f"rank {', '.join(missing)} of this trainer did not come to the start within {_WAIT.total_seconds():g} s; " * bool(
                missing
            )
            raise EngineError(
                f"{who}rank {self.rank} of {self.count} did not meet the others at {self._rendezvous}: {error}",
                now="The log of the rank that is missing (logs/) says why it did not come.",
            ) from error

    def close(self) -> None:
        if self not in self._open:
            return
        self._behind.shutdown()
        if self._hang_detector is not None:
            PLACES.remove(self.course.words)
            self._hang_detector.close()
            self._hang_detector = None
        if hasattr(self, "group"):
            dist.destroy_process_group(self.group)
            del self.group  # Its threads end with the last reference, and until then wake a hundred times a second.
        self._open.remove(self)
        if not self._open:
            (self._leaving or [dist.destroy_process_group])[0]()
            self._leaving.clear()
            sys.excepthook = self._hooks.pop()
            SharedGloo.devices.clear()  # One ends with the last of its groups.
            gc.collect()  # Modules that were spread over ranks refer to each other, and to groups.

    def end_of(self, start: Callable[[], None]) -> None:
        """Start, and wait until all ranks have. Raises what a rank did, on all that have met."""
        try:
            start()
        except Exception as error:
            if self.count > 1 and hasattr(self, "group") and not is_of_a_collective(error):
                self.agree(error if isinstance(error, M2FlowError) else unexpected("start", error))
            raise
        if self.count > 1:
            self.agree(None)

    def plan_parts(self, directory: Path, tensors: Mapping[str, Tensor | Pieces]) -> PlannedParts:
        """Plan who writes what of a checkpoint in parts; all but the first rank begin, in a thread. Collective."""
        planned = PlannedParts(directory, tensors, self.group, dist.distributed_c10d._get_default_store())
        if self.rank > 0:
            self._behind.submit(planned.write)
        return planned

    @property
    def timeout_s(self) -> float:
        """Seconds that ranks wait for each other."""
        return self._timeout.total_seconds()

    def neighbours(self, count: int) -> Any:
        """A group of neighbouring ranks: 0 to count - 1, the next, and so on. It lives until the process's last trainer is closed."""
        return self.among([list(range(first, first + count)) for first in range(0, self.count, count)])

    def among(self, members: Sequence[Sequence[int]]) -> Any:
        """The group of this rank, of several that together have each rank once. It lives as those of `neighbours`."""
        groups = [dist.new_group(list(of_one), timeout=_WAIT) for of_one in members]
        return next(group for group, of_one in zip(groups, members, strict=True) if self.rank in of_one)

    def strided(self, count: int, stride: int) -> Ranks:
        """These, with the group of so many of them that are `stride` apart, of each `count * stride` neighbours. It lives as those of
        `neighbours`."""
        starts = (first + i for first in range(0, self.count, count * stride) for i in range(stride))
        found = copy.copy(self)
        found.group = self.among([list(range(start, start + count * stride, stride)) for start in starts])
        return found

    def watch(self) -> None:
        """From here on no collective of this process waits longer than the option says, and where a rank hangs is known to the others."""
        if self.count == 1:
            return
        self.limit(*dist.distributed_c10d._world.pg_map, wait=self._timeout)
        if self._hang_detector is not None:
            self._hang_detector.wait_at_most(
                self._timeout.total_seconds(), f"The option {COLLECTIVE_TIMEOUT} of the trainer says so: ranks"
            )

    def hung(self, error: Exception) -> StateLost | None:
        """What is to be said in place of an error of a call: who hangs, if that was the reason."""
        return None if self._hang_detector is None or isinstance(error, StateLost) else self._hang_detector.hung(error)

    def finished(self, work: Any) -> None:
        """Wait for a send or a receive as long as for a collective: Gloo's have the time of their group's creation."""
        if self._device.type == "cpu":
            work.wait(self._timeout)
        else:
            work.wait()

    def limit(self, *groups: Any, wait: datetime.timedelta = _WAIT) -> None:
        """Have collectives of further groups wait no longer than those of the trainer's own."""
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(wait, group)

    def agree(self, error: M2FlowError | None) -> None:
        """Raise on every rank if one of them has an error.

        Raises:
            M2FlowError: its own on a rank that has one; on the others, the error of the first rank that has one, of the same kind where
                that was out of memory.
        """
        failed = torch.tensor([self.count if error is None else self.rank], device=self._device)
        dist.all_reduce(failed, dist.ReduceOp.MIN, group=self.group)
        first = int(failed)
        if first == self.count:
            return
        told = json.dumps([False, ""] if error is None else [is_out_of_memory(error), error.what[:4096]])
        is_memory, words = json.loads(self.words_of(first, told))
        if error is not None:
            raise error
        said = words if _NAMED.match(words) else named(first) + words
        # All try a smaller micro-batch where one was out of memory.
        raise OutOfMemory(said) if is_memory else EngineError(said)

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Add up each number over the ranks, in the order of ranks. All pass the same names."""
        values = torch.tensor(list(sums.values()), dtype=torch.float64, device=self._device)
        parts = [torch.empty_like(values) for _ in range(self.count)]
        dist.all_gather(parts, values, group=self.group)
        return dict(zip(sums, torch.stack(parts).sum(0).tolist(), strict=True))

    def gather(self, values: npt.NDArray[np.float64]) -> list[npt.NDArray[np.float64]]:
        """Gather each rank's values, float64 [any], on every rank."""
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(values)], device=self._device), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.float64, device=self._device)
        padded[: len(values)] = torch.from_numpy(np.ascontiguousarray(values))
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(parts, padded, group=self.group)
        return [part[: int(size)].cpu().numpy() for part, size in zip(parts, sizes, strict=True)]

    def most(self, count: int) -> int:
        """The maximum over the ranks."""
        value = torch.tensor([count], device=self._device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return int(value)

    def wait(self) -> None:
        """Wait until every rank is here."""
        self.most(0)

    def words_of(self, rank: int, words: str) -> str:
        """What one of the ranks says, on every rank."""
        text = words.encode()
        size = torch.tensor([len(text)], device=self._device)
        dist.broadcast(size, rank, group=self.group)
        body = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        if rank == self.rank:
            body.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(body, rank, group=self.group)
        return bytes(body.cpu().numpy()).decode(errors="replace")


class HangDetector:
    """A thread that tells the other ranks where this one is, in the process group's store, once it has been there for half the time that
    they wait. So in normal work nothing is told.

    Args:
        number: of the trainer, among those of the process. wait_s, who: how long which ranks wait.
    """

    def __init__(self, rank: int, count: int, number: int, course: Course, wait_s: float, who: str) -> None:
        self._rank, self._count, self._course = rank, count, course
        self.wait_at_most(wait_s, who)
        self._keys = [f"m2flow/trainer/{number}/place/{rank}" for rank in range(count)]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tell_now_and_then, name="m2flow-watch-ranks", daemon=True)
        self._store: Any = None

    def wait_at_most(self, wait_s: float, who: str) -> None:
        """From here on the ranks wait so long. Arguments as of the class."""
        self._wait_s, self._who, self._period_s = wait_s, who, min(wait_s / 8, 2.0)

    def open(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._store = None

    def _tell_now_and_then(self) -> None:
        has_told = False
        while not self._is_over.wait(self._period_s):
            place = self._course.place() if self._course.for_s > self._wait_s / 2 else None
            is_long = place is not None
            if is_long or has_told:
                with suppress(RuntimeError):  # Whoever keeps the store is gone.
                    self._store.set(self._keys[self._rank], json.dumps([time.time(), place] if is_long else None))
            has_told = is_long

    def hung(self, error: Exception) -> StateLost | None:
        """Who hangs, if an error of a call here came of waiting for it."""
        if not is_of_a_collective(error):
            return None
        own, places = self._course.place(), dict[int, Place]()
        deadline = time.monotonic() + 2 * self._period_s  # By then each rank that hangs, or waits for it, has told.
        while len(places) < self._count - 1 and time.monotonic() < deadline:
            time.sleep(self._period_s / 4)
            with suppress(RuntimeError):
                places.update(self._told())
        hanging = [f"rank {rank} of this trainer hangs: {place.words()}" for rank, place in places.items() if not place.waits]
        if not hanging:
            silent = [str(rank) for rank in range(self._count) if rank != self._rank and rank not in places]
            if not silent or "imed out" not in str(error):
                return None  # Each waits for another, or one is gone, which its own process tells.
            hanging = [f"rank {', '.join(silent)} of this trainer does not say where it is: it is gone, or keeps the interpreter's lock"]
        waits = [f"rank {rank} waits for it ({place.work})" for rank, place in places.items() if place.waits]
        waits += [f"rank {self._rank} waited for it ({own.work})"] if own is not None else []
        now = f"{self._who} wait for each other for {self._wait_s:g} s. The ranks' logs may say more."
        return StateLost("; ".join([*hanging, *waits]), now=now)

    def _told(self) -> Iterator[tuple[int, Place]]:
        for rank, key in enumerate(self._keys):
            if rank != self._rank and self._store.check([key]) and (told := json.loads(self._store.get(key))) is not None:
                at_s, place = told
                if time.time() - at_s < 3 * self._period_s:
                    yield rank, Place(*place)


_ITERATED = ("weights", "adapters", "base", "weight_pieces")
"""Calls of an engine that yield tensors by name."""
_CALLS = ("accumulate", "apply", "logprobs", "top_logprobs", "values", "scores", "save", "held_checkpoint", "load", "copy_from", "discard")


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of an engine that notes where it is; raises `StateLost` in place of a collective's error where another rank hangs."""

    @functools.wraps(method)
    def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with engine._ranks.course.during(name):
            try:
                return method(engine, *args, **kwargs)
            except Exception as error:
                if (lost := engine._ranks.hung(error)) is not None:
                    raise lost from error
                raise

    return call


def _watched_items(name: str, method: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """As `_watched`, of a call that yields tensors. Its place lasts until the last one has been used, since others wait for the next.

    Pieces of weights are sent by each rank alone: the call ends on all of them when it has ended on each, or has failed on one.
    """

    @functools.wraps(method)
    def call(engine: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        ranks: Ranks = engine._ranks
        meets = name == "weight_pieces" and ranks.count > 1
        with ranks.course.during(name):
            try:
                for item in method(engine, *args, **kwargs):
                    ranks.course.at(f"at {item[0]}")
                    yield item
            except GeneratorExit as end:
                if meets:
                    why = end.__context__  # What who reads the pieces raised.
                    with suppress(M2FlowError, RuntimeError):
                        ranks.agree(
                            why if isinstance(why, M2FlowError) else EngineError("it did not send all of its pieces of the weights")
                        )
                raise
            except Exception as error:
                if (lost := ranks.hung(error)) is not None:
                    raise lost from error
                raise
            if meets:
                _watched(name, lambda _: ranks.agree(None))(engine)

    return call


def shares(num_tokens: Sequence[int], groups: Sequence[int], count: int, *, is_whole: bool = False) -> list[list[int]]:
    """Assign rows to `count` ranks by whole groups (a prompt goes through the model once), the largest first to the least loaded rank.

    A group with more tokens than an even share is split, unless `is_whole`. A function of the batch alone: every rank comes to the same.

    >>> shares([5, 5, 1, 1, 1], [0, 0, 1, 1, 2], 2)
    [[0, 2, 3], [1, 4]]
    """
    fair = math.inf if is_whole else sum(num_tokens) / count
    pieces: dict[tuple[int, int], list[int]] = {}
    totals: dict[int, float] = {}
    for row, group in enumerate(groups):
        totals[group] = totals.get(group, 0.0) + num_tokens[row]
    for row, group in enumerate(groups):
        pieces.setdefault((group, row if totals[group] > fair else -1), []).append(row)
    sizes = {key: sum(num_tokens[row] for row in rows) for key, rows in pieces.items()}
    found: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for key in sorted(pieces, key=lambda key: (-sizes[key], pieces[key][0])):
        least = loads.index(min(loads))
        found[least] += pieces[key]
        loads[least] += sizes[key]
    return [sorted(rows) for rows in found]


def stopping_if_it_fails(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Make of a trainer's `start` one that stops the trainer if it raises: who has met other ranks leaves them, and may start again.

    It notes where it is, as `_watched`, and ends on all ranks when it has ended on each, or has failed on one.
    """

    @functools.wraps(start)
    def started(engine: Any) -> None:
        with engine._ranks.course.during("start"):
            try:
                engine._ranks.end_of(functools.partial(start, engine))
                engine._ranks.watch()
            except BaseException as error:
                lost = engine._ranks.hung(error) if isinstance(error, Exception) else None
                engine.stop()
                if lost is not None:
                    raise lost from error
                raise

    return started


class Box(NamedTuple):
    """What a rank holds of a tensor."""

    values: Tensor
    start: tuple[int, ...]
    """Where it begins in the tensor."""
    holder: int
    """This rank's number among those that hold the same box."""
    num_holders: int


def _without_memory(tensor: Tensor) -> Tensor:
    """The shape and type of a tensor, whole also where ranks hold parts."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _within(view: Tensor, shape: Sequence[int], start: Sequence[int], values: Tensor) -> tuple[tuple[int, ...], Tensor] | None:
    """What a box is of a view of its tensor, which is itself a box: where it begins there, and its values. None: they do not meet.

    Args:
        view: of the tensor, without memory; of its last dimensions, at one place of the others. shape: the tensor's.
    """
    origin = [int(place) for place in np.unravel_index(view.storage_offset(), shape)] if shape else []
    size = [*[1] * (len(shape) - view.ndim), *view.shape]
    low = [max(first, begin) for first, begin in zip(origin, start, strict=True)]
    high = [min(o + n, s + m) for o, n, s, m in zip(origin, size, start, values.shape, strict=True)]
    if any(first >= last for first, last in zip(low, high, strict=True)):
        return None
    piece = values[tuple(slice(first - begin, last - begin) for first, last, begin in zip(low, high, start, strict=True))]
    lead = len(shape) - view.ndim
    return tuple(first - begin for first, begin in zip(low, origin, strict=True))[lead:], piece.reshape(piece.shape[lead:])


# Shapes: N samples, T tokens under the loss mask.

_T = TypeVar("_T")


class RankedTrain(EmbeddedTrain):
    """Share the embedded trainer's passes out over ranks. The model is called through `_root`, which `start` makes."""

    _has_boxes: ClassVar[bool] = False
    """Whether each rank knows which box of each tensor it holds."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in _CALLS:
            setattr(cls, name, _watched(name, getattr(cls, name)))
        for name in _ITERATED if RankedTrain in cls.__bases__ else [name for name in _ITERATED if name in vars(cls)]:
            setattr(cls, name, _watched_items(name, getattr(cls, name)))

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        super().__init__(model, settings)
        self._ranks = Ranks(settings)
        self._root: Any = None
        self._is_partial = False
        """Whether a pass has failed since the last step, so that gradients lack some."""

    @property
    def _num_alike(self) -> int:
        """Number of neighbouring ranks that hold parts of the same layers or sequences, and so see the same samples. The first of them
        reports the results."""
        return 1

    @property
    def _share_number(self) -> int:
        """Which share of a batch this rank sees."""
        return self._ranks.rank // self._num_alike

    @property
    def _reporters(self) -> Sequence[int]:
        """By share, the rank that reports its results."""
        return range(0, self._ranks.count, self._num_alike)

    def _backward(self, loss: Tensor) -> None:
        """Run backward; with it, or in `_sum_gradients`, gradients are summed over the ranks."""
        loss.backward()

    def _sum_gradients(self) -> None:
        """Sum before an optimiser step what backward left to be summed. Collective."""

    def _own_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The model's tensors, of which this rank may have parts, by name. A tied one once: by object, since parts may be empty, and share
        an address."""
        seen: set[int] = set()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    @abstractmethod
    def _set(self, tensor: Tensor, value: Tensor) -> None:
        """Set one of the model's tensors to a value that every rank has whole."""

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        batch = self._to_train(batch, objective.loss)
        num_masked = packing.num_masked(batch.ragged("loss_mask"))
        metrics, agreement = dict[str, float](), NO_AGREEMENT
        if num_masked.any():
            own, weight = self._share(batch, num_masked, is_whole="group_ids" in objective.loss.needs)
            terms, metrics, of_own = self._together(lambda: self._terms(own, objective.loss, counts=weight > 0))
            self._backward(terms.sum() * weight)
            counted = weight if self._ranks.rank in self._reporters else 0.0
            metrics = self._ranks.total({name: value * counted for name, value in metrics.items()})
            if "same_weights" in batch:
                agreement = self._agreed(of_own if counted else NO_AGREEMENT)
        return Sums.of_passes(batch, int(num_masked.sum()), metrics, agreement)

    def _total(self, counts: Tensor) -> Tensor:
        """The sum over the ranks; of each share as often as there are ranks that see it. A rank that had no part of them may bring none."""
        rows, columns = (self._ranks.most(size) for size in counts.shape)
        found = counts.to(self._settings.device) if counts.numel() else torch.zeros(rows, columns, device=self._settings.device)
        dist.all_reduce(found, group=self._ranks.group)
        return found

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        if self._is_partial:
            self.discard()
            raise EngineError("the gradient lacks a micro-batch that failed", now="discard() it, and accumulate() all again.")
        self._ranks.course.at("gradient reduction")
        self._sum_gradients()
        self._ranks.course.at("optimizer step")
        stepped = self._together(lambda: self._optimizers.step(optimizer, denominator))
        return {**stepped, **self._expert_loads()}

    def discard(self) -> None:
        super().discard()
        self._is_partial = False

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        return None

    def load(self, path: str) -> None:
        self._together(lambda: super(RankedTrain, self).load(path))

    def _agreed(self, own: Agreement) -> Agreement:
        """Combine the agreements of all ranks' samples, in the order of ranks."""
        parts = self._ranks.gather(np.array([own.num_tokens, own.total, own.largest, own.total_k3], np.float64))
        return Agreement.of_all([Agreement(int(count), *map(float, numbers)) for count, *numbers in parts])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor whole on every rank, one after the other; collective where ranks hold parts."""
        for name, tensor in lora.whole_state(self._model, self._whole):
            yield from checkpoint_tensors(self._model, name, tensor)

    def weight_forms(self) -> Sequence[WeightForm] | None:
        if not self._has_boxes or lora.is_adapted(self._model):  # What is sent of adapted weights is a sum, which is made of whole ones.
            return None
        state = lora.whole_state(self._model, lambda tensor: nullcontext(_without_memory(tensor)))
        forms = (form for name, whole in state for form in checkpoint_tensors(self._model, name, whole))
        return [WeightForm(name, str(like.dtype).removeprefix("torch."), tuple(like.shape)) for name, like in forms]

    def weight_pieces(self) -> Iterator[WeightPiece]:
        for name, tensor in self._held_tensors():
            box = self._box(tensor)
            values, start = box.values.detach(), list(box.start)
            if values.ndim and box.num_holders > 1:  # Ranks that hold the same send a part of it each.
                first, end = (len(values) * number // box.num_holders for number in (box.holder, box.holder + 1))
                values, start[0] = values[first:end], start[0] + first
            elif box.holder:
                continue
            for part, view in checkpoint_tensors(self._model, name, _without_memory(tensor)):
                found = _within(view, tensor.shape, start, values)
                if found is not None:
                    yield WeightPiece(part, *found)

    def _held_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the model's tensors of which this rank sends a part, by the module's names."""
        return self._own_tensors()

    def _box(self, tensor: Tensor) -> Box:
        """What this rank holds of one of the model's tensors, where `_has_boxes`."""
        return Box(tensor, (0,) * tensor.ndim, self._ranks.rank, self._ranks.count)

    def copy_from(self, source: TrainEngine, share: float = 1.0) -> None:
        if share == 1 and self._copy_adapters_only(source):
            return
        given, waiting = iter(source.weights()), dict[str, Tensor]()
        for name, tensor in self._own_tensors():
            if not (name := lora.plain_name(name)):  # Adapters add nothing yet: what they are beside is all that the other has.
                continue
            with self._whole(tensor) as held:
                full = held.clone()
            for part, view in checkpoint_tensors(self._model, name, full):
                while part not in waiting and (found := next(given, None)) is not None:
                    waiting[found[0]] = found[1].clone()  # It may be whole only until the next one.
                if part in waiting:
                    view.copy_(blended(view, waiting.pop(part), share))
            self._set(tensor, full)
        for _ in given:  # All ranks go to the end.
            pass

    def read_adapters(self, path: str) -> list[Tensor]:
        return self._together(lambda: super(RankedTrain, self).read_adapters(path))

    def scores(self, batch: Batch) -> Batch:
        self._check_head("score", "scores")
        ordered = batch.in_order()
        tokens, mask = self._together(lambda: packing.scored_tokens(self._codec, ordered, self._longest))

        exchanges = Batch(ordered.ids, {"tokens": tokens, "loss_mask": mask})
        scores = self._spread(ordered, tokens, mask, lambda runs: self._scored([exchanges.take(rows) for rows in runs]))[:, 0]
        if not np.isfinite(scores).all():
            raise EngineError(
                f"the reward model {self._source.path} gave a score that is not finite",
                now="Check the reward model's weights and dtype; bfloat16 or float32 hold more than float16.",
            )
        return Batch(ordered.ids, {"reward": scores}).select(batch.ids)

    def _scored(self, exchanges: Sequence[Batch]) -> list[npt.NDArray[Any]]:
        """The head's number of each exchange, whose last token alone is under the mask."""
        found = []
        for batch in exchanges:
            tokens, mask = batch.ragged("tokens"), batch.ragged("loss_mask")
            packed = packing.pack(batch.ids, tokens, mask, device=self._settings.device, share_prompts=False)
            found.append(self._model_outputs(packed, None)["values"].double().cpu().numpy())
        return found

    def _write_together(self, path: Path, tensors: Mapping[str, Tensor | Pieces], state: Mapping[str, object]) -> None:
        """Have each rank write what it has of a checkpoint's tensors, and the first the rest. What was at `path` is there until all is."""
        is_first, parts = self._ranks.rank == 0, self._place_of_parts(path)
        self._ranks.course.at("writing parts of a checkpoint")
        self._together(lambda: trainer_checkpoint.write_parts(parts, tensors, self._ranks.group))
        self._together(lambda: trainer_checkpoint.save(str(path), self._model, self._codec, state, parts=parts) if is_first else None)

    def _place_of_parts(self, path: Path) -> Path:
        """An empty directory beside a checkpoint, in which its parts are written. Collective."""
        parts = path.with_name(f".{path.name}.parts")
        self._together(lambda: _emptied(parts) if self._ranks.rank == 0 else None)
        return parts

    def _held_together(
        self, path: Path, tensors: Mapping[str, Tensor | Pieces], state: Mapping[str, object], model: Any
    ) -> HeldCheckpoint | None:
        """Have each rank copy what it has of a checkpoint's tensors, and write it while the engine goes on. Collective.

        Args:
            model: gives the checkpoint's names to all of the module's.
        """
        parts = self._place_of_parts(path)
        held = {name: trainer_checkpoint.held_part(tensor) for name, tensor in tensors.items()}
        self._ranks.course.at("planning parts of a checkpoint")
        planned = self._ranks.plan_parts(parts, held)
        if self._ranks.rank > 0:
            return None
        state = trainer_checkpoint.on_host(dict(state), {}, copy=True)

        def write() -> None:
            planned.write()
            planned.finish(self._ranks.timeout_s)
            trainer_checkpoint.save(str(path), model, self._codec, state, parts=parts)

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in trainer_checkpoint.weights_in_parts(path):
                yield from checkpoint_tensors(model, name, tensor)

        return HeldCheckpoint(write, weights)

    def _forward(self, packed: packing.Packed) -> Tensor:
        output: Tensor = self._root(packed)
        return output[0] if self._source.head == "lm" else output[:, 0].float()

    def _numbers(self, ordered: Batch, output: str, top_k: int) -> npt.NDArray[np.float64]:
        tokens, mask, width = ordered.ragged("tokens"), ordered.ragged("loss_mask"), self._width(output, top_k)

        def compute(rows: Batch) -> Callable[[list[npt.NDArray[np.int64]]], list[npt.NDArray[Any]]]:
            return lambda runs: self._of_runs([rows.take(run) for run in runs], output, top_k)

        if self._recorded(output, top_k) is None:
            return self._spread(ordered, tokens, mask, compute(ordered), width)
        # Of all tokens. A sample without masked ones goes through no model: its rank would not do what the others do.
        rows = np.flatnonzero(packing.num_masked(mask))
        passed = ordered.take(rows)
        own = passed.ragged("tokens")
        found = np.full((len(tokens.values), width), -1.0)
        found[:, 0] = 0.0
        where = np.repeat(np.isin(np.arange(len(ordered)), rows), tokens.lengths)
        found[where] = self._spread(passed, own, Ragged(np.ones(len(own.values), np.bool_), own.offsets), compute(passed), width)
        return found

    def _of_runs(self, runs: Sequence[Batch], output: str, top_k: int) -> list[npt.NDArray[Any]]:
        """The numbers of each run, as `_of_rows`."""
        return [self._of_rows(rows, output, top_k) for rows in runs]

    # What each rank does of a batch

    def _share(self, batch: Batch, num_masked: npt.NDArray[np.int64], *, is_whole: bool) -> tuple[Batch, float]:
        """This rank's samples, and their weight: a rank without any takes the first of the batch, or its group, with weight 0."""
        rows = np.flatnonzero(num_masked)
        groups = group_keys(batch.ids[rows])
        num_shares = self._ranks.count // self._num_alike
        of_ranks = shares(batch.ragged("tokens").lengths[rows].tolist(), groups.tolist(), num_shares, is_whole=is_whole)
        own = rows[of_ranks[self._share_number]]
        return (batch.take(own), 1.0) if len(own) else (batch.take(rows[groups == groups[0]] if is_whole else rows[:1]), 0.0)

    def _cut_into(self, count: int, batch: Batch, weight: float, *, is_whole: bool) -> list[tuple[Batch, float]]:
        """Cut this rank's samples into so many passes through the stages of a pipeline, each with its weight.

        Groups stay together where there are enough of them. A pass without samples takes the first, or its group, with weight 0.
        """
        groups = group_keys(batch.ids)
        of_passes = shares(batch.ragged("tokens").lengths.tolist(), groups.tolist(), count, is_whole=is_whole)
        spare = np.flatnonzero(groups == groups[0]) if is_whole else np.arange(1)
        return [(batch.take(np.array(rows, np.int64) if rows else spare), weight if rows else 0.0) for rows in of_passes]

    def _sums_of(self, passes: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
        """Sum the metrics of passes, each with its weight, on ranks that report; zeros on the others, which do not know the names."""
        reporters = self._reporters
        names: list[str] = json.loads(self._ranks.words_of(reporters[0], json.dumps(list(passes[0][0]))))
        counted = [(metrics, weight) for metrics, weight in passes if weight and self._ranks.rank in reporters]
        return {name: math.fsum(metrics[name] * weight for metrics, weight in counted) for name in names}

    def _spread(
        self,
        batch: Batch,
        tokens: Ragged,
        mask: Ragged,
        compute: Callable[[list[npt.NDArray[np.int64]]], list[npt.NDArray[Any]]],
        width: int = 1,
    ) -> npt.NDArray[np.float64]:
        """Compute `width` numbers for each masked token on one rank each; returns all on every rank, float64 [T, width], in order.

        Args:
            compute: runs of rows, of which every rank has equally many -> their numbers.
        """
        num_masked = packing.num_masked(mask)
        rows = np.flatnonzero(num_masked)
        if not len(rows):
            return np.zeros((0, width))
        num_shares = self._ranks.count // self._num_alike
        of_ranks = [rows[share] for share in shares(tokens.lengths[rows].tolist(), group_keys(batch.ids[rows]).tolist(), num_shares)]
        own = of_ranks[self._share_number]
        runs = [own[run] for run in self._runs(tokens.take(own))] if len(own) else []
        with torch.no_grad():
            runs_of_all = [*runs, *[rows[:1]] * (self._ranks.most(len(runs)) - len(runs))]
            parts = self._together(lambda: compute(runs_of_all))[: len(runs)]
        gathered = self._ranks.gather(np.concatenate([*(part.reshape(-1) for part in parts), np.zeros(0)]))
        starts = np.concatenate(([0], np.cumsum(num_masked)))
        result = np.zeros((int(starts[-1]), width))
        for share, reporter in zip(of_ranks, self._reporters, strict=True):
            where = [np.arange(starts[row], starts[row + 1]) for row in share.tolist()]
            if where:
                result[np.concatenate(where)] = gathered[reporter].reshape(-1, width)
        return result

    def _together(self, work: Callable[[], _T], among: Ranks | None = None) -> _T:
        """Run something that may fail, and fail on every rank, or on each of some, if it fails on one."""
        ranks = among or self._ranks
        try:
            result = work()
        except M2FlowError as error:
            if not is_of_a_collective(error):
                ranks.agree(error)
            raise
        ranks.agree(None)
        return result


def _emptied(directory: Path) -> None:
    """Create a directory, or empty it. Raises HostError: the disk refuses."""
    with naming_host_errors(f"the checkpoint {directory} can't be written"):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)


class ReplicatedTrain(RankedTrain):
    """The embedded trainer on ranks that each hold the whole model: gradients are summed once for each optimiser step.

    For models that fit one device: it moves 2 (r - 1) / r times the gradients a step, where sharding gathers all weights twice for each
    micro-batch. Sums go over ranks in their order, so one number of ranks always gives the same bits. A loss or a layer that raises on one
    rank is an error of all, with the rank, the layer and the pass: `discard` what was added up, and the engine goes on.

    Source: data-parallel training as in PyTorch's DDP (Li et al. 2020, arXiv:2006.15704), without its overlap.
    """

    name = "embedded"
    capabilities = built_in("embedded", "train")
    _has_boxes = True

    @stopping_if_it_fails
    def start(self) -> None:
        self._ranks.open()
        super().start()
        self._root = Root(self._model, self._source.head)
        self._ranks.course.follow(self._model, layers(self._model))

    def stop(self) -> None:
        self._root, self._is_partial = None, False
        super().stop()
        self._ranks.close()

    def save(self, path: str) -> None:
        """Rank 0 saves."""
        self._together(lambda: super(ReplicatedTrain, self).save(path) if self._ranks.rank == 0 else None)

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        """Rank 0 holds it."""
        return self._together(lambda: EmbeddedTrain.held_checkpoint(self, path) if self._ranks.rank == 0 else None)

    def _forward(self, packed: packing.Packed) -> Tensor:
        with self._ranks.course.within("forward"):
            return super()._forward(packed)

    def _backward(self, loss: Tensor) -> None:
        def go_back() -> None:
            with self._ranks.course.within("backward"):
                super(ReplicatedTrain, self)._backward(loss)

        try:
            self._together(go_back)
        except M2FlowError:
            self._is_partial = True
            raise

    def _sum_gradients(self) -> None:
        sum_gradients([one for one in self._model.parameters() if one.requires_grad], self._ranks.group)

    def _whole(self, tensor: Tensor) -> AbstractContextManager[Tensor]:
        return nullcontext(tensor.detach())

    def _set(self, tensor: Tensor, value: Tensor) -> None:
        tensor.detach().copy_(value)


_BUCKET_BYTES = 64 << 20
"""Gradients of replicas that are summed together; a buffer of this size exists meanwhile."""


def sum_gradients(parameters: Sequence[torch.nn.Parameter], group: Any) -> None:
    """Sum the gradients of replicas, some bytes at a time. A parameter that no rank has used keeps none. Collective."""
    used = torch.tensor([one.grad is not None for one in parameters], dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    for one in itertools.compress(parameters, used.tolist()):
        one.grad = torch.zeros_like(one) if one.grad is None else one.grad
    gradients = [one.grad for one in itertools.compress(parameters, used.tolist())]
    while gradients:
        size, together = 0, list[Tensor]()
        while gradients and (not together or (size < _BUCKET_BYTES and gradients[0].dtype == together[0].dtype)):
            together.append(gradients.pop(0))
            size += together[-1].nbytes
        flat = torch.cat([one.flatten() for one in together])
        dist.all_reduce(flat, group=group)
        for one, total in zip(together, flat.split([one.numel() for one in together]), strict=True):
            one.copy_(total.view_as(one))


class Root(torch.nn.Module):  # type: ignore[misc]
    """The module around the model: its forward is what gathers the weights outside the layers. The model's own class stays as it is.

    Its output must be no view: the gathering of the backward pass hangs on it.

    Args:
        has_head: False: the model's last layers are elsewhere, and the output is hidden states.
        chunks: names of the layers that a pass goes through at a time; of all but the last the output is hidden states. None: all at once.
        guard: of the model's parts. What fails in the head after them is noted there, and the output looks like the last part's.
    """

    def __init__(
        self,
        model: Any,
        head: str,
        *,
        has_head: bool = True,
        chunks: Sequence[Sequence[str]] | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._compute = packing.last_hidden if not has_head else packing.batched_logits if head == "lm" else packing.column_scalars
        self._chunks = chunks
        self._guard = guard

    def forward(self, packed: packing.Packed, hidden: Tensor | None = None, chunk: int = 0) -> Tensor:
        """Compute a packed pass, or what a chunk does of it. `hidden` as of `packing.last_hidden`."""
        guard = self._guard
        if guard is None:
            return self._computed(packed, hidden, chunk)
        guard.begin()
        try:
            return self._computed(packed, hidden, chunk)
        except Exception as error:
            if guard.last is None:
                raise
            guard.note("the head", "forward", error)
            heads = [module for name, module in self.model.named_children() if name != self.model.base_model_prefix]
            return GuardedPart(guard, self._computed, torch.nn.ModuleList(heads).parameters, "the head").stand_in(guard.last)

    def _computed(self, packed: packing.Packed, hidden: Tensor | None, chunk: int) -> Tensor:
        if self._chunks is None or len(self._chunks) == 1:
            return self._compute(self.model, packed, hidden)
        # The others are put aside now and not before: who gathers weights looks at the whole module when it is first called.
        base, is_last = self.model.base_model, chunk == len(self._chunks) - 1
        layers, norm = base.layers, base.norm
        base.layers = torch.nn.ModuleList()
        base.layers._modules.update({name: layers._modules[name] for name in self._chunks[chunk]})
        if not is_last:
            base.norm = torch.nn.Identity()
        try:
            return (self._compute if is_last else packing.last_hidden)(self.model, packed, hidden)
        finally:
            base.layers, base.norm = layers, norm

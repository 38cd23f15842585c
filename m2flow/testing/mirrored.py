"""Drive a train engine of several ranks as one: each call is made on every rank, and each rank is a process of its own.

    Followers(3) ---> Mirrored(MyTrain, model, settings, followers): rank 0 in this process, 1 to 3 in theirs

It serves the conformance suite, and experiments with a trainer of several ranks without a run. In a run every rank is a worker's process,
and the controller gives all of them the same tasks.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import numpy.typing as npt

from m2flow.channels.weights import Manifest, PieceWriter, Spread, Written
from m2flow.engines.contract import EngineSettings, HeldCheckpoint, Memory, Objective, Sums, Tensor, TrainEngine, WeightForm
from m2flow.engines.distributed.guard import is_of_a_collective
from m2flow.errors import EngineError, InternalError, M2FlowError
from m2flow.recipe import Model, Optimizer
from m2flow.samples import Batch

_read_written = msgspec.msgpack.Decoder(Written).decode
Factory = Callable[[Model, EngineSettings], TrainEngine]
_PATIENCE_S = 400.0
"""Time-out for a rank, which has to load PyTorch first, on a machine that may be busy."""
_LOADED = ["m2flow.testing.mirrored", "m2flow.engines.distributed.fsdp"]
"""What the process that ranks are forked from has loaded: PyTorch, transformers, and what trainers of several ranks use of them."""


class Followers:
    """The processes of the ranks after the first. They serve any number of engines, one after the other.

    They are forked from one process, which loads PyTorch when the first is made and stays. They have the environment variables of this
    process as they are when they are made, though what is read when PyTorch is loaded was read then. Where one has ended, the next engine
    gets new ones.

    Args:
        count: how many.
        loaded: modules that the process which they are forked from loads first, such as the trainer's: once instead of in each. They may
            disable the collection of garbage, which ranks enable. The first followers of a process say which.
    """

    def __init__(self, count: int, loaded: Sequence[str] = ()) -> None:
        self.count = count
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*loaded, *_LOADED])
        self._environment = dict(os.environ)
        self._stacks = Path(tempfile.mkdtemp(prefix="m2flow-followers-"))
        weakref.finalize(self, shutil.rmtree, self._stacks, ignore_errors=True)
        self._start()

    def _start(self) -> None:
        self._ends, self._processes = list[Connection](), list[ForkServerProcess]()
        with _path_for_others():
            for rank in range(1, self.count + 1):
                mine, theirs = self._context.Pipe()
                (self._stacks / f"rank-{rank}").unlink(missing_ok=True)
                arguments = (theirs, self._environment, self._stacks / f"rank-{rank}")
                process = self._context.Process(target=_serve_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._ends.append(mine)
                self._processes.append(process)

    def renew(self) -> None:
        """Start all of them anew if one has ended."""
        if self.ended():
            for process in self._processes:
                process.kill()  # It may wait for the one that has ended.
            self.close()
            self._start()

    def tell(self, engine: int, method: str, *arguments: object) -> None:
        """Have all ranks call a method of an engine of theirs.

        Raises:
            InternalError: the process of a rank has ended.
        """
        for rank, end in enumerate(self._ends, 1):
            with self._naming_its_end(rank):
                end.send_bytes(cloudpickle.dumps((rank, engine, method, arguments)))

    def wait(self) -> list[str]:
        """Wait for all ranks; returns what each raised, or "".

        Raises:
            InternalError: the process of a rank has ended, or one does not answer.
        """
        for rank, end in enumerate(self._ends, 1):
            if not end.poll(_PATIENCE_S):
                raise InternalError(f"rank {rank} is not where the others are: it did not do what the first one did")
        found = []
        for rank, end in enumerate(self._ends, 1):
            with self._naming_its_end(rank):
                found.append(str(end.recv()))
        return found

    def ended(self) -> str:
        """Name the ranks whose processes have ended, how, and where they were; "": none has."""
        return "; ".join(self._end_of(rank) for rank, process in enumerate(self._processes, 1) if process.exitcode is not None)

    @contextlib.contextmanager
    def _naming_its_end(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._processes[rank - 1].join(_PATIENCE_S)
            raise InternalError(self._end_of(rank)) from error

    def _end_of(self, rank: int) -> str:
        code = self._processes[rank - 1].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"has ended with {code}"
        stack = self._stacks / f"rank-{rank}"
        where = stack.read_text(errors="replace").strip() if stack.exists() else ""
        return f"the process of rank {rank} {how}" + (f", here:\n{where}" if where else "")

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(_PATIENCE_S)


@contextlib.contextmanager
def _path_for_others() -> Iterator[None]:
    """Processes that start meanwhile find the modules that this one does. Python's process that forks does not tell its own the path."""
    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if kept is not None:
            os.environ["PYTHONPATH"] = kept


def _serve_rank(end: Connection, environment: Mapping[str, str], stack: Path) -> None:
    """Run the process of a rank: make engines, and call their methods as told. A signal that ends it writes where that was to `stack`."""
    faulthandler.enable(stack.open("w"))
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # A stop collects garbage, and would look at all that was loaded.
    gc.enable()
    np.random.seed()  # Or all ranks would draw the same.
    engines: dict[int, TrainEngine] = {}
    while True:
        try:
            rank, number, method, arguments = cloudpickle.loads(end.recv_bytes())
        except EOFError:
            return
        try:
            if method == "make":
                factory, model, settings = arguments
                if not engines:  # Or what the factory has loaded.
                    gc.collect()
                    gc.freeze()
                engines[number] = factory(model, replace(settings, rank=rank))
            elif method in ("weights", "adapters", "base", "weight_pieces"):
                for _ in getattr(engines[number], method)():
                    pass
            elif method == "write_pieces":
                manifest, bucket_bytes, folder = arguments
                found = PieceWriter().write(engines[number].weight_pieces(), manifest, bucket_bytes)
                Path(folder, f"written-{rank}").write_bytes(msgspec.msgpack.encode(found))
            elif method == "copy_from":
                engines[number].copy_from(engines[arguments[0]], arguments[1])
            elif method == "adapter_reference":
                role, model, new = arguments
                engines[new] = _not_none(engines[number].adapter_reference(role, model))
            else:
                getattr(engines[number], method)(*arguments)
        except M2FlowError as error:
            end.send(error.what)
        except Exception as error:
            end.send(repr(error))
        else:
            end.send("")


def _not_none(engine: TrainEngine | None) -> TrainEngine:
    assert engine is not None
    return engine


class Mirrored(TrainEngine):
    """Rank 0 of a train engine; the followers repeat each of its calls.

    Raises:
        EngineError: a follower can't make its engine; with its error.
    """

    def __init__(self, factory: Factory, model: Model, settings: EngineSettings, followers: Followers) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="m2flow-ranks-"))
        weakref.finalize(self, shutil.rmtree, self._place, ignore_errors=True)  # For an engine that can't start, or is never stopped.
        where = f"file://{self._place / 'meet'}"
        followers.renew()
        settings = replace(settings, num_ranks=followers.count + 1, rendezvous=where)
        self._followers = followers
        self._own = factory(model, settings)
        self.name, self.capabilities = self._own.name, self._own.capabilities
        self._number = id(self)
        followers.tell(self._number, "make", factory, model, settings)
        if failed := [f"rank {rank} of this trainer can't be made: {words}" for rank, words in enumerate(followers.wait(), 1) if words]:
            raise EngineError("; ".join(failed))

    def start(self) -> None:
        self._on_all_ranks("start")

    def stop(self) -> None:
        import torch.distributed as dist

        try:
            self._on_all_ranks("stop")
        except InternalError:
            if self._followers.ended():
                self._own.stop()
            raise
        shutil.rmtree(self._place, ignore_errors=True)
        if not dist.is_initialized():
            # The last trainer's stop has collected. What was loaded meanwhile (the first checkpoint loads 2,000 modules where DeepSpeed is
            # installed) stays, and the next stop would look at all of it.
            gc.freeze()

    def onload(self) -> None:
        self._on_all_ranks("onload")

    def offload(self) -> None:
        self._on_all_ranks("offload")

    def rest(self) -> None:
        self._on_all_ranks("rest")

    def accumulate(self, batch: Batch, objective: Objective) -> Sums:
        sums: Sums = self._on_all_ranks("accumulate", batch, objective)
        return sums

    def apply(self, optimizer: Optimizer, denominator: float) -> Mapping[str, float]:
        metrics: Mapping[str, float] = self._on_all_ranks("apply", optimizer, denominator)
        return metrics

    def discard(self) -> None:
        self._on_all_ranks("discard")

    def logprobs(self, batch: Batch) -> Batch:
        return self._rows("logprobs", batch)

    def top_logprobs(self, batch: Batch, top_k: int) -> Batch:
        return self._rows("top_logprobs", batch, top_k)

    def values(self, batch: Batch) -> Batch:
        return self._rows("values", batch)

    def scores(self, batch: Batch) -> Batch:
        return self._rows("scores", batch)

    def num_training_tokens(self, batch: Batch) -> npt.NDArray[np.int64]:
        return self._own.num_training_tokens(batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._gathered("weights")

    def weight_forms(self) -> Sequence[WeightForm] | None:
        return self._own.weight_forms()

    def spread(self, bucket_bytes: int) -> Spread | None:
        """The weights as the ranks hold them, as in a run; None: they are gathered."""
        forms = self._own.weight_forms()
        return None if forms is None else Spread(forms, lambda manifest: self._written(manifest, bucket_bytes))

    def _written(self, manifest: Manifest, bucket_bytes: int) -> list[Written]:
        self._followers.tell(self._number, "write_pieces", manifest, bucket_bytes, str(self._place))
        try:
            own = PieceWriter().write(self._own.weight_pieces(), manifest, bucket_bytes)
        except M2FlowError:
            self._followers.wait()
            raise
        if failed := "; ".join(filter(None, self._followers.wait())):
            raise EngineError(f"not every rank has written its pieces: {failed}")
        files = [self._place / f"written-{rank}" for rank in range(1, self._followers.count + 1)]
        return [own, *(_read_written(file.read_bytes()) for file in files)]

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        return self._gathered("adapters")

    def base(self) -> Iterator[tuple[str, Tensor]]:
        return self._gathered("base")

    def _gathered(self, method: str) -> Iterator[tuple[str, Tensor]]:
        self._followers.tell(self._number, method)
        with self._naming_who_ended():
            found = list(getattr(self._own, method)())
        self._heard(method)
        return iter(found)

    def copy_from(self, source: TrainEngine, share: float = 1.0) -> None:
        assert isinstance(source, Mirrored)
        self._followers.tell(self._number, "copy_from", source._number, share)
        with self._naming_who_ended():
            self._own.copy_from(source._own, share)
        self._heard("copy_from")

    def adapter_reference(self, role: str, model: Model) -> TrainEngine:
        other = copy.copy(self)
        other._place = self._place / "beside"
        other._number = id(other)
        self._followers.tell(self._number, "adapter_reference", role, model, other._number)
        with self._naming_who_ended():
            other._own = _not_none(self._own.adapter_reference(role, model))
        self._heard("adapter_reference")
        return other

    def memory(self) -> Memory:
        return self._own.memory()

    def save(self, path: str) -> None:
        self._on_all_ranks("save", path)

    def held_checkpoint(self, path: str) -> HeldCheckpoint | None:
        held: HeldCheckpoint | None = self._on_all_ranks("held_checkpoint", path)
        return held

    def load(self, path: str) -> None:
        self._on_all_ranks("load", path)

    def _rows(self, method: str, batch: Batch, *arguments: object) -> Batch:
        rows: Batch = self._on_all_ranks(method, batch, *arguments)
        return rows

    def _on_all_ranks(self, method: str, *arguments: object) -> Any:
        """Call a method on all ranks; returns rank 0's result, or raises its error if every rank raises."""
        self._followers.tell(self._number, method, *arguments)
        with self._naming_who_ended():
            try:
                result = getattr(self._own, method)(*arguments)
            except M2FlowError:
                if not all(self._followers.wait()):
                    raise InternalError(f"{method} failed on rank 0 and not on all others") from None
                raise
        self._heard(method)
        return result

    @contextlib.contextmanager
    def _naming_who_ended(self) -> Iterator[None]:
        """Raise which rank's process has ended, if that may be why rank 0 fails: one that is killed takes a moment to end."""
        try:
            yield
        except Exception as error:
            deadline = time.monotonic() + 1
            while not (ended := self._followers.ended()) and is_of_a_collective(error) and time.monotonic() < deadline:
                time.sleep(0.01)
            if ended:
                raise InternalError(ended) from error
            raise

    def _heard(self, method: str) -> None:
        if any(words := self._followers.wait()):
            raise InternalError(f"{method} failed on some ranks: {words}")
